"""What a sweep shows while it runs: lines, and on a terminal a bar for every arm."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

EVERY = 0.5
"""Seconds between looks at how far the arms are."""


class Display:
    """Use as a context manager. Steps are read from what every arm writes."""

    def __init__(self, configs: dict[str, ConfigDict], folder: Path, console: Any = None):
        console = console or Console(stderr=True)
        self._configs, self._folder = configs, folder
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            transient=True,
            disable=not console.is_terminal,
            console=console,
        )
        self._rows: dict[str, TaskID] = {}
        self._looked = 0.0

    def __enter__(self) -> "Display":
        self._bars.start()
        self._all = self._bars.add_task("arms", total=len(self._configs))
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.stop()

    def say(self, name: str, text: str) -> None:
        """Lines of an arm, above the bars."""
        lines = "".join(f"[{name}] {line}\n" for line in text.splitlines())
        if self._bars.disable:
            sys.stderr.write(lines)
            sys.stderr.flush()
        else:
            self._bars.console.out(lines, end="", highlight=False)

    def show(self, running: list[str], done: int) -> None:
        """A bar for every arm that runs, and one for all."""
        if self._bars.disable or time.monotonic() < self._looked + EVERY:
            return
        self._looked = time.monotonic()
        self._bars.update(self._all, completed=done)
        for name in self._rows.keys() - set(running):
            self._bars.remove_task(self._rows.pop(name))
        for name in running:
            step = last_step(self._folder / name / "metrics.jsonl")
            if name not in self._rows:
                total = self._configs[name].train.steps
                self._rows[name] = self._bars.add_task(name, total=total, completed=step)
            self._bars.update(self._rows[name], completed=step)


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
            return json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):  # cut at either end
            continue
    return 0
