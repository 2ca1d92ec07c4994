"""The config of every row of data but the text: it trains and is reported."""

import json

import numpy as np
import pytest
import small_data

from experiments import reference, report
from experiments.run import run_config

# config file -> the dataset that it is about
CONFIGS = {
    "configs/translation.py": "pairs",
    "configs/reviews.py": "labelled",
    "configs/recall.py": "recall",
    "studies/known_answers/two_heads_beat_one.py": "endpoints",
    "studies/known_answers/one_wide_beats_many_narrow.py": "farthest",
    "configs/cora.py": "graph",
    "configs/scan.py": "rows",
}
DRAWN = ("recall", "endpoints", "farthest")
"""Datasets that are not read but made."""


def tiny(name, folder):
    """The config at its scale for tests, on the small data."""
    config, source = reference.config_module(name).get_config("tiny"), CONFIGS[name]
    data, length, _ = getattr(small_data, source)(folder)
    if source == "rows":
        config.data.make, config.model.vocab_size = data.make, 7
    elif source not in DRAWN:
        config.data.path = data.path
    if source == "graph":  # a graph for every device of the tests
        config.train.batch_size = config.train.evaluation.batch_size = 8
    assert source in ("rows", "labelled", *DRAWN) or config.train.length == length
    return config


def test_every_row_has_a_config():
    of_byte_lm = {"text", "tokens", "huggingface"}  # byte_lm.py has a word for each
    assert {*CONFIGS.values()} - {"graph"} | of_byte_lm == {
        name for name in small_data.DATASETS if not name.endswith("_packed")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_and_is_reported(name, tmp_path):
    (tmp_path / "data").mkdir()
    config = tiny(name, tmp_path / "data")
    config.train.seeds = config.train.seeds[:1]
    (result,) = run_config(config, tmp_path / "run")
    assert result.status == "complete"
    [metrics] = (tmp_path / "run").glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.open()]
    losses = [np.mean(row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert all(np.isfinite(result.scores.heldout[metric.name]) for metric in result.task.metrics)
    report.write([tmp_path / "run"])
    told = (tmp_path / "run" / "report.md").read_text()
    assert result.task.metrics[0].unit in told
    for baseline in result.scores.baselines.get(result.task.metrics[0].name, {}):
        assert baseline in told
