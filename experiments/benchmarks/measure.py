"""Measures entries that do the same work in turn, keeps the results, and writes them as tables.

Machines are noisy, so no time is reported alone. Each round runs every entry once, in a new order;
a ratio is taken within a round; a row has the median ratio with its 95 % bootstrap interval. One
peer is entered twice: its row (A/A) is the noise of this run.
"""

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas

from attnlab.atomic import write_atomic
from attnlab.nested import JSON
from attnlab.report.page import table as markdown_table
from attnlab.sharing import PyTree
from experiments.benchmarks.peaks import fraction_of_peak

# A round calls a fast entry until this time is filled, so that the resolution of the clock does not
# matter.
SECONDS_PER_ROUND = 0.02
FEWEST_ROUNDS = 3
NOT_SLOWER = 1.10
"""Largest median ratio of times, ours / peer, of an entry that is not slower."""
RECORDS = "cases.jsonl"
FREE = ("machine", "threads", "load")
"""What may differ when a run is continued: a lent GPU is not always in the same machine."""
MOST_TRIES = 2
"""A case that ended the process so often is not tried again."""
SIZES = ("word", "mode", "dtype", "is_causal", "B", "T", "N", "H", "D", "L", "tokens")
COLUMNS = ("ratio", "low", "high", "milliseconds", "best_milliseconds", "tokens_per_second",
           "of_peak", "compile_seconds", "lowered_lines", "temp_bytes", "cache_bytes",
           "verdict", "trouble")  # fmt: skip


class Entry(NamedTuple):
    """One thing to time."""

    name: str
    run: Callable[[], PyTree]
    """Does the work once, waits for it and returns its result."""
    ours: bool = False
    again: bool = False
    """The second entry of a peer, right after the first."""
    numbers: Mapping[str, float | None] = MappingProxyType({})
    """What is known without timing: what `compile_program` returns, "cache_bytes"."""
    refusal: str = ""
    """Why it cannot do this work; then `run` is never called."""
    same_work: bool = True
    """False: shown for comparison, as another depth is, and never the fastest of a summary."""


class Case(NamedTuple):
    """Entries that do the same work; the first is ours."""

    name: str
    tokens: int
    """Of one call."""
    build: Callable[[], list[Entry]]
    """Makes the entries and checks that they are equal; called when the case is measured."""
    about: Mapping[str, object] = MappingProxyType({})
    """Sizes by name, columns of the CSV file."""
    most_seconds: float = math.inf
    """Of all rounds; if they would take longer there are fewer, but at least `FEWEST_ROUNDS`."""
    warm: bool = True
    """Run every entry before the first round; False where the first call is what is timed."""


