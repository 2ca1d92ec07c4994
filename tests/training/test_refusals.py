"""Calls that cannot be right, and the word that the error names."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_runs import MODEL, changed, in_memory

from attnlab import training
from attnlab.data import DataSizes, Text
from attnlab.training import SCHEDULES, Profile, TrainConfig, callbacks, objectives, sharding
from attnlab.training.objectives import OBJECTIVES

config = TrainConfig.from_dict


def untrained(objective="causal_lm", params=None, **fields):
    """A training that ends before its first step."""
    in_memory(model=dataclasses.replace(MODEL, **fields), objective=objective, params=params)


def on_8_devices(evaluation=None, **fields):
    in_memory(changed(evaluation=evaluation, **fields), mesh=sharding.data_mesh())


def decay(name, learning_rate=1e-4):
    optimizer = {"learning_rate": learning_rate}
    return config({"optimizer": optimizer, "schedule": {"name": name}})


def span_corruption(length):
    objectives.input_shapes(OBJECTIVES["span_corruption"], Text().shapes(length))


def check_output(sizes):
    objectives.check_output("text_class", OBJECTIVES["text_class"], MODEL, sizes)


REFUSED = [
    ("seeds", lambda: changed(seeds=())),
    ("seeds", lambda: changed(seeds=(1, 1))),
    ("4294967296", lambda: changed(seeds=(0, 2**32))),
    ("schedule.warmup_steps", lambda: changed(steps=2)),
    ("accumulate 3", lambda: changed(accumulate=3)),
    ("final_learning_rate 0.0003 is above", lambda: decay("cosine")),
    ("final_learning_rate 0.0003 is above", lambda: decay("linear")),
    ("final_learning_rate 0.0003 is above", lambda: decay("warmup_stable_decay")),
    ("adamm", lambda: config({"optimizer": {"name": "adamm"}})),
    ("cosin", lambda: config({"schedule": {"name": "cosin"}})),
    ("optimizer.weight_decay", lambda: config({"optimizer": {"name": "adam"}})),
    ("optimizer.frozen", lambda: config({"optimizer": {"frozen": "("}})),
    ("optimizer.per_head", lambda: config({"optimizer": {"per_head": True}})),
    ("optimizer.base_fan_in", lambda: config({"optimizer": {"name": "sgd", "base_fan_in": 3}})),
    ("rows", lambda: config({"evaluation": {"rows": 9}})),
    (r"attention\.w", lambda: training.frozen_mask("attention.w", {"embedding": jnp.ones(3)})),
    ("tensorboard", lambda: training.Recorder(Path("none"), (0,), loggers=["tensorbord"])),
    ("every=0", lambda: training.callback(every=0)),
    ("has no period", lambda: in_memory(callbacks=[print])),
    ("profile='3:2'", lambda: callbacks.parse_steps("3:2")),
    ("profile='3'", lambda: callbacks.parse_steps("3")),
    ("within 1:20, not 21:30", lambda: in_memory(profile=Profile(Path("none"), 21, 30))),
    ("within 1:20, not 3:2", lambda: in_memory(profile=Profile(Path("none"), 3, 2))),
    ("model_parallel 3", lambda: sharding.data_mesh(model_parallel=3)),
    ("batch_size 12", lambda: sharding.data_mesh(batch_size=12)),
    ("batch_size 12", lambda: on_8_devices(batch_size=12)),
    ("batch_size / accumulate 4", lambda: on_8_devices(accumulate=2)),
    (r"evaluation\.batch_size 7", lambda: on_8_devices({"batch_size": 7})),
    (r"sharding\.data_mesh", lambda: in_memory(mesh=jax.make_mesh((8,), ("batch",)))),
    ("2 tokens", lambda: span_corruption(1)),
    ("1991", lambda: span_corruption(1991)),
    ("model.kind", lambda: untrained(kind="encoder")),
    ("model.vocab_size", lambda: untrained(vocab_size=50)),
    ("values", lambda: untrained("recall")),
    ("1 trees for 3 seeds", lambda: untrained(params=[{}])),
    ("label_smoothing", lambda: objectives.squared_error(jnp.ones(3), jnp.ones(3), 0.1)),
    ("num_classes", lambda: check_output(DataSizes(256, 2))),
]


@pytest.mark.parametrize(("named", "call"), REFUSED)
def test_the_error_names_what_is_wrong(named, call):
    with pytest.raises(ValueError, match=named):
        call()


def test_only_a_rise_after_the_warm_up_is_refused():
    """A final rate equal to the largest is flat; schedules that do not decay do not read it."""
    for name in SCHEDULES:
        decay(name, learning_rate=3e-4)
    for name in ("constant", "inverse_sqrt", "flat_inverse_sqrt"):
        decay(name)
