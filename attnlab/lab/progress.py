"""How far the runs of a sweep are: bars on a terminal or in a notebook, else lines."""

import contextlib
import re
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
    began, bars = time.monotonic(), progress_bars(shown=shown)
    total = bars.add_task(f"runs in {workdir.name}", total=len(specs))
    rows = {s.id: bars.add_task(s.id, total=s.config.train.steps, visible=False) for s in specs}
    begun: set[str] = set()
    ended: set[str] = set()

    def say(line: str) -> None:
        if shown and bars.disable:
            print(line, file=sys.stderr, flush=True)

    def look() -> None:
        for spec in (spec for spec in specs if spec.id not in ended):
            folder = run_folder(workdir, spec)
            if result := complete_result(workdir, spec):
                ended.add(spec.id)
                bars.remove_task(rows[spec.id])
                count, minutes = f"{len(ended)} of {len(specs)}", (time.monotonic() - began) / 60
                say(f"[{spec.id}] {result.status}; {count} runs finished ({minutes:.1f} minutes)")
            elif holder(folder) is not None:
                if spec.id not in begun:
                    say(f"[{spec.id}] begun")
                begun.add(spec.id)
                step = last_step(folder / "metrics.jsonl")
                bars.update(rows[spec.id], completed=step, visible=True)
        bars.update(total, completed=len(ended))

    with bars:
        say(f"{len(specs)} runs in {workdir}")
        yield look
        look()


def last_step(metrics: Path) -> int:
    """The last step of a metrics.jsonl; 0 where there is none. A line may be cut at either end."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65536))
        steps = re.findall(rb'"step": (\d+)[,}]', file.read())
    return int(steps[-1]) if steps else 0
