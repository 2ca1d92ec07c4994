"""Entries that do the same work -> times, ratios, verdicts and a table.

Machines are noisy, so no time is reported alone. Each round takes every entry once, in a new
order; a ratio is taken within a round; a row is the median ratio with its 95 % bootstrap interval.
One peer is entered twice: its row (A/A) is the noise of this very run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from attnlab.nested import JSON
from attnlab.sharing import PyTree

# A round calls a fast entry until this time is filled, so that the clock does not matter.
SECONDS_PER_ROUND = 0.02
FEWEST_ROUNDS = 3
# Of the median ratio of times, ours / peer.
NOT_SLOWER = 1.10


class Entry(NamedTuple):
    """One thing to time."""

    name: str
    run: Callable[[], PyTree]
    """Does the work once, waits for it and returns what it made."""
    ours: bool = False
    twin: bool = False
    """True for the second entry of a peer, which stands right after the first."""
    temp_bytes: int | None = None
    """What XLA sets aside beside arguments and results; None where it is not XLA's."""
    flops: float | None = None
    """Of its matrix products; None where they cannot be counted."""
    refusal: str = ""
    """Why it cannot do this work; then `run` is never called."""
    compile_seconds: float | None = None
    """Tracing included; None where nothing is compiled beforehand."""
    peak_bytes: int | None = None
    """The most that the device held, where this entry raised it; None where another had before, or
    the device does not tell."""


class Bar(NamedTuple):
    """What ours has to reach beside one peer: a share of its time, and of its memory."""

    peer: str
    time: float
    memory: float | None = None


class Case(NamedTuple):
    """Entries that do the same work; ours is the first."""

    name: str
    tokens: int
    """Of one call."""
    build: Callable[[], list[Entry]]
    """Makes the entries, finds them equal; called when the turn of the case comes."""
    warm: bool = True
    """Run every entry once before the first round; False where start-up is what is timed."""
    bars: tuple[Bar, ...] = ()
    most_rounds: int | None = None
    about: Mapping[str, object] = MappingProxyType({})
    """The sizes by name, for who reads many cases."""


