"""A tiny model, a training of 20 steps and a text of 4 kB, and `fit` in a folder."""

import dataclasses

import jax
import numpy as np

from attnlab import heads, training
from attnlab.data import text
from attnlab.models import FFN, ModelConfig
from attnlab.training import Checkpoints, FitOptions, Recorder, sharding
from attnlab.training.objectives import OBJECTIVES

MODEL = ModelConfig(
    width=16, num_layers=2, heads=heads.Standard(num_heads=2), ffn=FFN(width=24), max_len=8
)
CONFIG = training.TrainConfig(
    steps=20,
    batch_size=8,
    length=8,
    seeds=(0, 1, 5),
    schedule=training.ScheduleConfig(warmup_steps=2),
    log_every=5,
    evaluation=training.EvaluationConfig(every=10, batch_size=8, windows=20, curve_windows=8),
    checkpoint_every=5,
)
# Each byte is the last one plus 1 or 2, modulo 9: ln 9 nats without context, ln 2 with it.
TEXT = np.random.default_rng(0).integers(1, 3, 4000).cumsum() % 9 + 97
DATASET = text.dataset_of_corpus(text.Corpus("test", TEXT[:3600], TEXT[3600:], ""), CONFIG.length)
FAST = training.OptimizerConfig(learning_rate=1e-2)


def changed(config=CONFIG, /, evaluation=None, **fields):
    """A config with other fields, some of them of its `evaluation`."""
    evaluation = dataclasses.replace(config.evaluation, **evaluation or {})
    return dataclasses.replace(config, evaluation=evaluation, **fields)


SELDOM = changed(log_every=10_000, evaluation={"every": 10_000}, checkpoint_every=10_000)


def one_device():
    return sharding.data_mesh(jax.devices()[:1])


def fit(
    folder, config=CONFIG, model=MODEL, *, objective="causal_lm", dataset=DATASET,
    recorder=Recorder, mesh=None, **options,
):  # fmt: skip
    """On one device unless `mesh` says otherwise."""
    folder.mkdir(exist_ok=True)
    with (
        recorder(folder, config.seeds) as records,
        Checkpoints(folder / "checkpoints", say=records.say) as checkpoints,
    ):
        return training.fit(
            model.build(),
            OBJECTIVES.get(objective, objective),
            training.make_optimizer(config),
            config,
            dataset,
            recorder=records,
            checkpoints=checkpoints,
            options=FitOptions(mesh=mesh or one_device(), **options),
        )


def in_memory(
    config=CONFIG, model=MODEL, objective="causal_lm", mesh=None, optimizer=None, **options
):
    options = FitOptions(mesh=mesh or one_device(), **options)
    task = OBJECTIVES[objective]
    return training.fit_in_memory(
        model.build(), task, config, DATASET, optimizer=optimizer, options=options
    )


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


class Killed(Exception):
    """In place of SIGKILL (which tests/lab sends)."""
