"""Schedules of the learning rate. `SCHEDULES`: name -> config -> (step -> rate)."""

from collections.abc import Callable
from typing import Any

import optax


def cosine(config: Any) -> optax.Schedule:
    """Linear warm-up, then a cosine down to the final rate at the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_learning_rate,
    )


SCHEDULES: dict[str, Callable[[Any], optax.Schedule]] = {"cosine": cosine}
"""Name -> (config -> step -> rate)."""
