"""Where a run's numbers go: console, JSON lines, TensorBoard, a progress bar."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from attnlab.extras import extra


def summary_writer() -> Any:
    """TensorBoard's writer. It would import torch, which takes two seconds and half a gigabyte."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


class Recorder:
    """Writes metrics of a run with several seeds into `folder`. Use as a context manager.

    `metrics.jsonl` holds one object per write: step and, per metric, a number or one per seed.
    TensorBoard files are in `tensorboard/seed_<n>`, with `about`, Markdown, as their text. If
    `writes` is False (every process but the first) it does nothing; with `speaks` False it writes
    files only.
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int],
        *,
        name: str = "",
        about: str = "",
        writes: bool = True,
        speaks: bool = True,
    ) -> None:
        with extra("train"):  # now, not after the first step has compiled
            import rich  # noqa: F401

            self._board = summary_writer()
        self._path, self._seeds = folder / "metrics.jsonl", seeds
        self._name, self._about = name, about
        self._writes, self._speaks = writes, writes and speaks
        self._lines: Any = None
        self._boards: list[Any] = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._lines, *self._boards):
            if file is not None:
                file.close()

    def say(self, line: str) -> None:
        """One line for people, on standard error."""
        if self._speaks:
            print(f"[{self._name}] {line}" if self._name else line, file=sys.stderr, flush=True)

    def rewind(self, step: int) -> None:
        """Removes what was written after `step`: a resumed run writes it again."""
        if not self._writes:
            return
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        new = self._path.with_suffix(".tmp")
        new.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(new, self._path)
        self._lines = self._path.open("a")
        folder = self._path.parent / "tensorboard"
        self._boards = [
            self._board(str(folder / f"seed_{seed}"), purge_step=step + 1 if step else None)
            for seed in self._seeds
        ]
        if self._about and not step:
            for board in self._boards:
                board.add_text("about", self._about)

    def show(
        self,
        step: int,
        numbers: Mapping[str, float],
        images: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Writes to TensorBoard alone, for the first seed: what depends on the machine, as
        tokens/s, and images, [H, W] from 0 to 1."""
        for board in self._boards[:1]:
            for name, number in numbers.items():
                board.add_scalar(name, number, step)
            for name, image in (images or {}).items():
                board.add_image(name, image, step, dataformats="HW")

    def write(self, step: int, metrics: Mapping[str, ArrayLike]) -> None:
        """Each value is one number or an array with one per seed."""
        if not self._writes:
            return
        row = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        self._lines.write(json.dumps({"step": step, **row}) + "\n")
        self._lines.flush()
        for name, value in metrics.items():
            per_seed = np.broadcast_to(value, len(self._boards))
            for board, one in zip(self._boards, per_seed, strict=True):
                board.add_scalar(name, float(one), step)
        self.say(f"step {step:>6}  " + "  ".join(f"{n} {_show(v)}" for n, v in row.items()))

    @contextmanager
    def progress(self, total: int, first: int) -> Iterator[Callable[[int, int], None]]:
        """On a terminal: a bar, tokens/s, time left. Yields advance(step, tokens_per_step)."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            transient=True,
            disable=not (self._speaks and sys.stderr.isatty()),
            console=_stderr_console(),
        )
        with bar:
            row = bar.add_task(self._name, total=total, completed=first, rate="")

            def advance(step: int, tokens_per_step: int) -> None:
                speed = bar.tasks[0].speed
                rate = f"{speed * tokens_per_step:,.0f} tokens/s" if speed else ""
                bar.update(row, completed=step, rate=rate)

            yield advance


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _show(value: Any) -> str:
    many = value if isinstance(value, list) else [value]
    return " ".join(f"{v:.4g}" for v in many)
