"""Parameters sharded over devices: the same losses, and bytes on each device as reported."""

import dataclasses
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import user_environment
from conftest import ROOT, assert_close, diagonal, shape
from jax.sharding import PartitionSpec as P
from small_runs import FAST, SELDOM, changed, fit

from attnlab import heads, training
from attnlab.models import FFN, ModelConfig, param_shapes, shard_axes
from attnlab.training import StateSharding, memory, sharding

MODEL = ModelConfig(
    width=32, num_layers=2, heads=heads.Standard(num_heads=4), ffn=FFN(width=24), max_len=8
)
CONFIG = changed(SELDOM, seeds=(3,), optimizer=FAST)
SIZES: dict = {"grouped_tied": {"num_kv_heads": 2}}
# Other test files register layouts of their own.
PACKAGE_LAYOUTS = [n for n, cls in heads.LAYOUTS.items() if cls.__module__.startswith("attnlab.")]


def two_by_four():
    return sharding.data_mesh(model_parallel=4, batch_size=8)


def held(tree):
    """Bytes of the parts that lie on each device, the most of any."""
    on: dict = {}
    for a in jax.tree.leaves(tree):
        for part in a.addressable_shards:
            on[part.device] = on.get(part.device, 0) + part.data.nbytes
    return max(on.values())


@pytest.mark.parametrize(
    ("name", "plan", "optimizer"),
    [
        *(pytest.param(*one.values, "adamw", marks=one.marks)
          for one in diagonal(PACKAGE_LAYOUTS, ("albert", "separate"), of=("standard",))),
        *(pytest.param("standard", "albert", name, marks=pytest.mark.slow)
          for name in ("adafactor", "muon", "lamb")),
    ],
)  # fmt: skip
def test_two_by_four_devices_give_the_losses_of_one(tmp_path, capsys, name, plan, optimizer):
    """Moments are sharded too, with the plan albert also over "data"."""
    layout = heads.LAYOUTS[name](num_heads=4, **SIZES.get(name, {}))
    model = dataclasses.replace(MODEL, heads=layout, sharing=plan)
    config = changed(CONFIG, optimizer=dataclasses.replace(FAST, name=optimizer))
    one = fit(tmp_path / "one", config, model)
    assert "each device needs" not in capsys.readouterr().err
    spec = StateSharding(shard_axes(model), plan == "albert")
    eight = fit(tmp_path / "eight", config, model, mesh=two_by_four(), sharding=spec)
    for metric, value in one.heldout.items():
        assert_close(np.float32(eight.heldout[metric]), np.float32(value))
    on_device = held(eight.state)
    assert on_device < held(one.state)
    line = next(s for s in capsys.readouterr().err.splitlines() if "each device needs" in s)
    given = float(line.partition(" for a step, ")[2].split()[0]) * 1e6
    assert abs(given - on_device) < 0.1 * on_device  # the batch is in it


HOST = """
import sys
from pathlib import Path

import jax

host = int(sys.argv[1])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, host)
from small_runs import FAST, SELDOM, changed, fit
from attnlab import training

@training.callback(every=2)
def broken(info):
    if info.step == 2 and host == 1:
        raise OSError("no space left on the disk of host 1")

config = changed(SELDOM, steps=6, seeds=(3,), optimizer=FAST)
spec = training.StateSharding(over_data=True)
options = {"mesh": training.sharding.data_mesh(), "sharding": spec, "callbacks": [broken]}
recorder = lambda *given: training.Recorder(*given, writes=host == 0)
fit(Path(sys.argv[3]), config, recorder=recorder, **options)
"""


@pytest.mark.slow
def test_a_callback_that_fails_on_one_host_stops_no_host(tmp_path):
    """The hosts gather sharded parameters together, also for the callbacks that are left."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    folders = str(ROOT), str(ROOT / "tests" / "training")
    environment = user_environment() | {"PYTHONPATH": os.pathsep.join(folders)}
    words = [sys.executable, "-c", HOST]
    hosts = [
        subprocess.Popen([*words, str(i), address, str(tmp_path / "run")], env=environment)
        for i in range(2)
    ]
    assert [host.wait(timeout=600) for host in hosts] == [0, 0]


def test_where_weights_lie():
    """Heads and hidden units over "model", moments as their weights, the rest whole or over "data";
    3 key heads are not sharded in 4."""
    layout = heads.Standard(num_heads=12, num_kv_heads=3)
    model = dataclasses.replace(MODEL, width=24, heads=layout)
    params = param_shapes(model)
    moments = jax.eval_shape(optax.adam(0.1).init, params)
    mesh, axes = two_by_four(), shard_axes(model)

    def specs(over_data):
        spec = StateSharding(axes, over_data)
        state = training.TrainState(params, moments, None, {})
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
    step = jax.jit(jnp.matmul).lower(shape(300, 300), shape(300, 300)).compile()
    assert "1.08 MB for a step, 0.72 MB of it" in memory.check_memory(step, None)
    assert memory.check_memory(step, 2 * 10**6).endswith("it has 2.00 MB")
    with pytest.raises(ValueError, match=r"train\.accumulate"):
        memory.check_memory(step, 10**6)


def test_a_batch_is_sharded_over_the_devices():
    mesh = sharding.data_mesh(batch_size=16)
    batch = sharding.shard_batch(mesh, np.arange(32).reshape(2, 16), axis=1)
    assert_close(batch.sum(), jnp.asarray(496))
    assert batch.sharding.shard_shape(batch.shape) == (2, 2)
