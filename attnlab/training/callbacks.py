"""What `fit` calls while it trains: functions with a period; and which steps it traces."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import jax
from jaxtyping import Array

from attnlab.data.dataset import Dataset
from attnlab.models import ModelConfig, head_distance
from attnlab.models.head_similarity import smallest_change
from attnlab.sharing import Params
from attnlab.training.objectives.objective import Model


class StepInfo(NamedTuple):
    """What a callback gets: one seed at one step.

    Attributes:
      step: how many steps were taken.
      params: after them, on the host.
      initial: at step 0.
      model: what is trained.
      dataset: what it is trained on.
      log: (name, number): writes it to metrics.jsonl and the loggers. Where only some seeds log a
        name, the others have NaN.
    """

    step: int
    params: Params
    initial: Params
    model: Model
    dataset: Dataset
    log: Callable[[str, jax.typing.ArrayLike], None]


@runtime_checkable
class Callback(Protocol):
    """A function that `callback` has given a period."""

    every: int

    def __call__(self, info: StepInfo, /) -> None: ...


def callback(*, every: int) -> Callable[[Callable[[StepInfo], None]], Callback]:
    """Decorator: calls a function with a `StepInfo` at step 0, then every so many steps and at the
    last one, for each seed.

    An error in it is raised at step 0; later it is printed, and the function is not called again.

    Raises:
      ValueError: `every` is below 1.

    >>> @callback(every=100)
    ... def norm(info):
    ...     info.log("norm", optax.global_norm(info.params))
    >>> norm.every  # for lab.Experiment(callbacks=[norm]) or FitOptions(callbacks=[norm])
    100
    """
    if every < 1:
        raise ValueError(f"callback(every={every}): give 1 or more steps")

    def mark(function: Callable[[StepInfo], None]) -> Callback:
        marked = cast(Callback, function)
        marked.every = every
        return marked

    return mark


Measure: TypeAlias = Callable[[Params, Params], dict[str, Array]]
"""(parameters at step 0, parameters now) of one seed -> numbers by name."""


def measured(measure: Measure, every: int) -> Callback:
    """A callback that logs numbers of the parameters as "weights/NAME"; `measure` is compiled once.

    Record how far each seed has moved from its initial parameters:

        def moved(initial, now):
            return {"moved": optax.global_norm(jax.tree.map(jnp.subtract, now, initial))}

        options = FitOptions(callbacks=[measured(moved, every=100)])
    """
    numbers = jax.jit(measure)

    @callback(every=every)
    def log_numbers(info: StepInfo) -> None:
        for name, value in numbers(info.initial, info.params).items():
            info.log(f"weights/{name}", value)

    return log_numbers


@functools.partial(jax.jit, static_argnums=0)
def _of_heads(config: ModelConfig, initial: Params, params: Params) -> tuple[Array, Array]:
    return head_distance(config, params), smallest_change(initial, params)


@callback(every=100)
def heads(info: StepInfo) -> None:
    """Logs how far apart the heads are and how far the array that moved least has moved: see
    `models.head_distance` and `smallest_change`."""
    config: ModelConfig = info.model.config  # type: ignore[attr-defined]
    apart, moved = _of_heads(config, info.initial, info.params)
    info.log("weights/heads_apart", apart)
    info.log("weights/least_moved", moved)


CALLBACKS: dict[str, Callback] = {"heads": heads}
"""Name -> a callback, for `lab.Experiment.callbacks`."""


class Profile(NamedTuple):
    """Writes a trace of some steps by `jax.profiler`, to view with XProf (`tensorboard
    --logdir=FOLDER`) or Perfetto. A run that resumes after `first` traces from its second step.

    Attributes:
      folder: made if it is missing.
      first, last: the steps that are traced; 1 is the first of a run.

        options = FitOptions(profile=Profile(Path("run/profile"), 10, 12))
    """

    folder: Path
    first: int
    last: int


def parse_steps(text: str) -> tuple[int, int]:
    """The first and last step of "first:last".

    >>> parse_steps("10:20")
    (10, 20)

    Raises:
      ValueError: it is something else, or not 1 <= first <= last.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"profile={text!r} is not FIRST:LAST; write for example 10:20")
    return int(first), int(last)
