"""A source, a task, an optimizer and a schedule of a user's own train by flag: nothing else knows
of them."""

import json

import numpy as np
import optax
import pytest
from chains import FOLLOW, Chains

from attnlab.data import DATASETS
from attnlab.training import OPTIMIZERS, SCHEDULES
from attnlab.training.objectives import OBJECTIVES
from experiments.configs import byte_lm
from experiments.run import run_config

HERE = {}  # what the optimizer of this file was asked for


def sign_descent(config, rate, axes):
    HERE["beta1"] = config.beta1
    return optax.chain(optax.sign_sgd(1.0), optax.scale_by_schedule(rate))


def halves(config, peak, steps):
    return lambda step: 0.01 * 0.5 ** (step // 50)


@pytest.mark.slow
def test_rows_of_a_user_train_by_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "chains", Chains)
    monkeypatch.setitem(OBJECTIVES, "follow", FOLLOW)
    monkeypatch.setitem(OPTIMIZERS, "signs", sign_descent)
    monkeypatch.setitem(SCHEDULES, "halves", halves)
    config = byte_lm.get_config("data=chains,tiny")
    flags = {
        "task": "follow", "data.count": 9, "data.step": 2, "model.vocab_size": 9,
        "train.steps": 100, "train.optimizer.name": "signs", "train.schedule.name": "halves",
        "train.optimizer.beta1": 0.7, "train.log_every": 100,
    }  # fmt: skip
    config.update_from_flattened_dict(flags)
    results = run_config(config, tmp_path / "run")
    assert np.mean([result.scores.heldout["accuracy"] for result in results]) > 95
    assert HERE == {"beta1": 0.7}
    lines = (tmp_path / "run/runs/seed0/metrics.jsonl").read_text().splitlines()
    rates = [
        v for one in map(json.loads, lines) for n, v in one.items() if n == "train/learning_rate"
    ]
    assert rates[-1] == pytest.approx(0.005)  # of the 100th step