class Interval(NamedTuple):
    """A median and the ends of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


class Measurement(NamedTuple):
    """What was measured of one entry."""

    name: str
    ours: bool
    twin: bool
    seconds: list[float]
    """Of each round; empty where the entry refuses."""
    ratio: Interval | None
    """Over rounds, of ours / this; in an A/A line of the peer's second entry / its first. None
    where this or ours refuses."""
    verdict: str
    temp_bytes: int | None
    flops: float | None
    compile_seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def milliseconds(self) -> float | None:
        """Median over rounds."""
        return 1e3 * float(np.median(self.seconds)) if self.seconds else None

    @property
    def best_milliseconds(self) -> float | None:
        """Of the fastest round. Far below the median where other work held the cores."""
        return 1e3 * float(np.min(self.seconds)) if self.seconds else None

    def to_dict(self) -> JSON:
        """For JSON, all numbers side by side."""
        ratio = self.ratio or (None, None, None)
        times = {"milliseconds": self.milliseconds, "best_milliseconds": self.best_milliseconds}
        return self._asdict() | times | dict(zip(("ratio", "low", "high"), ratio, strict=True))


def refuse(name: str, reason: str, ours: bool = False) -> Entry:
    """An entry that only says why it cannot do the work."""

    def run() -> None:
        raise RuntimeError(reason)

    return Entry(name, run, ours=ours, refusal=reason)


def compile_timed(
    call: Callable, *args: PyTree, donate: int | None = None
) -> tuple[jax.stages.Compiled, float, int | None]:
    """The call compiled for these arguments, seconds, and the temporary bytes that XLA plans."""
    began = time.perf_counter()
    compiled = jax.jit(call, donate_argnums=donate).lower(*args).compile()
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    return compiled, seconds, memory.temp_size_in_bytes if memory else None


def measure(
    entries: Sequence[Entry], rounds: int, *, warm: bool = True, most_seconds: float = math.inf
) -> list[Measurement]:
    """Times every entry once per round, in an order that each round draws anew.

    Where all rounds would take more than `most_seconds` there are fewer, at least `FEWEST_ROUNDS`.
    """
    rng = np.random.default_rng(0)
    able = [i for i, entry in enumerate(entries) if not entry.refusal]
    # A time of warming up may hold what is done only once, so the second call counts.
    first = {i: (_seconds(entries[i].run, 1), _seconds(entries[i].run, 1))[1] for i in able if warm}
    calls = {i: max(1, math.ceil(SECONDS_PER_ROUND / max(s, 1e-6))) for i, s in first.items()}
    if one_round := sum(calls[i] * first[i] for i in first):
        rounds = min(rounds, max(FEWEST_ROUNDS, int(min(most_seconds / one_round, rounds))))
    seconds = np.full((rounds, len(entries)), np.nan)
    for row in seconds:
        for i in rng.permutation(able):
            row[i] = _seconds(entries[i].run, calls.get(i, 1))
    return [measurement(entries, i, seconds, rng) for i in range(len(entries))]


def _seconds(run: Callable[[], PyTree], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def measurement(
    entries: Sequence[Entry], i: int, seconds: np.ndarray, rng: np.random.Generator
) -> Measurement:
    """Of entry `i`, of the seconds [rounds, entries]."""
    entry, own = entries[i], seconds[:, i]
    above, below = (i, i - 1) if entry.twin else (0, i)
    known = not (entry.refusal or entries[above].refusal)
    ratio = interval(seconds[:, above] / seconds[:, below], rng) if known else None
    if entry.refusal:
        verdict = f"refuses: {entry.refusal}"
    elif entry.twin:
        verdict = "A/A, the noise"
    elif entry.ours:
        verdict = "ours, as another row" if i else "ours"
    elif ratio is None:
        verdict = "ours refuses"
    else:
        verdict = "not slower" if ratio.low <= 1.0 and ratio.median <= NOT_SLOWER else "SLOWER"
    return Measurement(
        name=entry.name,
        ours=entry.ours,
        twin=entry.twin,
        seconds=[] if entry.refusal else own.tolist(),
        ratio=ratio,
        verdict=verdict,
        temp_bytes=entry.temp_bytes,
        flops=entry.flops,
        compile_seconds=entry.compile_seconds,
        peak_bytes=entry.peak_bytes,
    )


def interval(ratios: np.ndarray, rng: np.random.Generator) -> Interval:
    """Median of per-round ratios and the ends of its 95 % bootstrap interval."""
    draws = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(float(np.median(ratios)), float(low), float(high))


def fastest_peer(measured: Sequence[Measurement]) -> tuple[str, Interval, str] | None:
    """Name, ratio and verdict of the peer that took the least median time; None where no peer
    ran."""
    peers = [
        (one.name, one.ratio, one.verdict)
        for one in measured
        if one.ratio is not None and not one.ours and not one.twin
    ]
    return max(peers, key=lambda peer: peer[1].median, default=None)


def judge(bar: Bar, measured: Sequence[Measurement]) -> str:
    """What ours has to reach beside a peer, what it reached, and whether that is enough."""
    peer = next((one for one in measured if one.name == bar.peer and one.ratio is not None), None)
    if peer is None or peer.ratio is None:
        return f"bar beside {bar.peer}: it did not run"
    met = peer.ratio.median <= bar.time
    text = f"at most {bar.time:.2f} of the time of {bar.peer}: {peer.ratio.median:.3f}"
    if bar.memory is not None and peer.temp_bytes and measured[0].temp_bytes is not None:
        share = measured[0].temp_bytes / peer.temp_bytes
        met = met and share <= bar.memory
        text += f"; at most {bar.memory:.2f} of its XLA temporary memory: {share:.3f}"
    return f"bar: {text}: {'met' if met else 'NOT MET'}"


def table(case: Case, measured: Sequence[Measurement], rounds: int) -> str:
    """Markdown."""
    lines = [
        f"### {case.name}, {rounds} rounds",
        "",
        "| | ms | best | tokens/s | time, ours / this | 95 % | ours is | XLA temp MiB "
        "| FLOPs, ours / this |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ours = measured[0].flops
    for one in measured:
        time, ratio = ["", "", ""], ["", ""]
        if one.milliseconds is not None and one.best_milliseconds is not None:
            speed = f"{case.tokens / one.milliseconds * 1e3:,.0f}"
            time = [f"{one.milliseconds:.4g}", f"{one.best_milliseconds:.4g}", speed]
        if one.ratio is not None:
            ratio = [f"{one.ratio.median:.3f}", f"{one.ratio.low:.3f} to {one.ratio.high:.3f}"]
        temp = "" if one.temp_bytes is None else f"{one.temp_bytes / 2**20:.1f}"
        flops = f"{ours / one.flops:.3f}" if ours and one.flops else ""
        lines.append("| " + " | ".join([one.name, *time, *ratio, one.verdict, temp, flops]) + " |")
    lines.append("")
    peer = fastest_peer(measured)
    if peer is not None:
        name, (median, low, high), verdict = peer
        lines.append(
            f"fastest peer: {name}, time ours / this {median:.3f} ({low:.3f} to {high:.3f}): "
            f"{verdict}"
        )
    lines += [judge(bar, measured) for bar in case.bars]
    return "\n".join(lines).rstrip()
