"""Speed beside peers: python -m experiments.bench --suite=train [--rounds=21] [--out=DIR]

Machines are noisy, so no time is reported alone. Each round times every entry once, in a new
order; a ratio is taken within a round; the table shows the median ratio with its 95 % bootstrap
interval. One peer is entered twice: its row (A/A) is the noise of this very run.

Ours is "not slower" than a peer when the interval starts at 1.00 or below and the median ratio
of times (ours / peer) is at most 1.10.
"""

import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from attnlab import train
from attnlab.models import ModelConfig
from attnlab.tasks import TASKS
from experiments import launch, peers


class Entry(NamedTuple):
    """One thing to time."""

    name: str
    run: Callable[[], float]
    """Does the work once, waits for it and returns a number that all entries of a case share."""
    parameters: int
    temp_bytes: int | None = None
    """What XLA sets aside beside arguments and results; None where it is not XLA's."""
    twin: bool = False
    """True for the second entry of a peer, which stands right after the first."""


class Case(NamedTuple):
    """Entries that do the same work; ours is the first."""

    name: str
    tokens: int
    """Of one call."""
    entries: list[Entry]
    warm: bool = True
    """Run every entry once before the first round; False where start-up is what is timed."""


class Row(NamedTuple):
    """One line of a table."""

    name: str
    tokens_per_second: float
    best_tokens_per_second: float
    """Of the fastest round. Far above the median where other work held the cores."""
    ratio: float
    """Median over rounds of ours / peer; in an A/A row of the peer's second entry / its first."""
    low: float
    high: float
    verdict: str
    temp_bytes: int | None
    seconds: list[float]
    """Of each round."""


def train_step_cases() -> Iterator[Case]:
    """One optimizer step of the small decoder, from equal weights, on one batch."""
    # Torch's waiting threads spin by default, which makes it 2 to 4 times slower where others
    # in the process want the cores (measured). Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = ModelConfig(
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
    trains = train.TrainConfig(batch_size=16, length=256, seeds=(0,))
    model, optimizer = config.build(), train.adamw(trains)
    size = (trains.batch_size, trains.length + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size, np.int32)
    state = jax.jit(lambda: train.init_state(model, optimizer, trains.length, 0))()

    def ours(state, tokens):
        state = state._replace(window_loss=jnp.zeros(()))
        state = train.train_step(model, TASKS["causal_lm"], optimizer, state, tokens, 0)
        return state, state.window_loss

    entries = [_jax_entry("attnlab", ours, state, tokens)]
    for name, scan in {"Linen, nn.scan": True, "Linen, loop": False}.items():
        peer = peers.LinenDecoder(config, scan=scan)
        params = peers.linen_params(state.params, peer)
        step = functools.partial(peers.linen_step, peer, optimizer)
        entries.append(_jax_entry(name, step, (params, optimizer.init(params)), tokens))
        if not scan:
            again = _jax_entry(f"{name}, again", step, (params, optimizer.init(params)), tokens)
            entries.append(again._replace(twin=True))
    try:
        entries.append(
            Entry("torch, eager", *peers.torch_step(config, trains, state.params, tokens))
        )
    except ImportError as error:
        print(f"torch is left out: {error}; pip install attnlab[bench]")
    _check_equal(entries, steps=3)
    yield Case("training step of the small decoder", trains.batch_size * trains.length, entries)


def whole_run_cases() -> Iterator[Case]:
    """nanoGPT's CPU setting from the start of the process to the held-out loss, one seed."""
    if not _DATA.value:
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
                f"--config.data.path={_DATA.value}",
                "--config.train.seeds=(0,)",
                f"--workdir={folder}/run",
            )

    entries = [
        Entry("attnlab", ours, 0),
        Entry("torch, eager", lambda: process("experiments.torch_nanogpt", _DATA.value), 0),
    ]
    yield Case("nanoGPT's CPU run, start-up included", 2000 * 12 * 64, entries, warm=False)


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

    params = state.params if hasattr(state, "params") else state[0]
    parameters = sum(a.size for a in jax.tree.leaves(params))
    return Entry(name, run, parameters, memory.temp_size_in_bytes if memory else None)


