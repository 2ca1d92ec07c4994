"""Suites train and nanogpt: one training step, and one whole run, beside their peers."""

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnlab import training
from attnlab.heads import Standard
from attnlab.models import FFN, Compute, ModelConfig, OutputHead, flops_per_token
from attnlab.sharing import Params, PyTree
from experiments.benchmarks.attention import reason_of
from experiments.benchmarks.measure import Case, Entry, compile_timed, refuse
from experiments.benchmarks.peers import decoders

SMALL_DECODER = ModelConfig(
    vocab_size=256,
    max_len=256,
    width=256,
    num_layers=6,
    heads=Standard(num_heads=8, biases=("q", "k", "v", "o")),
    ffn=FFN(width=1024, activation="gelu_tanh"),
    output=OutputHead(kind="own"),
    compute=Compute(remat=False),  # as the peers
)
TRAINS = training.TrainConfig(batch_size=16, length=256, seeds=(0,))


LINEN = ("Linen, nn.scan", "Linen, loop")
"""Peers in one compiled body, and in one for each layer."""


def step_cases(
    config: ModelConfig = SMALL_DECODER, trains: training.TrainConfig = TRAINS
) -> Iterator[Case]:
    """One optimizer step of the small decoder, from equal weights, on one batch."""
    yield step_case("training step of the small decoder", config, trains, LINEN)


def step_case(
    name: str,
    config: ModelConfig,
    trains: training.TrainConfig,
    linen: Sequence[str],
    *,
    lenient: bool = False,
) -> Case:
    """One optimizer step, from equal weights, on one batch; of `LINEN` the peers of these names.
    `lenient`: a peer that fails says why in its row."""
    build = functools.partial(_step_entries, config, trains, linen, lenient)
    tokens = trains.batch_size * trains.length
    return Case(name, tokens, build, about=_about(config, trains, tokens))


def seeds_case(config: ModelConfig, trains: training.TrainConfig, count: int) -> Case:
    """`count` seeds in one program, beside as many steps of one seed."""
    tokens = count * trains.batch_size * trains.length
    build = functools.partial(_seeds_entries, config, trains, count)
    about = _about(config, trains, tokens)
    return Case(f"{count} seeds at once", tokens, build, about=about)


def _about(config: ModelConfig, trains: training.TrainConfig, tokens: int) -> dict[str, object]:
    """With FLOPs of 3 forward passes, as `sweep` counts."""
    flops = 3.0 * tokens * flops_per_token(config, trains.length)
    sizes = {
        "D": config.width,
        "L": config.num_layers,
        "T": trains.length,
        "dtype": config.compute.dtype,
    }
    return sizes | {"word": "training", "flops": flops}


def _tokens(config: ModelConfig, trains: training.TrainConfig, *first: int) -> np.ndarray:
    size = (*first, trains.batch_size, trains.length + 1)
    return np.random.default_rng(0).integers(0, config.vocab_size, size, np.int32)


def _seeds_entries(config: ModelConfig, trains: training.TrainConfig, count: int) -> list[Entry]:
    model, optimizer = config.build(), training.make_optimizer(trains).transform
    objective, tokens = training.OBJECTIVES["causal_lm"], _tokens(config, trains, count)
    first_batch = {"tokens": tokens[0]}
    start = lambda seed: training.init_state(model, objective, optimizer, first_batch, seed)
    states = jax.jit(jax.vmap(start))(jnp.arange(count))

    def step(state, tokens, seed):
        state = state._replace(window_loss=jnp.zeros(()))
        state = training.train_step(model, objective, optimizer, state, {"tokens": tokens}, seed)
        return state, state.window_loss

    together = training.map_over_seeds(step)
    seeds = jnp.arange(count)
    many = _jax_entry(f"{count} seeds in one program", together, states, tokens, seeds)
    first = jax.tree.map(lambda a: a[0], states)
    alone = _jax_entry(f"1 seed, {count} times", step, first, tokens[0], seeds[0])

    def in_turn() -> float:
        for _ in range(count):
            loss = alone.run()
        return loss

    # Seed 0 has the same weights and tokens in both.
    np.testing.assert_allclose(many.run()[0], alone.run(), rtol=1e-3)
    return [many._replace(ours=True), alone._replace(run=in_turn, ours=True)]


