"""Where the metrics of a run go: JSON lines, the terminal, TensorBoard, Weights & Biases.

`Recorder` writes them to all loggers of a run, and survives errors in them.
"""

import contextlib
import functools
import json
import os
import secrets
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from jax.typing import ArrayLike

from attnlab.atomic import naming_full_disk, write_atomic
from attnlab.extras import extra
from attnlab.names import lookup

T = TypeVar("T")
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


class TensorBoard:
    """Event files in `tensorboard/seed_<n>`; the hyperparameters with the first seed."""

    def __init__(self, info: RunInfo) -> None:
        with extra("train"):
            writer = summary_writer()
        folder = info.folder / "tensorboard"
        # Events from this step on, of a process that was killed, are hidden.
        begin = info.first + 1 if info.first else 0
        paths = [str(folder / f"seed_{seed}") for seed in info.seeds]
        self._writers = [writer(path, purge_step=begin) for path in paths]
        if info.hyperparameters and not info.first:
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
        resumes = file.exists() and os.environ.get("WANDB_MODE") != "offline"
        if not file.exists():
            write_atomic(file, secrets.token_hex(4).encode())
        self._seeds = info.seeds
        self._run = wandb.init(
            dir=str(info.folder), id=file.read_text(), resume="allow" if resumes else None,
            name=info.name or info.folder.name, config=dict(info.hyperparameters),
            reinit="create_new", settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

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
    modules: dict[str, Any] = sys.modules
    hidden = modules.setdefault("torch", None) is None
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del modules["torch"]
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


class Recorder:
    """The loggers of a run with several seeds in `folder`. Use as a context manager.

    `metrics.jsonl` and the terminal always; `loggers` are names of further ones, entries of
    `LOGGERS`. An error in one of those is printed once, with its traceback, and the logger is not
    called again: the training goes on. An error in metrics.jsonl (a full disk) is raised.

    Args:
      folder: of the run.
      seeds: of the run.
      name: for people, before each line.
      loggers: names of `LOGGERS`.
      hyperparameters: as JSON, for the loggers.
      writes: False in every process but the first: it does nothing.
      speaks: False: it prints nothing.

    Raises:
      ValueError: an unknown logger.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(Path(folder), [0, 1], speaks=False) as recorder:
    ...         recorder.rewind(0)  # opens the files
    ...         recorder.log_scalars(10, {"train/loss": [2.5, 2.25]})  # one per seed
    ...     print(Path(folder, "metrics.jsonl").read_text().strip())
    {"step": 10, "train/loss": [2.5, 2.25]}
    """

    def __init__(
        self,
        folder: Path,
        seeds: Sequence[int],
        *,
        name: str = "",
        loggers: Sequence[str] = (),
        hyperparameters: Mapping[str, object] | None = None,
        writes: bool = True,
        speaks: bool = True,
    ) -> None:
        self._factories = {logger: lookup(LOGGERS, logger, what="logger") for logger in loggers}
        self.folder, self.name, self._seeds = folder, name, seeds
        self._metrics, self._hyperparameters = folder / "metrics.jsonl", hyperparameters or {}
        self._writes, self._speaks = writes, writes and speaks
        self._others: dict[str, Logger] = {}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def say(self, line: str) -> None:
        """One line for people, on standard error, with the name of the run."""
        if self._speaks:
            with contextlib.suppress(OSError):  # it was closed
                print(f"[{self.name}] {line}" if self.name else line, file=sys.stderr, flush=True)

    def rewind(self, step: int) -> None:
        """Opens the loggers and removes what was written after `step`; all of it where that is 0.

        Raises:
          ModuleNotFoundError: the package of a logger is missing.
        """
        if not self._writes:
            return
        kept = [row for row in read_metrics(self._metrics) if 0 < step >= row["step"]]
        write_atomic(self._metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())
        info = RunInfo(self.folder, self._seeds, self.name, self._hyperparameters, step)
        for name, make in self._factories.items():
            open_logger = functools.partial(make, info)
            made = self.attempt(f"the logger {name}", open_logger, fatal=ModuleNotFoundError)
            self._others |= {name: made} if made else {}

    def log_scalars(self, step: int, values: Scalars) -> None:
        """Each value is one number or an array with one per seed."""
        if not self._writes:
            return
        row = {"step": step, **{name: np.asarray(a).tolist() for name, a in values.items()}}
        with naming_full_disk(self._metrics), self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        texts = (f"{n} {' '.join(f'{v:.4g}' for v in np.ravel(a))}" for n, a in values.items())
        self.say(f"step {step:>6}  {'  '.join(texts)}")
        self.show(step, values)

    def show(self, step: int, values: Scalars) -> None:
        """To the optional loggers alone: what depends on the machine, such as tokens/s."""
        self._each(lambda logger: logger.log_scalars(step, values))

    def sync(self) -> None:
        """Returns when metrics.jsonl is on the disk: before a checkpoint of the same step is."""
        if self._writes:
            with naming_full_disk(self._metrics), self._metrics.open("a") as file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Closes the loggers."""
        self._each(lambda logger: logger.finish())
        self._others = {}

    def attempt(
        self, what: str, call: Callable[[], T], fatal: type[Exception] | tuple[()] = ()
    ) -> T | None:
        """What `call` returns; None where it raises, which is printed: the training goes on. An
        error of the type `fatal` is raised."""
        try:
            return call()
        except fatal:
            raise
        except Exception:
            line = f"{what} failed; the training goes on without it\n{traceback.format_exc()}"
            if self._speaks:
                self.say(line)
            else:
                warnings.warn(line, RuntimeWarning, stacklevel=3)
            return None

    def _each(self, call: Callable[[Logger], object]) -> None:
        for name, logger in list(self._others.items()):
            done = self.attempt(f"the logger {name}", lambda: (call(logger),))  # noqa: B023
            if done is None:
                del self._others[name]
