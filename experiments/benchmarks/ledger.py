"""Cases that are measured one by one, for as long as there is time, and never twice.

Each result is a line of `cases.jsonl` as soon as it is there, so that a run may be stopped, or
killed, at any moment; the same command goes on with the first case that has none. The first line
says what all numbers belong to: another device, version or commit is refused.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from attnlab.nested import JSON
from experiments.benchmarks.measure import Case

FILE = "cases.jsonl"
FREE = ("machine", "threads")
"""May be others when it goes on: a lent GPU is not always in the same machine."""
MOST_TRIES = 2
"""A case that took the process with it so often is not tried again."""


class DeviceLostError(RuntimeError):
    """The device answers no more: what comes after would fail for nothing."""


class Ledger:
    """What a folder knows of its cases."""

    def __init__(self, folder: Path, about: JSON):
        """`about`: what the numbers belong to. Raises ValueError where those that are there belong
        to something else."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, about = folder / FILE, json.loads(json.dumps(about))
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # killed while it wrote
            lines.pop()
            self._path.write_text("".join(lines))
        self._lines = [json.loads(line) for line in lines]
        if not self._lines:
            self._append({"about": about})
        old = self._lines[0]["about"]
        if differ := [n for n in old | about if old.get(n) != about.get(n) and n not in FREE]:
            told = "; ".join(f"{n} was {old.get(n)}, is {about.get(n)}" for n in differ)
            raise ValueError(f"{self._path} holds other numbers: {told}; use another --out")

    @property
    def about(self) -> JSON:
        """What the numbers belong to."""
        return self._lines[0]["about"]

    @property
    def records(self) -> list[JSON]:
        """Of every case that is done, in the order in which they came."""
        return [line for line in self._lines if "rows" in line]

    def done(self, name: str) -> bool:
        """Is there a result, or a reason?"""
        return any(record["name"] == name for record in self.records)

    def begin(self, case: Case) -> bool:
        """Says that a case begins; False, and its reason is kept, where it took the process with it
        before."""
        tries = sum(line.get("begins") == case.name for line in self._lines)
        if tries >= MOST_TRIES:
            self.add(case, {"rows": [], "trouble": f"the process ended in it, {tries} times"})
            return False
        self._append({"begins": case.name})
        return True

    def add(self, case: Case, result: JSON) -> None:
        """Keeps the result of a case: its "rows", and "trouble" where there are none."""
        self._append({"name": case.name, "about": dict(case.about)} | result)

    def _append(self, line: JSON) -> None:
        self._lines.append(json.loads(json.dumps(line)))
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def go_through(
    cases: Iterable[Case],
    ledger: Ledger,
    work: Callable[[Case], JSON],
    *,
    minutes: float,
    say: Callable[[str], None] = print,
) -> int:
    """Does `work` for every case that is not done; returns how many are left when time is up.

    None begins where, if it took as long as the longest so far, it would end too late. One that
    fails is a row with its reason.
    """
    began, longest = time.monotonic(), 0.0
    left = [case for case in cases if not ledger.done(case.name)]
    while left:
        now = time.monotonic()
        if now - began + longest >= 60 * minutes:
            break
        case = left.pop(0)
        if not ledger.begin(case):
            continue
        try:
            result = work(case)
        except DeviceLostError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or "nothing said"
            result = {"rows": [], "trouble": f"{type(error).__name__}: {reason}"[:300]}
        took = time.monotonic() - now
        ledger.add(case, {"seconds": took} | result)
        longest = max(longest, took)
        say(f"{case.name}: {took:.0f} s, {len(left)} left")
    return len(left)
