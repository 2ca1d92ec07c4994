"""More steps on a run that has ended: the numbers are those of a run that was always as long."""

import dataclasses

import numpy as np
import pytest
from conftest import deep

import attnlab
from attnlab.lab.result import read_result
from attnlab.training.loggers import read_metrics
from experiments.configs import byte_lm
from experiments.run import run_config


def run(folder, text, steps, schedule):
    config = byte_lm.get_config("tiny")
    config.data.path = str(text)
    config.train.steps = steps
    config.train.schedule.update(name=schedule, decay_share=0.4)
    config.train.seeds = (0,)
    return run_config(config, folder)[0]


def everything(folder):
    """Every file with its bytes, but who had the folder last."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "lock.json")
    return {p.relative_to(folder): p.read_bytes() for p in files}


# 18 and 27 end between two log lines; of 18 steps the last 7 decay, of 27 the last 11.
@pytest.mark.parametrize(
    "schedule", deep(["warmup_stable_decay", "constant"], "warmup_stable_decay")
)
def test_it_ends_as_if_it_had_always_been_so_long(schedule, tmp_path, nine_letters, capsys):
    begins = {"warmup_stable_decay": 12, "constant": 18}[schedule]
    text, short, whole = nine_letters, tmp_path / "short", tmp_path / "whole"
    ended = run(short, text, 18, schedule)
    weights = attnlab.load_run(short)[1]
    longer, asked = run(short, text, 27, schedule), run(whole, text, 27, schedule)
    assert f"18 steps become 27\n[seed0] resuming at step {begins}" in capsys.readouterr().err
    same_speed = {"seconds": 0.0, "tokens_per_second": 0.0}
    assert dataclasses.replace(longer, **same_speed) == dataclasses.replace(asked, **same_speed)
    assert longer.scores.heldout["loss"] != ended.scores.heldout["loss"]
    rows = [
        [r["train/loss"] for r in read_metrics(f / "runs/seed0/metrics.jsonl") if "train/loss" in r]
        for f in (short, whole)
    ]
    assert rows[0][-3:] == rows[1][-3:]  # steps 20, 25 and 27
    # The run as it ended is whole.
    kept = short / "runs/seed0/ended/18"
    assert read_result(kept) == ended
    kept = attnlab.load_run(kept)[1]
    np.testing.assert_array_equal(kept["embedding"], weights["embedding"])
    assert run(short, text, 27, schedule) == longer


def test_a_schedule_that_ends_with_its_steps_cannot(tmp_path, nine_letters):
    first = run(tmp_path / "run", nine_letters, 20, "cosine")
    before = everything(tmp_path / "run")
    with pytest.raises(ValueError, match="cosine"):
        run(tmp_path / "run", nine_letters, 30, "cosine")
    with pytest.raises(ValueError, match=r"train\.steps"):
        run(tmp_path / "run", nine_letters, 10, "cosine")
    assert everything(tmp_path / "run") == before
    assert run(tmp_path / "run", nine_letters, 20, "cosine") == first
