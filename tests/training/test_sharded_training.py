"""Parameters sharded over devices: the same losses, and bytes on each device as reported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep, diagonal
from jax.sharding import PartitionSpec as P

from attnlab import heads, training
from attnlab.data import text
from attnlab.models import FFN, ModelConfig, shard_axes
from attnlab.training import FitOptions, StateSharding, memory, sharding
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES

MODEL = ModelConfig(
    width=32, num_layers=2, heads=heads.Standard(num_heads=4), ffn=FFN(width=24), max_len=8
)
CONFIG = training.TrainConfig(
    steps=20,
    batch_size=8,
    length=8,
    seeds=(3,),
    schedule=training.ScheduleConfig(warmup_steps=2),
    log_every=5,
    evaluation=training.EvaluationConfig(every=20, batch_size=8, windows=20, curve_windows=8),
    checkpoint_every=20,
    optimizer=training.OptimizerConfig(learning_rate=0.01),
)
TEXT = np.random.default_rng(0).integers(1, 3, 4000).cumsum() % 9 + 97
DATASET = text.dataset_of_corpus(text.Corpus("test", TEXT[:3600], TEXT[3600:], ""), CONFIG.length)


def fit(folder, model, mesh, state_sharding, optimizer="adamw"):
    named = dataclasses.replace(CONFIG.optimizer, name=optimizer)
    config = dataclasses.replace(CONFIG, optimizer=named)
    folder.mkdir()
    with (
        Recorder(folder, config.seeds) as records,
        Checkpoints(folder / "checkpoints", say=records.say) as checkpoints,
    ):
        return training.fit(
            model.build(), OBJECTIVES["causal_lm"], training.make_optimizer(config), config,
            DATASET, recorder=records, checkpoints=checkpoints,
            options=FitOptions(mesh=mesh, sharding=state_sharding),
        )  # fmt: skip


def two_by_four():
    return sharding.data_mesh(model_parallel=4, batch_size=8)


def held(tree):
    """Bytes of the parts that lie on each device, the most of any."""
    on: dict = {}
    for a in jax.tree.leaves(tree):
        for part in a.addressable_shards:
            on[part.device] = on.get(part.device, 0) + part.data.nbytes
    return max(on.values())


def compared(tmp_path, capsys, model, over_data, **options):
    one = fit(
        tmp_path / "one", model, sharding.data_mesh(jax.devices()[:1]), StateSharding(), **options
    )
    assert "each device needs" not in capsys.readouterr().err
    spec, mesh = StateSharding(shard_axes(model), over_data), two_by_four()
    eight = fit(tmp_path / "eight", model, mesh, spec, **options)
    for name, value in one.heldout.items():
        assert_close(np.float32(eight.heldout[name]), np.float32(value))
    on_device = held(eight.state)
    assert on_device < held(one.state)
    line = next(s for s in capsys.readouterr().err.splitlines() if "each device needs" in s)
    given = float(line.partition(" for a step, ")[2].split()[0]) * 1e6
    assert abs(given - on_device) < 0.1 * on_device  # the batch is in it
    return eight


# Other test files register layouts of their own.
PACKAGE_LAYOUTS = [n for n, cls in heads.LAYOUTS.items() if cls.__module__.startswith("attnlab.")]


@pytest.mark.parametrize(
    ("name", "plan"), diagonal(PACKAGE_LAYOUTS, ("albert", "separate"), of=("standard",))
)
def test_two_by_four_devices_give_the_losses_of_one(tmp_path, capsys, name, plan):
    layout = heads.LAYOUTS[name](num_heads=4, **SIZES.get(name, {}))
    model = dataclasses.replace(MODEL, heads=layout, sharing=plan)
    compared(tmp_path, capsys, model, over_data=plan == "albert")


SIZES: dict = {"grouped_tied": {"num_kv_heads": 2}}


@pytest.mark.parametrize("optimizer", deep(["adamw", "adafactor", "muon", "lamb"]))
def test_every_optimizers_state_is_sharded_too(tmp_path, capsys, optimizer):
    compared(tmp_path, capsys, MODEL, over_data=True, optimizer=optimizer)


def test_where_weights_lie():
    """Heads and hidden units over "model", moments as their weights, the rest whole or over "data";
    3 key heads are not sharded in 4."""
    layout = heads.Standard(num_heads=12, num_kv_heads=3)
    model = dataclasses.replace(MODEL, width=24, heads=layout)
    params = jax.eval_shape(
        lambda key: model.build().init(key, jnp.zeros((1, 8), int)), jax.random.key(0)
    )["params"]
    moments = jax.eval_shape(optax.adam(0.1).init, params)
    mesh, axes = two_by_four(), shard_axes(model)

    def specs(over_data):
        spec = StateSharding(axes, over_data)
        state = training.TrainState(params, moments, None, None)
        return jax.tree.map(lambda place: place.spec, sharding.state_shardings(mesh, spec, state))

    assert params["layers"]["attention"]["k"].shape == (2, 24, 3, 2)
    for over_data, q, k, down in [
        (False, (None, None, "model", None), (None,) * 4, (None, "model", None)),
        (True, (None, "data", "model", None), (None, "data", None, None), (None, "model", "data")),
    ]:
        found = specs(over_data)
        for tree in (found.params, found.opt_state[0].mu, found.opt_state[0].nu):
            layers = tree["layers"]
            assert layers["attention"]["q"] == P(*q)
            assert layers["attention"]["k"] == P(*k)
            assert layers["ffn"]["down"] == P(*down)
    word = [specs(over_data).params["embedding"] for over_data in (False, True)]
    assert word == [P(None, None), P("data", None)]
    assert specs(True).opt_state[0].count == P()


def test_a_run_that_does_not_fit_says_so():
    """Two arrays of 0.36 MB, and their product."""
    shape = jax.ShapeDtypeStruct((300, 300), jnp.float32)
    step = jax.jit(jnp.matmul).lower(shape, shape).compile()
    assert "1.08 MB for a step, 0.72 MB of it" in memory.check_memory(step, None)
    assert memory.check_memory(step, 2 * 10**6).endswith("it has 2.00 MB")
    with pytest.raises(ValueError, match=r"train\.accumulate"):
        memory.check_memory(step, 10**6)


def test_groups_that_devices_cannot_make():
    with pytest.raises(ValueError, match="model_parallel 3"):
        sharding.data_mesh(model_parallel=3)
