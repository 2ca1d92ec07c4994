"""Schedules of the learning rate. `SCHEDULES`: name -> config -> (step -> rate).

Step 0 is the first. With w = `warmup_steps` + 1 every schedule but one rises over the first w
steps, rate(step) = `learning_rate` (step + 1) / w, and then continues as documented. A decay to
`final_learning_rate` would arrive there at step `steps`: the last step, `steps` - 1, is above it.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

if TYPE_CHECKING:
    from attnlab.training.config import TrainConfig

Steps: TypeAlias = int | np.ndarray | jax.Array
Rate: TypeAlias = Callable[[Steps], jax.Array | float]
"""Step -> learning rate."""


def cosine(config: "TrainConfig") -> Rate:
    """Half a cosine down to `final_learning_rate` at step `steps` (Loshchilov and Hutter 2016,
    arXiv 1608.03983, without restarts)."""
    schedule: Rate = optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.optimizer.learning_rate / (config.schedule.warmup_steps + 1),
        peak_value=config.optimizer.learning_rate,
        warmup_steps=config.schedule.warmup_steps,
        decay_steps=config.steps,
        end_value=config.schedule.final_learning_rate,
    )
    return schedule


def linear(config: "TrainConfig") -> Rate:
    """Linearly down to `final_learning_rate` at step `steps` (BERT; Devlin et al. 2018, A.2)."""
    return _warmed(config, lambda step: _line(config, step, config.schedule.warmup_steps))


def constant(config: "TrainConfig") -> Rate:
    """`learning_rate` after the warm-up."""
    return _warmed(config, lambda step: config.optimizer.learning_rate)


def inverse_sqrt(config: "TrainConfig") -> Rate:
    """rate = `learning_rate` sqrt(w / (step + 1)): with `learning_rate` = (D w)^-0.5 that of
    Vaswani et al. 2017, section 5.3. `final_learning_rate` is not read."""
    return _warmed(config, lambda step: _root(config, step))


def flat_inverse_sqrt(config: "TrainConfig") -> Rate:
    """The one schedule without a rise: `learning_rate` for w steps, then as `inverse_sqrt`. With
    0.01 and w = 10,000 it is 1 / sqrt(max(step + 1, w)), that of T5 (Raffel et al. 2020, section
    3.1.2)."""
    return lambda step: jnp.minimum(config.optimizer.learning_rate, _root(config, step))


def warmup_stable_decay(config: "TrainConfig") -> Rate:
    """Constant, except for the last `decay_share` of the steps: there linearly down to
    `final_learning_rate` at step `steps` (Hu et al. 2024, arXiv 2404.06395, with a line)."""
    begin = min(round(config.steps * (1 - config.schedule.decay_share)), config.steps - 1)

    def stable(step: Steps) -> jax.Array:
        return jnp.where(step < begin, config.optimizer.learning_rate, _line(config, step, begin))

    return _warmed(config, stable)


def _warmed(config: "TrainConfig", after: Rate) -> Rate:
    def rate(step: Steps) -> jax.Array:
        rising = config.optimizer.learning_rate * (step + 1) / (config.schedule.warmup_steps + 1)
        return jnp.where(step < config.schedule.warmup_steps, rising, after(step))

    return rate


def _line(config: "TrainConfig", step: Steps, begin: int) -> jax.Array:
    done = jnp.clip((step - begin) / (config.steps - begin), 0, 1)
    first, last = config.optimizer.learning_rate, config.schedule.final_learning_rate
    return first + done * (last - first)


def _root(config: "TrainConfig", step: Steps) -> jax.Array:
    warmup = config.schedule.warmup_steps + 1
    return config.optimizer.learning_rate * jnp.sqrt(warmup / (step + 1))


SCHEDULES: dict[str, Callable[["TrainConfig"], Rate]] = {
    "cosine": cosine,
    "linear": linear,
    "inverse_sqrt": inverse_sqrt,
    "flat_inverse_sqrt": flat_inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
    "constant": constant,
}
"""Name -> (config -> step -> rate)."""


def common_steps(config: "TrainConfig", steps: int) -> int:
    """How many first steps have the same rates in a training of `steps` steps.

    >>> from attnlab.training import ScheduleConfig, TrainConfig
    >>> for name in ("cosine", "warmup_stable_decay", "constant"):
    ...     config = TrainConfig(steps=800, schedule=ScheduleConfig(name=name, warmup_steps=50))
    ...     print(name, common_steps(config, 1200))
    cosine 51
    warmup_stable_decay 641
    constant 800
    """
    both = min(config.steps, steps)
    rates = [
        np.broadcast_to(SCHEDULES[config.schedule.name](c)(jnp.arange(both)), both)
        for c in (config, dataclasses.replace(config, steps=steps))
    ]
    return int(np.argmin(np.append(rates[0] == rates[1], False)))


def fork_step(config: "TrainConfig") -> int:
    """The last step with the same rates in longer trainings, if that is worth a checkpoint of its
    own: after the warm-up, before the end; else 0.

    >>> from attnlab.training import ScheduleConfig, TrainConfig
    >>> schedules = [ScheduleConfig(name=name) for name in ("cosine", "constant")]
    >>> [fork_step(TrainConfig(schedule=schedule)) for schedule in schedules]
    [0, 0]
    """
    step = common_steps(config, 2 * config.steps)
    return step if config.schedule.warmup_steps + 1 < step < config.steps else 0
