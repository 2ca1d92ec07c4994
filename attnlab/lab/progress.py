"""How far the runs of a sweep are, in lines on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attnlab.lab.spec import RunSpec
from attnlab.lab.workdir import complete_result, holder, run_folder


@contextlib.contextmanager
def runs_progress(
    specs: Sequence[RunSpec], workdir: Path, *, shown: bool
) -> Iterator[Callable[[], None]]:
    """Says which runs begin and end. Yields a function that looks at their folders.

    Args:
      specs: the runs that are left.
      workdir: of the sweep.
      shown: False: nothing is said.
    """
    began, left, begun = time.monotonic(), {spec.id: spec for spec in specs}, set[str]()

    def say(line: str) -> None:
        if shown:
            print(line, file=sys.stderr, flush=True)

    def look() -> None:
        for name, spec in list(left.items()):
            if result := complete_result(workdir, spec):
                del left[name]
                done, minutes = len(specs) - len(left), (time.monotonic() - began) / 60
                counts = f"{done} of {len(specs)} runs finished ({minutes:.1f} minutes)"
                say(f"[{name}] {result.status}; {counts}")
            elif name not in begun and holder(run_folder(workdir, spec)):
                begun.add(name)
                say(f"[{name}] begun")

    say(f"{len(specs)} runs in {workdir}")
    yield look
    look()
