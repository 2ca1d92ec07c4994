"""Functions that `fit` calls from time to time. `CALLBACKS`: name -> (config of a model) -> one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import jax
from jax.typing import ArrayLike
from jaxtyping import Array

from attnlab import models
from attnlab.models.head_similarity import smallest_change
from attnlab.sharing import Params
from attnlab.training import sharding
from attnlab.training.step import map_over_seeds

Log: TypeAlias = Callable[[Mapping[str, ArrayLike]], None]
"""Records numbers by name, each one for all seeds or an array [S]."""
Function: TypeAlias = Callable[[int, Params, Log], None]
"""(step, parameters after it with an axis of seeds, log); the step 0 is before the first."""


class Callback:
    """A function that is called at step 0, every `every` steps and at the last step.

    It is called in every process. An error is raised at step 0, where nothing is lost yet; later it
    is printed, and the function is not called again. After a kill it may be called again at the
    last step; a number that it logged is recorded once.

    Args:
      function: see `Function`. The next step overwrites the parameters: copy what is to be kept.
      every: steps; None: as the learning curves, every `evaluation.every`.

    Record the norm of the parameters of each seed every 10 steps, in metrics.jsonl and all loggers:

        def norm(step, params, log):
            log({"norm": jax.vmap(optax.global_norm)(params)})

        options = FitOptions(callbacks=[Callback(norm, every=10)])
    """

    def __init__(self, function: Function, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every={every} of a callback must be 1 or more, or None")
        self.function, self.every = function, every

    @property
    def name(self) -> str:
        """For messages."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def begin(self, initial: Params) -> None:
        """Receives the parameters at step 0, also where a run resumes."""

    def __call__(self, step: int, params: Params, log: Log) -> None:
        self.function(step, params, log)

    def finish(self) -> None:
        """The last step was taken, or the training ended by an error or a signal."""


class Measure(Callback):
    """Logs numbers of the parameters of each seed, as "weights/NAME".

    Args:
      measure: (parameters at step 0, parameters now) of one seed -> numbers by name. It is compiled
        once.
      every: as of `Callback`.

    Record how far each seed has moved from its initial parameters:

        def moved(initial, now):
            return {"moved": optax.global_norm(jax.tree.map(jnp.subtract, now, initial))}

        options = FitOptions(callbacks=[Measure(moved)])
    """

    def __init__(
        self, measure: Callable[[Params, Params], dict[str, Array]], every: int | None = None
    ) -> None:
        super().__init__(self._log_numbers, every)
        self._measure = jax.jit(map_over_seeds(measure))

    def begin(self, initial: Params) -> None:
        """Keeps a copy on the host."""
        self._initial = sharding.gather(initial)

    def _log_numbers(self, step: int, params: Params, log: Log) -> None:
        numbers = self._measure(self._initial, params)
        log({f"weights/{name}": sharding.gather(a) for name, a in numbers.items()})


class Profile(Callback):
    """Writes a trace of the steps `first` to `last` into `folder`, by `jax.profiler`.

    View it with XProf (`tensorboard --logdir=FOLDER`) or Perfetto. A run that resumes after `first`
    traces from the second step that it takes.

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
        super().__init__(self._trace, every=1)
        self._folder, self._first, self._last = folder, first, last
        self._active = False

    def _trace(self, step: int, params: Params, log: Log) -> None:
        if self._active and step >= self._last:
            jax.block_until_ready(params)
            self.finish()
        elif not self._active and self._first <= step + 1 <= self._last:
            jax.profiler.start_trace(str(self._folder))
            self._active = True

    def finish(self) -> None:
        """Ends a trace that is still active."""
        if self._active:
            self._active = False
            jax.profiler.stop_trace()


def measure_heads(config: models.ModelConfig) -> Callback:
    """Logs "weights/heads_apart" (`models.head_distance`) and "weights/least_moved"
    (`models.head_similarity.smallest_change`)."""

    def numbers(initial: Params, params: Params) -> dict[str, Array]:
        return {
            "heads_apart": models.head_distance(config, params),
            "least_moved": smallest_change(initial, params),
        }

    return Measure(numbers)


CALLBACKS: dict[str, Callable[[models.ModelConfig], Callback]] = {"heads": measure_heads}
"""Name -> (config of the model) -> callback."""


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
