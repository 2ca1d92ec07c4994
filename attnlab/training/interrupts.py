"""How a training is timed and stopped: the clock of its steps, signals, losses that diverge."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np


class NonFiniteLoss(RuntimeError):
    """A loss became NaN or infinite.

    The message names the seeds and the step. The state is not saved. The newest checkpoint is from
    before, but its parameters may be no longer finite: a loss is computed before the update of its
    step. `lab.run_one` returns a result of status "diverged" instead of raising.
    """


class Stopped(RuntimeError):
    """The run received a signal to stop; its state is saved.

    To resume, call it again. The command lines end with exit code 75, which a scheduler may take
    as a request to run them again.
    """


class Clock:
    """Seconds and number of training steps, without compilation, evaluation and saving."""

    def __init__(self, seconds: float = 0.0, steps: int = 0) -> None:
        self.seconds, self.steps = seconds, steps
        self._started: tuple[float, int] | None = None

    def start(self, step: int) -> None:
        """Runs from the end of `step`, unless it runs already."""
        self._started = self._started or (time.perf_counter(), step)

    def stop(self, wait_for: jax.Array, step: int) -> None:
        """Waits for an array of the end of `step` and adds the time since the start."""
        if self._started:
            jax.block_until_ready(wait_for)
            began, first = self._started
            self.seconds += time.perf_counter() - began
            self.steps += step - first
            self._started = None


def check_finite(seeds: Sequence[int], step: int, losses: np.ndarray | jax.Array) -> None:
    """Raises NonFiniteLoss, with the seeds whose loss is not finite."""
    pairs = zip(seeds, np.asarray(losses), strict=True)
    bad = [str(seed) for seed, loss in pairs if not np.isfinite(loss)]
    if bad:
        raise NonFiniteLoss(
            f"the loss of seed {', '.join(bad)} is not finite at step {step}; lower "
            "train.optimizer.learning_rate, raise train.schedule.warmup_steps or use "
            "model.compute.dtype=float32"
        )


_scopes: list[list[int]] = []
"""The signals that the outermost `stop_signals` has received; empty outside of any."""


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Within, SIGTERM and SIGINT are counted in place of ending the process.

    Yields a function that returns how many came. A `stop_signals` inside another one has its count,
    so that a request is kept until the outermost one ends. The third signal and later ones raise
    KeyboardInterrupt. Outside the main thread, which alone receives signals, none is counted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    if _scopes:
        outermost = _scopes[0]
        yield lambda: len(outermost)
        return
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 2:
            raise KeyboardInterrupt

    _scopes.append(received)
    before = {s: signal.signal(s, receive) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: len(received)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _scopes.clear()