def _check_equal(entries: list[Entry], steps: int) -> None:
    """Raises AssertionError unless all entries are one model that learns in one way.

    The losses of the first steps also cover gradients, optimizer, schedule and clipping.
    """
    sizes = {e.name: e.parameters for e in entries}
    assert len(set(sizes.values())) == 1, f"numbers of parameters differ: {sizes}"
    losses = {e.name: [e.run() for _ in range(steps)] for e in entries}
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[entries[0].name], rtol=1e-3, err_msg=name)
    first = next(iter(losses.values()))
    assert first[-1] < first[0], f"nothing is learnt: {first}"
    print(f"{entries[0].parameters:,} parameters each; losses agree: {np.round(first, 4).tolist()}")


def measure(case: Case, rounds: int) -> list[Row]:
    """Times every entry once per round, in an order that each round draws anew."""
    rng = np.random.default_rng(0)
    seconds = np.zeros((rounds, len(case.entries)))
    for entry in case.entries if case.warm else []:
        entry.run()
    for row in seconds:
        for i in rng.permutation(len(case.entries)):
            began = time.perf_counter()
            case.entries[i].run()
            row[i] = time.perf_counter() - began
    rows = []
    for i, entry in enumerate(case.entries):
        above, below = (i, i - 1) if entry.twin else (0, i)
        ratios = seconds[:, above] / seconds[:, below]
        draws = np.median(rng.choice(ratios, (10_000, rounds)), axis=1)
        median, (low, high) = np.median(ratios), np.quantile(draws, [0.025, 0.975])
        verdict = "not slower" if low <= 1.0 and median <= 1.1 else "SLOWER"
        verdict = "A/A, the noise" if entry.twin else verdict if i else "ours"
        rows.append(
            Row(
                name=entry.name,
                tokens_per_second=case.tokens / float(np.median(seconds[:, i])),
                best_tokens_per_second=case.tokens / float(np.min(seconds[:, i])),
                ratio=float(median),
                low=float(low),
                high=float(high),
                verdict=verdict,
                temp_bytes=entry.temp_bytes,
                seconds=seconds[:, i].tolist(),
            )
        )
    return rows


def table(case: Case, rows: list[Row], rounds: int) -> str:
    """Markdown."""
    lines = [
        f"### {case.name}, {rounds} rounds",
        "",
        "| | tokens/s | best | time, ours / this | 95 % | ours is | XLA temp MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        temp = "" if r.temp_bytes is None else f"{r.temp_bytes / 2**20:.1f}"
        speed = f"{r.tokens_per_second:.0f} | {r.best_tokens_per_second:.0f}"
        ratio = f"{r.ratio:.3f} | {r.low:.3f} to {r.high:.3f}"
        lines.append(f"| {r.name} | {speed} | {ratio} | {r.verdict} | {temp} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    packages = ("jax", "jaxlib", "flax", "optax", "torch", "numpy")
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "cores": peers.cores(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: installed.get(name, "missing") for name in packages},
    }


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "train": train_step_cases,
    "nanogpt": whole_run_cases,
}

_SUITE = flags.DEFINE_enum("suite", None, list(SUITES), "What to time.")
_ROUNDS = flags.DEFINE_integer("rounds", 21, "Times each entry runs.", lower_bound=1)
_DATA = flags.DEFINE_string("data", "", "The text of suite nanogpt.")
_OUT = flags.DEFINE_string("out", "", "A folder for the table and its numbers; empty writes none.")


def main() -> None:
    """Prints the table of a suite."""
    suite = str(_SUITE.value)
    report: dict[str, Any] = {"machine": machine(), "cases": []}
    texts = [", ".join(f"{k} {v}" for k, v in report["machine"].items())]
    print(texts[0], flush=True)
    for case in SUITES[suite]():
        rows = measure(case, _ROUNDS.value)
        texts.append(table(case, rows, _ROUNDS.value))
        print(f"\n{texts[-1]}", flush=True)
        report["cases"].append({"name": case.name, "rows": [r._asdict() for r in rows]})
    if _OUT.value:
        folder = Path(_OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{suite}.md").write_text("\n\n".join(texts) + "\n")
        (folder / f"{suite}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    flags.mark_flag_as_required("suite")
    launch.start(main)
