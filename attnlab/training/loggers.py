"""Where the metrics of a run go: JSON lines, a progress bar, TensorBoard, Weights & Biases."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jax.typing import ArrayLike

from attnlab.atomic import naming_full_disk, write_atomic
from attnlab.extras import extra

if TYPE_CHECKING:
    from rich.progress import Progress

Scalars: TypeAlias = Mapping[str, ArrayLike]
"""Name -> a number, or an array with one number per seed."""
Row: TypeAlias = dict[str, Any]
"""An object of JSON: "step", and of each name a number or a list with one number per seed."""


@runtime_checkable
class Logger(Protocol):
    """Receives the metrics of a run.

    >>> class Silent:  # a class with these two methods is a logger
    ...     def log_scalars(self, step, values): pass
    ...     def finish(self): pass
    >>> isinstance(Silent(), Logger)  # LOGGERS["silent"] = lambda info: Silent()
    True
    """

    def log_scalars(self, step: int, values: Scalars) -> None:
        """Numbers of a step."""

    def finish(self) -> None:
        """Writes what is buffered and closes; called once."""


class RunInfo(NamedTuple):
    """What a logger is made of.

    Attributes:
      folder, seeds: of the run.
      name: for people; may be empty.
      hyperparameters: JSON.
      first: the step that the run starts from, or resumes at; nothing after it was kept.
    """

    folder: Path
    seeds: Sequence[int]
    name: str
    hyperparameters: Mapping[str, object]
    first: int


class JsonLines:
    """`metrics.jsonl`: a JSON object per write, with the step and the values.

    Opening it removes the rows after the step `first`. A value that a row of `first` already has is
    not written again: a run that is killed between its last checkpoint and its result, and resumed,
    records each value once.
    """

    def __init__(self, path: Path, first: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= first]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._first = first
        self._known = {name for row in kept if row["step"] == first for name in row}
        self._path = path
        self._file = path.open("a")

    def log_scalars(self, step: int, values: Scalars) -> Scalars:
        """Appends a row of the values that are not yet recorded for this step, and returns them."""
        known = self._known if step == self._first else set()
        new = {n: np.asarray(value).tolist() for n, value in values.items() if n not in known}
        if new:
            with naming_full_disk(self._path):
                self._file.write(json.dumps({"step": step, **new}) + "\n")
                self._file.flush()
        return new

    def sync(self) -> None:
        """Returns when the rows are on the disk."""
        with naming_full_disk(self._path):
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Closes the file."""
        with naming_full_disk(self._path):  # of rows that could not be written before
            self._file.close()


def progress_bars(text: str = "", *, shown: bool) -> "Progress":
    """Bars on standard error, of a terminal or a notebook: name, steps, `text`, time left."""
    with extra("train"):
        from rich import progress
        from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        *([progress.TextColumn(text)] if text else []),
        progress.TimeRemainingColumn(),
    )
    disable = not (shown and (console.is_terminal or console.is_jupyter))
    return progress.Progress(*columns, transient=True, console=console, disable=disable)


class TensorBoard:
    """Event files in `tensorboard/seed_<n>`; the hyperparameters with the first seed."""

    def __init__(self, info: RunInfo) -> None:
        with extra("train"):
            writer = summary_writer()
        folder = info.folder / "tensorboard"
        resumes = folder.exists()  # then events after `first` are hidden
        hidden = {"purge_step": info.first + 1 if resumes else None}
        self._writers = [writer(str(folder / f"seed_{seed}"), **hidden) for seed in info.seeds]
        if info.hyperparameters and not resumes:
            text = json.dumps(dict(info.hyperparameters), indent=4)
            self._writers[0].add_text("hyperparameters", f"```\n{text}\n```")

    def log_scalars(self, step: int, values: Scalars) -> None:
        """Each seed's number to its own writer."""
        for name, value in values.items():
            per_seed = np.broadcast_to(np.asarray(value), len(self._writers))
            for writer, number in zip(self._writers, per_seed, strict=True):
                writer.add_scalar(name, float(number), step)

    def finish(self) -> None:
        """Closes the files."""
        for writer in self._writers:
            writer.close()


class WandB:
    """A run of Weights & Biases in `wandb/`, with the hyperparameters as its config.

    With several seeds a name is their mean, and `NAME/seed_<n>` is each of them. What wandb itself
    reads from the environment holds: WANDB_MODE=offline writes a folder that `wandb sync` uploads,
    WANDB_PROJECT is the project. A resumed run has the same id.
    """

    def __init__(self, info: RunInfo) -> None:
        with extra("wandb"):
            import wandb
        file = info.folder / "wandb_id.txt"
        resumes = file.exists()
        if not resumes:
            write_atomic(file, secrets.token_hex(4).encode())
        offline = os.environ.get("WANDB_MODE") == "offline"
        self._seeds = info.seeds
        self._run = wandb.init(
            dir=str(info.folder),
            id=file.read_text(),
            resume="allow" if resumes and not offline else None,
            name=info.name or info.folder.name,
            config=dict(info.hyperparameters),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log_scalars(self, step: int, values: Scalars) -> None:
        """Means over seeds, and each seed."""
        numbers = {name: float(np.mean(value)) for name, value in values.items()}
        for name, value in values.items():
            if np.ndim(value) and len(self._seeds) > 1:
                each = zip(self._seeds, np.asarray(value, float), strict=True)
                numbers |= {f"{name}/seed_{seed}": float(number) for seed, number in each}
        self._run.log(numbers, step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish()


LOGGERS: dict[str, Callable[[RunInfo], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}
"""Name -> an optional logger of a run."""


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


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
