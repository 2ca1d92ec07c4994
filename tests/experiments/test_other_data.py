"""The config of every row of data but the text: it runs, is killed and goes on, and is reported."""

import importlib
import json
import os
import signal

import numpy as np
import pytest
import small_data

from attnlab import training
from attnlab.data import DATASETS
from attnlab.training.metrics import Recorder
from experiments import report, sweep
from experiments.configs import recall
from experiments.running import arm

# config file -> the row of data that it is about
CONFIGS = {
    "translation": "pairs",
    "reviews": "labelled",
    "recall": "recall",
    "two_heads_beat_one": "endpoints",
    "one_wide_beats_many_narrow": "farthest",
    "heads_or_depth": "maxima",
    "cora": "graph",
    "scan": "grain",
}
DRAWN = ("recall", "two_heads_beat_one", "one_wide_beats_many_narrow", "heads_or_depth")
"""Their data are not read but made."""


def tiny(name, folder):
    """The config at its scale for tests, on the small data."""
    config = importlib.import_module(f"experiments.configs.{name}").get_config("tiny")
    data, length, _ = small_data.DATASETS[CONFIGS[name]](folder)
    if name == "scan":
        config.data.make, config.model.vocab_size = data.make, 7
    elif name not in DRAWN:
        config.data.path = data.path
    if name == "cora":  # a graph for every device of the tests
        config.train.batch_size = config.train.eval_batch_size = 8
    assert name in ("scan", "reviews", *DRAWN) or config.train.length == length
    return config


def test_every_row_has_a_config():
    of_byte_lm = {"text", "tokens", "huggingface"}  # byte_lm.py has a word for each
    assert {*CONFIGS.values()} | of_byte_lm == set(DATASETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_and_is_reported(name, tmp_path):
    (tmp_path / "data").mkdir()
    config = tiny(name, tmp_path / "data")
    result = arm.run(config, tmp_path / "run")
    assert result["status"] == "complete"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [np.mean(row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    for metric in result["metrics"]:
        assert np.all(np.isfinite(result[f"heldout_{metric['name']}"]))
    report.write([tmp_path / "run"])
    told = (tmp_path / "run" / "report.md").read_text()
    assert result["metrics"][0]["unit"] in told
    for yardstick in result["yardsticks"].get(result["metrics"][0]["name"], {}):
        assert yardstick in told


@pytest.mark.slow  # test_train.py: the same of fit
@pytest.mark.parametrize("name", CONFIGS)
def test_a_stopped_run_goes_on_with_the_same_bits(name, tmp_path, monkeypatch):
    """SIGTERM in the middle: weights, scores and metrics are those of a run that was left alone."""
    (tmp_path / "data").mkdir()
    config = tiny(name, tmp_path / "data")
    config.train.seeds, config.train.checkpoint_every = (3,), 15
    config.task = "transduction" if name == "translation" else config.task  # nothing is written

    class Stops(Recorder):
        def write(self, step, metrics):
            super().write(step, metrics)
            if step == 10 and "train/loss" in metrics:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(arm, "Recorder", Stops)
    with pytest.raises(training.Stopped, match="stopped at step"):
        arm.run(config, tmp_path / "broken")
    monkeypatch.undo()
    results = [arm.run(config, tmp_path / folder) for folder in ("broken", "whole")]
    scores = [{n: v for n, v in r.items() if n.startswith(("heldout", "train"))} for r in results]
    assert scores[0] == scores[1]
    logs = [(tmp_path / f / "metrics.jsonl").read_text() for f in ("broken", "whole")]
    assert logs[0] == logs[1]


@pytest.mark.slow
def test_recall_over_the_number_of_pairs(tmp_path):
    """Arms with other data by the sweep's own will are compared, and drawn over what varies."""
    arms = {}
    recall.sweep(lambda name, **changes: arms.update({name: changes}), "tiny")
    assert len(arms) == 4
    arms = {name: changes for name, changes in arms.items() if "standard" in name}
    base = recall.get_config("tiny")
    folders = {name.replace(" ", "-"): changes for name, changes in arms.items()}
    configs = {f: sweep.with_changes(base, changes) for f, changes in folders.items()}
    record = {
        "arms": {f: c.to_dict() for f, c in configs.items()},
        "titles": dict(zip(folders, arms, strict=True)),
        "environment": {"config": "experiments/configs/recall.py:tiny"},
    }
    (tmp_path / "config.json").write_text(json.dumps(record))
    for folder, config in configs.items():
        arm.run(config, tmp_path / folder, name=folder)
    report.write([tmp_path])
    told = (tmp_path / "report.md").read_text()
    assert "not trained on the same data" not in told
    assert "Held-out score over pairs" in told
    assert "one of the values said" in (tmp_path / "figures" / "1-width-pairs.svg").read_text()
