"""What `fit` calls before and after each step, and the one that writes a profile."""

from pathlib import Path
from typing import Protocol, runtime_checkable

import jax

from attnlab.training.step import TrainState


@runtime_checkable
class Callback(Protocol):
    """Called by `fit` in every process. An error is printed, and the callback not called again.

    It must not change the state. Reading it waits for the step to end, which costs time.

    >>> class PrintSteps:  # a class with these three methods is a callback
    ...     def before_step(self, step): pass
    ...     def after_step(self, step, state): print(step)
    ...     def finish(self): pass
    >>> isinstance(PrintSteps(), Callback)  # for FitOptions(callbacks=[PrintSteps()])
    True
    """

    def before_step(self, step: int) -> None:
        """Step `step` (the first is 1) is about to start."""

    def after_step(self, step: int, state: TrainState) -> None:
        """Step `step` was started; `state`, with an axis of seeds, is the one after it."""

    def finish(self) -> None:
        """The training ended, also by an error or a signal."""


class Profile:
    """Writes a trace of the steps `first` to `last` into `folder`, by `jax.profiler`.

    View it with XProf (`tensorboard --logdir=FOLDER`) or Perfetto. A run that resumes after `first`
    traces from the step at which it resumes.

    Args:
      folder: made if it is missing.
      first: the first step that is traced; 1 is the first of a run.
      last: the last one.

    Raises:
      ValueError: not 1 <= `first` <= `last`.

        options = FitOptions(callbacks=[Profile(Path("run/profile"), 10, 12)])
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"profile steps {first} to {last}; use 1 <= first <= last")
        self._folder, self._first, self._last = folder, first, last
        self._active = False

    def before_step(self, step: int) -> None:
        """Starts the trace."""
        if not self._active and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._folder))
            self._active = True

    def after_step(self, step: int, state: TrainState) -> None:
        """Ends the trace when the last step has ended."""
        if self._active and step >= self._last:
            jax.block_until_ready(state.step)
            self.finish()

    def finish(self) -> None:
        """Ends a trace that is still active."""
        if self._active:
            self._active = False
            jax.profiler.stop_trace()


def parse_steps(text: str) -> tuple[int, int]:
    """The steps of "first:last".

    >>> parse_steps("10:20")
    (10, 20)

    Raises:
      ValueError: it is something else.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"profile={text!r} is not FIRST:LAST; write for example 10:20")
    return int(first), int(last)
