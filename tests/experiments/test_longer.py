"""More steps on a run that has ended: the numbers are those of a run that was always as long."""

import dataclasses

import pytest
from config_files import everything

from attnlab import lab
from attnlab.training.loggers import read_metrics
from experiments.configs import byte_lm
from experiments.run import run_config


def run(folder, text, steps, schedule):
    config = byte_lm.get_config("tiny")
    config.data.path, config.train.steps, config.train.seeds = str(text), steps, (0,)
    config.train.schedule.update(name=schedule, decay_share=0.4)
    [result] = run_config(config, folder)
    return dataclasses.replace(result, timing=lab.Timing())


# 18 and 27 end between two log lines.
@pytest.mark.slow
def test_it_ends_as_if_it_had_always_been_so_long(tmp_path, nine_letters, capsys):
    text, short, whole = nine_letters, tmp_path / "short", tmp_path / "whole"
    ended = run(short, text, 18, "constant")
    longer, asked = run(short, text, 27, "constant"), run(whole, text, 27, "constant")
    assert "resuming at step 18" in capsys.readouterr().err
    assert longer == asked
    assert longer.scores.heldout["loss"] != ended.scores.heldout["loss"]
    rows = [
        [r["train/loss"] for r in read_metrics(f / "runs/seed0/metrics.jsonl") if "train/loss" in r]
        for f in (short, whole)
    ]
    assert rows[0][-3:] == rows[1][-3:]  # steps 20, 25 and 27


@pytest.mark.parametrize(("schedule", "common"), [("cosine", 3), ("warmup_stable_decay", 13)])
@pytest.mark.slow
def test_a_schedule_that_ends_with_its_steps_cannot(schedule, common, tmp_path, nine_letters):
    first = run(tmp_path / "run", nine_letters, 20, schedule)
    before = everything(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"{schedule}.* step {common}\b"):
        run(tmp_path / "run", nine_letters, 30, schedule)
    with pytest.raises(ValueError, match=r"train\.steps"):
        run(tmp_path / "run", nine_letters, 10, schedule)
    assert everything(tmp_path / "run") == before
    assert run(tmp_path / "run", nine_letters, 20, schedule) == first
