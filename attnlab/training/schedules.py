"""Schedules of the learning rate. `SCHEDULES`: name -> (config, peak, steps) -> (step -> rate).

Step 0 is the first of `steps`. With w = 1 + the steps of the warm-up every schedule but one rises
over the first w steps, rate(step) = `peak` (step + 1) / w, and then continues as documented. A
decay to `final_learning_rate` would arrive there at step `steps`: the last step, `steps` - 1, is
above it.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.fields import Spec, bounded
from attnlab.names import lookup

Steps: TypeAlias = int | np.ndarray | jax.Array
Rate: TypeAlias = Callable[[Steps], jax.Array | float]
"""Step -> learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScheduleConfig(Spec, prefix="schedule."):
    """The learning rate of each step; the largest is `OptimizerConfig.learning_rate`.

    Attributes:
      name: an entry of `SCHEDULES`.
      final_learning_rate: where the decay would arrive at step `steps`; the last step, `steps` - 1,
        is a little above it. Not above the largest learning rate where a schedule reads it.
      warmup_steps: steps of a linear rise to the largest learning rate; None: 50, or a quarter of
        the steps where that is less.
      decay_share: share of the steps at the end in which `warmup_stable_decay` decays.

    Raises:
      ValueError: an unknown `name`, or a value out of range.

    >>> rate = make_schedule(ScheduleConfig(name="constant", warmup_steps=3), peak=0.003, steps=10)
    >>> [round(float(rate(step)), 5) for step in (0, 1, 3, 9)]  # the first step is 0
    [0.00075, 0.0015, 0.003, 0.003]
    >>> schedule = ScheduleConfig(name="linear", final_learning_rate=0.0, warmup_steps=0)
    >>> rate = make_schedule(schedule, peak=0.003, steps=10)
    >>> [round(float(rate(step)), 5) for step in (8, 9, 10)]  # the last of 10 steps is 9
    [0.0006, 0.0003, 0.0]
    """

    name: str = "cosine"
    final_learning_rate: float = bounded(3e-4, least=0.0)
    warmup_steps: int | None = bounded(None, least=0)
    decay_share: float = bounded(0.2, above=0.0, most=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup(SCHEDULES, self.name, what="schedule")

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a training of so many steps.

        >>> [ScheduleConfig().warmup(steps) for steps in (1, 20, 200, 800)]
        [0, 5, 50, 50]
        >>> ScheduleConfig(warmup_steps=7).warmup(800)
        7
        """
        return min(50, steps // 4) if self.warmup_steps is None else self.warmup_steps


def cosine(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """Half a cosine down to `final_learning_rate` at step `steps` (Loshchilov and Hutter 2016,
    arXiv 1608.03983, without restarts)."""
    warmup = config.warmup(steps)
    schedule: Rate = optax.schedules.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=_final(config, peak),
    )
    return schedule


def linear(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """Linearly down to `final_learning_rate` at step `steps` (BERT; Devlin et al. 2018, A.2)."""
    warmup = config.warmup(steps)
    return _warmed(warmup, peak, _line(config, peak, begin=warmup, end=steps))


def constant(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """`peak` after the warm-up."""
    return _warmed(config.warmup(steps), peak, lambda step: peak)


def inverse_sqrt(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """rate = `peak` sqrt(w / (step + 1)): with `peak` = (D w)^-0.5 that of Vaswani et al. 2017,
    section 5.3. `final_learning_rate` is not read."""
    warmup = config.warmup(steps)
    return _warmed(warmup, peak, _root(warmup, peak))


def flat_inverse_sqrt(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """The one schedule without a rise: `peak` for w steps, then as `inverse_sqrt`. With 0.01 and
    w = 10,000 it is 1 / sqrt(max(step + 1, w)), that of T5 (Raffel et al. 2020, section 3.1.2)."""
    root = _root(config.warmup(steps), peak)
    return lambda step: jnp.minimum(peak, root(step))


def warmup_stable_decay(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """Constant, except for the last `decay_share` of the steps: there linearly down to
    `final_learning_rate` at step `steps` (Hu et al. 2024, arXiv 2404.06395, with a line)."""
    begin = min(round(steps * (1 - config.decay_share)), steps - 1)
    line = _line(config, peak, begin=begin, end=steps)
    return _warmed(
        config.warmup(steps), peak, lambda step: jnp.where(step < begin, peak, line(step))
    )


def _warmed(warmup: int, peak: float, after: Rate) -> Rate:
    return lambda step: jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), after(step))


def _final(config: ScheduleConfig, peak: float) -> float:
    final = config.final_learning_rate
    if final > peak * 1.000001:  # but for rounding
        raise ValueError(
            f"schedule.final_learning_rate {final:g} is above optimizer.learning_rate {peak:g}; "
            f"set train.schedule.final_learning_rate to at most that, such as {peak / 10:g}"
        )
    return final


def _line(config: ScheduleConfig, peak: float, *, begin: int, end: int) -> Rate:
    final = _final(config, peak)

    def rate(step: Steps) -> jax.Array:
        done = jnp.clip((step - begin) / (end - begin), 0, 1)
        return peak + done * (final - peak)

    return rate


def _root(warmup: int, peak: float) -> Rate:
    return lambda step: peak * jnp.sqrt((warmup + 1) / (step + 1))


SCHEDULES: dict[str, Callable[[ScheduleConfig, float, int], Rate]] = {
    one.__name__: one
    for one in (cosine, linear, inverse_sqrt, flat_inverse_sqrt, warmup_stable_decay, constant)
}
"""Name -> ((config, peak, steps) -> step -> rate)."""


def make_schedule(config: ScheduleConfig, peak: float, steps: int) -> Rate:
    """The learning rate of each step.

    Args:
      config: the schedule.
      peak: the largest learning rate.
      steps: of the training.

    Raises:
      ValueError: the schedule would end above `peak`.
    """
    return SCHEDULES[config.name](config, peak, steps)