def refuse(name: str, reason: str | Exception, ours: bool = False) -> Entry:
    """An entry that cannot do the work, with the reason in one line."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    text = f"{text[:157]}..." if len(text) > 160 else text
    return Entry(name, lambda: None, ours=ours, refusal=text)


def tried(
    name: str, make: Callable[[], Entry], *, ours: bool = False, again: bool = False
) -> list[Entry]:
    """The entry, or one with the reason for which it cannot do the work; none where a library is
    not installed."""
    try:
        entry = make()
    except ImportError as error:
        print(f"{name} is left out: {error}; pip install attnlab[bench]", flush=True)
        return []
    except Exception as error:  # whatever a library raises for what it cannot do
        entry = refuse(name, error)
    return [entry._replace(name=name, ours=ours, again=again)]


def compile_program(
    call: Callable, *args: PyTree, donate: int | None = None
) -> tuple[jax.stages.Compiled, dict[str, float | None]]:
    """`call` compiled for these arguments, without what JAX remembers of an earlier call.

    Returns:
      The program, and its "compile_seconds" (trace + compile), "lowered_lines" and "temp_bytes"
      (what XLA sets aside beside arguments and results).
    """
    began = time.perf_counter()
    lowered = jax.jit(lambda *a: call(*a), donate_argnums=donate).lower(*args)
    program = lowered.compile()
    seconds, memory = time.perf_counter() - began, program.memory_analysis()
    return program, {
        "compile_seconds": seconds,
        "lowered_lines": lowered.as_text().count("\n"),
        "temp_bytes": memory.temp_size_in_bytes if memory else None,
    }


def entry_with_state(step: Callable, state: PyTree, *given: PyTree) -> Entry:
    """`step` (state, *given) -> (state, result), compiled, with its state given back to it."""
    # A copy, because the compiled step overwrites what it is given.
    state, given = jax.tree.map(jnp.array, state), jax.tree.map(jnp.asarray, given)
    program, numbers = compile_program(step, state, *given, donate=0)

    def run() -> PyTree:
        nonlocal state
        state, result = jax.block_until_ready(program(state, *given))
        return result

    return Entry("", run, numbers=numbers)


# ---------------------------------------------------------------- times


def measure(
    entries: Sequence[Entry], rounds: int, *, warm: bool = True, most_seconds: float = math.inf
) -> list[JSON]:
    """Times every entry once a round, in an order that each round draws anew; a row for each."""
    rng = np.random.default_rng(0)
    able = [i for i, entry in enumerate(entries) if not entry.refusal]
    # The first call may do what is done only once, so the second counts.
    first = {i: (_seconds(entries[i].run, 1), _seconds(entries[i].run, 1))[1] for i in able if warm}
    calls = {i: max(1, math.ceil(SECONDS_PER_ROUND / max(s, 1e-6))) for i, s in first.items()}
    seconds = np.full((rounds, len(entries)), np.nan)
    began = time.perf_counter()
    for done, times in enumerate(seconds):
        passed = time.perf_counter() - began
        if done >= FEWEST_ROUNDS and passed * (done + 1) / done > most_seconds:
            seconds = seconds[:done]
            break
        for i in rng.permutation(able):
            times[i] = _seconds(entries[i].run, calls.get(i, 1))
    return [row(entries, i, seconds, rng) for i in range(len(entries))]


def _seconds(run: Callable[[], PyTree], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def row(entries: Sequence[Entry], i: int, seconds: np.ndarray, rng: np.random.Generator) -> JSON:
    """What was measured of entry `i`, as JSON.

    Args:
      seconds: [rounds, entries].

    Returns:
      "ratio", "low", "high": the time of the first entry / that of this one (A/A: this one / the
      one before), median and 95 % interval; "seconds" of each round, none if it refuses.
    """
    entry, times = entries[i], 1e3 * seconds[:, i]
    found: JSON = {name: getattr(entry, name) for name in ("name", "ours", "again", "same_work")}
    found["seconds"] = []
    if entry.refusal:
        return found | {"verdict": f"refuses: {entry.refusal}"}
    found |= {"seconds": seconds[:, i].tolist(), **entry.numbers}
    found |= {"milliseconds": float(np.median(times)), "best_milliseconds": float(times.min())}
    above, below = (i, i - 1) if entry.again else (0, i)
    if entries[above].refusal or entries[below].refusal:
        return found | {"verdict": "ours refuses"}
    ratio, low, high = interval(seconds[:, above] / seconds[:, below], rng)
    if entry.again:
        verdict = "A/A, the noise"
    elif entry.ours:
        other = "ours, as another row" if entry.same_work else "ours, other work"
        verdict = other if i else "ours"
    else:
        verdict = "not slower" if low <= 1.0 and ratio <= NOT_SLOWER else "SLOWER"
    return found | {"ratio": ratio, "low": low, "high": high, "verdict": verdict}


def interval(ratios: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Median of per-round ratios and the ends of its 95 % bootstrap interval."""
    draws = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


# ---------------------------------------------------------------- records


class Records:
    """The results of cases: a line of JSON each, written when it is measured, so that a run may be
    stopped or killed at any moment and continues with the next case.

    Attributes:
      lines: what the numbers depend on, then "begins", "interrupted" and results of cases.
    """

    def __init__(self, folder: Path | None, about: JSON):
        """`about`: device, versions, commit: what the numbers depend on. Without a folder nothing
        is written. Raises ValueError if the folder has numbers of something else."""
        self._path = folder / RECORDS if folder else None
        self.lines: list[JSON] = []
        if self._path and self._path.exists():
            whole, newline, rest = self._path.read_text().rpartition("\n")
            if rest:  # killed while it wrote
                write_atomic(self._path, (whole + newline).encode())
            self.lines = [json.loads(line) for line in whole.splitlines()]
        if not self.lines:
            self.append({"about": about})
        old = self.about
        if differ := [n for n in old | about if old.get(n) != about.get(n) and n not in FREE]:
            text = "; ".join(f"{n} was {old.get(n)}, is {about.get(n)}" for n in differ)
            raise ValueError(f"{self._path} has other numbers: {text}; use another --out")

    @property
    def about(self) -> JSON:
        """What the numbers depend on."""
        return self.lines[0]["about"]

    @property
    def cases(self) -> list[JSON]:
        """The measured cases, in the order in which they were."""
        return [line for line in self.lines if "rows" in line]

    def append(self, line: JSON) -> None:
        """Keeps a line, in the file too."""
        text = json.dumps(line)
        self.lines.append(json.loads(text))
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())


