"""`Recorder`: writes the metrics of a run to all its loggers, and survives errors in them."""

import contextlib
import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.extras import extra
from attnlab.names import lookup
from attnlab.training import loggers
from attnlab.training.loggers import LOGGERS, JsonLines, Logger, RunInfo, Scalars
from attnlab.training.provenance import CHANGES, PROVENANCE, describe_process

T = TypeVar("T")


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
      hyperparameters: as JSON, for the loggers. With them the first start also writes
        `provenance.json` (command line, git commit, packages) and `changes.diff` (of `git diff`).
      writes: False in every process but the first: it does nothing.
      speaks: False: it prints nothing.

    Raises:
      ValueError: an unknown logger.
      ModuleNotFoundError: a package of the extra `train` is missing.

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
        with extra("train"):  # now, not after the first step has compiled
            import rich  # noqa: F401
        self._factories = {logger: lookup(LOGGERS, logger, what="logger") for logger in loggers}
        self.folder, self.name, self._seeds = folder, name, seeds
        self._writes, self._speaks = writes, writes and speaks
        self._hyperparameters = hyperparameters
        self._lines: JsonLines | None = None
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
        """Opens the loggers and removes what was written after `step`.

        Raises:
          ModuleNotFoundError: the package of a logger is missing.
        """
        if not self._writes:
            return
        self._lines = JsonLines(self.folder / "metrics.jsonl", step)
        given = self._hyperparameters
        if given is not None and not (self.folder / PROVENANCE).exists():
            self.attempt("the provenance", self._write_provenance)
        info = RunInfo(self.folder, self._seeds, self.name, given or {}, step)
        for name, make in self._factories.items():
            open_logger = functools.partial(make, info)
            made = self.attempt(f"the logger {name}", open_logger, fatal=ModuleNotFoundError)
            self._others |= {name: made} if made else {}

    def log_scalars(self, step: int, values: Scalars) -> None:
        """Each value is one number or an array with one per seed."""
        if self._lines is None or not (new := self._lines.log_scalars(step, values)):
            return
        texts = (f"{n} {' '.join(f'{v:.4g}' for v in np.ravel(a))}" for n, a in new.items())
        self.say(f"step {step:>6}  {'  '.join(texts)}")
        self.show(step, new)

    def show(self, step: int, values: Scalars) -> None:
        """To the optional loggers alone: what depends on the machine, such as tokens/s."""
        self._each(lambda logger: logger.log_scalars(step, values))

    def sync(self) -> None:
        """Returns when metrics.jsonl is on the disk: before a checkpoint of the same step is."""
        if self._lines is not None:
            self._lines.sync()

    def finish(self) -> None:
        """Closes the loggers."""
        self._each(lambda logger: logger.finish())
        self._others = {}
        if self._lines is not None:
            self._lines.finish()
            self._lines = None

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

    @contextlib.contextmanager
    def progress(self, total: int, first: int) -> Iterator[Callable[[int, int], None]]:
        """On a terminal: a bar, tokens/s, time left. Yields advance(step, tokens_per_step)."""
        shown = self._speaks and sys.stderr.isatty()
        with loggers.progress_bars("{task.fields[rate]}", shown=shown) as bars:
            row = bars.add_task(self.name, total=total, completed=first, rate="")

            def advance(step: int, tokens_per_step: int) -> None:
                speed = bars.tasks[0].speed
                rate = f"{speed * tokens_per_step:,.0f} tokens/s" if speed else ""
                bars.update(row, completed=step, rate=rate)

            yield advance

    def _each(self, call: Callable[[Logger], object]) -> None:
        for name, logger in list(self._others.items()):
            done = self.attempt(f"the logger {name}", lambda: (call(logger),))  # noqa: B023
            if done is None:
                del self._others[name]

    def _write_provenance(self) -> None:
        about, changes = describe_process()
        about = {"hyperparameters": dict(self._hyperparameters or {}), **about}
        if changes:
            write_atomic(self.folder / CHANGES, changes)
        content = json.dumps(about, indent=1, default=str) + "\n"
        write_atomic(self.folder / PROVENANCE, content.encode())
