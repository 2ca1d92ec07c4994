"""How far the runs of a sweep are: bars on a terminal or in a notebook, else lines."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.lab.spec import RunSpec
from attnlab.lab.workdir import complete_result, holder, run_folder
from attnlab.training.loggers import progress_bars

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS = 0.5
"""Between two looks at the folders of the runs."""


class RunsProgress:
    """Use as a context manager.

    Args:
      specs: the runs that are left.
      workdir: of the sweep.
      shown: False: nothing is shown.
    """

    def __init__(self, specs: Sequence[RunSpec], workdir: Path, *, shown: bool) -> None:
        self._left = {spec.id: spec for spec in specs}
        self._workdir, self._count, self._shown = workdir, len(specs), shown
        self._began, self._last = time.monotonic(), 0.0
        self._rows: dict[str, TaskID | None] = {}

    def __enter__(self) -> "RunsProgress":
        self._bars = progress_bars(shown=self._shown)
        self._bars.start()
        self._all = self._bars.add_task(f"runs in {self._workdir.name}", total=self._count)
        self._say(f"{self._count} runs in {self._workdir}")
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def update(self, *, final: bool = False) -> None:
        """Looks at the folders, at most every half second; `final`: in any case."""
        if not final and time.monotonic() < self._last + SECONDS:
            return
        self._last = time.monotonic()
        for spec in list(self._left.values()):
            folder = run_folder(self._workdir, spec)
            if result := complete_result(self._workdir, spec):
                self._ended(spec, result.status)
            elif holder(folder) is not None:
                self._running(spec, folder)
        self._bars.update(self._all, completed=self._count - len(self._left))

    def _ended(self, spec: RunSpec, status: str) -> None:
        del self._left[spec.id]
        if (row := self._rows.get(spec.id)) is not None:
            self._bars.remove_task(row)
        minutes = (time.monotonic() - self._began) / 60
        ended = f"{self._count - len(self._left)} of {self._count} runs finished"
        self._say(f"[{spec.id}] {status}; {ended} ({minutes:.1f} minutes)")

    def _running(self, spec: RunSpec, folder: Path) -> None:
        if spec.id not in self._rows:
            self._rows[spec.id] = None
            if not self._bars.disable:
                steps = spec.config.train.steps
                self._rows[spec.id] = self._bars.add_task(spec.id, total=steps)
            self._say(f"[{spec.id}] begun")
        if (row := self._rows[spec.id]) is not None:
            self._bars.update(row, completed=last_step(folder / "metrics.jsonl"))

    def _say(self, line: str) -> None:
        if self._shown and self._bars.disable:
            print(line, file=sys.stderr, flush=True)


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