def measure_cases(
    cases: Iterable[Case], records: Records, rounds: int, minutes: float = math.inf
) -> int:
    """Measures every case that has no result; returns how many are left when time is up.

    None begins that would end too late if it took as long as the longest so far. A case that raises
    is a result with its reason.
    """
    began, longest = time.monotonic(), 0.0
    done = {record["name"] for record in records.cases}
    left = [case for case in cases if case.name not in done]
    while left and time.monotonic() - began + longest < 60 * minutes:
        case, now = left.pop(0), time.monotonic()
        result: JSON = {"name": case.name, "about": dict(case.about), "tokens": case.tokens}
        begun = sum(line.get("begins") == case.name for line in records.lines)
        tries = begun - sum(line.get("interrupted") == case.name for line in records.lines)
        if tries >= MOST_TRIES:
            trouble = f"the process ended in it, {tries} times"
            records.append(result | {"rows": [], "trouble": trouble})
            continue
        records.append({"begins": case.name})
        try:
            entries, most = case.build(), case.most_seconds
            result["rows"] = measure(entries, rounds, warm=case.warm, most_seconds=most)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            result |= {"rows": [], "trouble": reason[:300]}
        except KeyboardInterrupt:
            records.append({"interrupted": case.name})  # no fault of the case, which is tried again
            raise
        gc.collect()  # the arrays of a case are many GiB
        # A kernel that reads outside of its arrays leaves a GPU on which every call fails: that
        # ends the process here, before the next case has this as its result.
        jax.block_until_ready(jnp.zeros(8) + 1)
        seconds = time.monotonic() - now
        records.append(result | {"seconds": seconds})
        longest = max(longest, seconds)
        print(f"\n{case_table(records.cases[-1], records.about)}\n{seconds:.0f} s", flush=True)
    return len(left)


# ---------------------------------------------------------------- tables


def frame(records: Iterable[JSON], about: JSON) -> pandas.DataFrame:
    """A line for each row of each case, with every number."""
    device = about["device"].partition(" x ")[2]
    lines = []
    for record in records:
        sizes = {"case": record["name"], "tokens": record["tokens"], **record["about"]}
        flops, dtype = sizes.get("flops"), sizes.get("dtype", "")
        if not record["rows"]:
            lines.append(sizes | {"trouble": record["trouble"]})
        for one in record["rows"]:
            line = sizes | one | {"row": one["name"]}
            if one["seconds"]:
                seconds = one["milliseconds"] / 1e3
                line["tokens_per_second"] = record["tokens"] / seconds
                line["of_peak"] = flops and fraction_of_peak(flops, seconds, device, dtype)
            lines.append(line)
    return pandas.DataFrame(lines, columns=["case", *SIZES, "row", *COLUMNS], dtype=object)


def summary(records: Iterable[JSON]) -> pandas.DataFrame:
    """A row for each case: our fastest entry of the same work beside the chosen one and beside the
    fastest peer."""
    rows = []
    for record in records:
        able = [a for a in record["rows"] if a["seconds"] and not a["again"] and a["same_work"]]
        able.sort(key=lambda one: one["milliseconds"])
        own, peer = (next((a for a in able if a["ours"] is ours), None) for ours in (True, False))
        found: JSON = {"case": record["name"]}
        if own:
            found |= {"fastest of ours": own["name"], "chosen / it": own.get("ratio")}
        if peer:
            found |= {"fastest of others": peer["name"]}
        if own and peer:
            ratios = np.divide(own["seconds"], peer["seconds"])
            ends = interval(ratios, np.random.default_rng(0))
            found |= dict(zip(("time, ours / theirs", "low", "high"), ends, strict=True))
        rows.append(found)
    return pandas.DataFrame(rows)


def to_markdown(shown: pandas.DataFrame) -> str:
    """A table without its empty columns; large numbers whole, the others with four digits."""

    def cell(value: Any) -> str:
        if pandas.isna(value):
            return ""
        if isinstance(value, str):
            return value
        return format(value, ",.0f" if value >= 1e4 else ".4g")

    shown = shown.dropna(axis=1, how="all")
    return markdown_table(list(shown), [list(map(cell, one)) for one in shown.to_numpy(object)])


def case_table(record: JSON, about: JSON) -> str:
    """One case, in Markdown."""
    shown = frame([record], about)[["row", *COLUMNS]]
    return f"### {record['name']}\n\n{to_markdown(shown)}"


def write(folder: Path, records: Records) -> None:
    """cases.md with the summary and the table of every case, cases.csv with every number."""
    about = ", ".join(f"{name} {value}" for name, value in records.about.items())
    tables = [case_table(record, records.about) for record in records.cases]
    texts = [about, to_markdown(summary(records.cases)), *tables]
    (folder / "cases.md").write_text("\n\n".join(texts) + "\n")
    frame(records.cases, records.about).to_csv(folder / "cases.csv", index=False)
