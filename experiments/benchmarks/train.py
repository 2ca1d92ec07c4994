"""Suites train and nanogpt: one training step, and one whole run, beside their peers."""

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import training
from attnlab.model.config import ModelConfig
from attnlab.training.tasks import TASKS
from experiments.benchmarks.measure import Case, Entry
from experiments.benchmarks.peers import decoders

SMALL_DECODER = ModelConfig(
    vocab_size=256,
    max_len=256,
    width=256,
    num_layers=6,
    num_heads=8,
    ffn_width=1024,
    activation="gelu_tanh",
    readout="own",
    remat=False,  # as the peers
)
TRAINS = training.TrainConfig(batch_size=16, length=256, seeds=(0,))


def step_cases(
    config: ModelConfig = SMALL_DECODER, trains: training.TrainConfig = TRAINS
) -> Iterator[Case]:
    """One optimizer step of the small decoder, from equal weights, on one batch."""
    build = functools.partial(_step_entries, config, trains)
    name, label = "training step of the small decoder", f"{config.num_layers} layers"
    yield Case(name, "training step", label, trains.batch_size * trains.length, build)


def _step_entries(config: ModelConfig, trains: training.TrainConfig) -> list[Entry]:
    model, optimizer = config.build(), training.make_optimizer(trains).transform
    size = (trains.batch_size, trains.length + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size, np.int32)
    task = TASKS["causal_lm"]
    batch = {"tokens": tokens}
    state = jax.jit(lambda: training.init_state(model, task, optimizer, batch, 0))()

    def ours(state, tokens):
        state = state._replace(window_loss=jnp.zeros(()))
        state = training.train_step(model, task, optimizer, state, {"tokens": tokens}, 0)
        return state, state.window_loss

    entries = [_jax_entry("attnlab", ours, state, tokens)._replace(ours=True)]
    parameters = {"attnlab": _count(state.params)}
    for name, scan in {"Linen, nn.scan": True, "Linen, loop": False}.items():
        peer = decoders.LinenDecoder(config, scan=scan)
        params = decoders.linen_params(state.params, peer)
        parameters[name] = _count(params)
        step = functools.partial(decoders.linen_step, peer, optimizer)
        entries.append(_jax_entry(name, step, (params, optimizer.init(params)), tokens))
        if not scan:
            again = _jax_entry(f"{name}, again", step, (params, optimizer.init(params)), tokens)
            entries.append(again._replace(twin=True))
    try:
        run, parameters["torch"] = decoders.torch_step(config, trains, state.params, tokens)
        entries.append(Entry("torch, eager", run))
    except ImportError as error:
        print(f"torch is left out: {error}; pip install attnlab[bench]")
    assert len(set(parameters.values())) == 1, f"numbers of parameters differ: {parameters}"
    print(f"{parameters['attnlab']:,} parameters each")
    check_equal(entries, steps=3)
    return entries


def whole_run_cases(data: str) -> Iterator[Case]:
    """nanoGPT's CPU setting from the start of the process to the held-out loss, one seed."""
    if not data:
        raise ValueError("suite nanogpt needs --data, the folder or file of Tiny Shakespeare")

    def process(*words: str) -> float:
        run = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        loss = float(re.findall(r"held-out ([\d.]+)", run.stdout)[0])
        print(f"{words[0]}: {loss}", flush=True)
        return loss

    def ours() -> float:
        config = "experiments/configs/byte_lm.py:nanogpt_cpu"
        with tempfile.TemporaryDirectory() as folder:
            return process(
                "experiments.run",
                f"--config={config}",
                f"--config.data.path={data}",
                "--config.train.seeds=(0,)",
                f"--workdir={folder}/run",
            )

    def build() -> list[Entry]:
        return [
            Entry("attnlab", ours, ours=True),
            Entry(
                "torch, eager", lambda: process("experiments.benchmarks.peers.torch_nanogpt", data)
            ),
        ]

    name = "nanoGPT's CPU run, start-up included"
    yield Case(name, "whole run", "nanoGPT", 2000 * 12 * 64, build, warm=False)


def _count(params: Any) -> int:
    return sum(a.size for a in jax.tree.leaves(params))


def _jax_entry(name: str, step: Callable, state: Any, tokens: Any) -> Entry:
    """`step` (state, tokens) -> (state, loss), compiled, with its state given back to it."""
    # A copy, because the compiled step overwrites what it is given.
    state, tokens = jax.tree.map(jnp.array, state), jnp.asarray(tokens)
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    memory = compiled.memory_analysis()

    def run() -> float:
        nonlocal state
        state, loss = compiled(state, tokens)
        return float(jax.block_until_ready((state, loss))[1])

    return Entry(name, run, temp_bytes=memory.temp_size_in_bytes if memory else None)


def check_equal(entries: list[Entry], steps: int) -> None:
    """Raises AssertionError unless all entries are one model that learns in one way.

    The losses of the first steps also cover gradients, optimizer, schedule and clipping.
    """
    losses = {e.name: [e.run() for _ in range(steps)] for e in entries}
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[entries[0].name], rtol=1e-3, err_msg=name)
    first = next(iter(losses.values()))
    assert first[-1] < first[0], f"nothing is learnt: {first}"
    print(f"losses agree: {np.round(first, 4).tolist()}")
