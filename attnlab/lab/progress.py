"""How far the runs of a sweep are: bars on a terminal or in a notebook, else lines."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attnlab.lab.spec import RunSpec
from attnlab.lab.workdir import complete_result, holder, run_folder
from attnlab.training.loggers import progress_bars


@contextlib.contextmanager
def runs_progress(
    specs: Sequence[RunSpec], workdir: Path, *, shown: bool
) -> Iterator[Callable[[], None]]:
    """Bars of the runs that are left. Yields a function that looks at their folders.

    Args:
      specs: the runs that are left.
      workdir: of the sweep.
      shown: False: nothing is shown.
    """
    began, left, bars = time.monotonic(), list(specs), progress_bars(shown=shown)
    begun: set[str] = set()
    total = bars.add_task(f"runs in {workdir.name}", total=len(specs))
    rows = {s.id: bars.add_task(s.id, total=s.config.train.steps, visible=False) for s in specs}

    def say(line: str) -> None:
        if shown and bars.disable:
            print(line, file=sys.stderr, flush=True)

    def look() -> None:
        for spec in list(left):
            folder = run_folder(workdir, spec)
            if result := complete_result(workdir, spec):
                left.remove(spec)
                bars.remove_task(rows[spec.id])
                done, minutes = len(specs) - len(left), (time.monotonic() - began) / 60
                ended = f"{done} of {len(specs)} runs finished ({minutes:.1f} minutes)"
                say(f"[{spec.id}] {result.status}; {ended}")
            elif holder(folder) is not None:
                if spec.id not in begun:
                    begun.add(spec.id)
                    say(f"[{spec.id}] begun")
                step = last_step(folder / "metrics.jsonl")
                bars.update(rows[spec.id], completed=step, visible=True)
        bars.update(total, completed=len(specs) - len(left))

    with bars:
        say(f"{len(specs)} runs in {workdir}")
        yield look
        look()


def last_step(metrics: Path) -> int:
    """The step of the last whole line of a metrics.jsonl; 0 where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):  # cut at either end
            continue
    return 0