def _step_entries(
    config: ModelConfig, trains: training.TrainConfig, linen: Sequence[str], lenient: bool
) -> list[Entry]:
    model, optimizer = config.build(), training.make_optimizer(trains).transform
    tokens, objective = _tokens(config, trains), training.OBJECTIVES["causal_lm"]
    batch = {"tokens": jnp.asarray(tokens)}
    state = jax.jit(lambda: training.init_state(model, objective, optimizer, batch, 0))()
    parameters = {"attnlab": _count(state.params)}

    def ours(state, tokens):
        state = state._replace(window_loss=jnp.zeros(()))
        state = training.train_step(model, objective, optimizer, state, {"tokens": tokens}, 0)
        return state, state.window_loss

    def of_linen(name: str) -> Entry:
        peer = decoders.LinenDecoder(config, scan=name == "Linen, nn.scan")
        params = decoders.linen_params(state.params, peer)
        parameters[name] = _count(params)
        step = functools.partial(decoders.linen_step, peer, optimizer)
        return _jax_entry(name, step, (params, optimizer.init(params)), tokens)

    def of_torch() -> Entry:
        run, parameters["torch"] = decoders.torch_step(config, trains, state.params, tokens)
        return Entry("torch, eager", run)

    entries = [_jax_entry("attnlab", ours, state, tokens)._replace(ours=True)]
    makers: dict[str, Callable[[], Entry]] = {n: functools.partial(of_linen, n) for n in linen}
    for name, make in (makers | {"torch, eager": of_torch}).items():
        try:
            entries.append(make())
            if name == "Linen, loop":
                entries.append(make()._replace(name=f"{name}, again", twin=True))
        except ImportError as error:
            print(f"torch is left out: {error}; pip install attnlab[bench]")
        except Exception as error:
            if not lenient:
                raise
            entries.append(refuse(name, reason_of(error)))
    assert len(set(parameters.values())) == 1, f"numbers of parameters differ: {parameters}"
    print(f"{parameters['attnlab']:,} parameters each")
    return check_equal(entries, steps=3, lenient=lenient)


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
    yield Case(name, 2000 * 12 * 64, build, warm=False)


def _count(params: Params) -> int:
    return sum(a.size for a in jax.tree.leaves(params))


def _jax_entry(name: str, step: Callable, state: PyTree, *given: ArrayLike) -> Entry:
    """`step` (state, *given) -> (state, loss), compiled, with its state given back to it."""
    # A copy, because the compiled step overwrites what it is given.
    state, given = jax.tree.map(jnp.array, state), jax.tree.map(jnp.asarray, given)
    compiled, seconds, temp = compile_timed(step, state, *given, donate=0)

    def run() -> Any:
        nonlocal state
        state, loss = compiled(state, *given)
        return np.asarray(jax.block_until_ready((state, loss))[1])

    return Entry(name, run, temp_bytes=temp, compile_seconds=seconds)


def check_equal(entries: list[Entry], steps: int, lenient: bool = False) -> list[Entry]:
    """The entries. Raises AssertionError unless all are one model that learns in one way; of a
    peer, where `lenient`, that is a row.

    The losses of the first steps also cover gradients, optimizer, schedule and clipping.
    """
    checked: list[Entry] = []
    first: list[float] = []
    for entry in entries:
        try:
            losses = [] if entry.refusal else [float(entry.run()) for _ in range(steps)]
            first = first or losses
            np.testing.assert_allclose(losses, first if losses else [], 1e-3, err_msg=entry.name)
        except Exception as error:
            if not lenient or entry.ours:
                raise
            entry = refuse(entry.name, reason_of(error))
        checked.append(entry)
    assert first[-1] < first[0], f"nothing is learnt: {first}"
    print(f"losses agree: {np.round(first, 4).tolist()}")
    return checked
