"""Optimizers. `OPTIMIZERS`: name -> (config, schedule) -> the transform that runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from attnlab.names import find
from attnlab.training.schedules import SCHEDULES


class Optimizer(NamedTuple):
    """Gradients -> updates, and the learning rate of each step, which is what is logged."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


def decays(params: Any) -> Any:
    """True for matrices, False for biases and norm scales: by name, since slots are stacked."""

    def by_name(path, _):
        return not str(path[-1].key).endswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(by_name, params)


def adamw(config: Any, rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101)."""
    return optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decays,
    )


OPTIMIZERS: dict[str, Callable[[Any, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": adamw
}
"""Name -> (config, schedule) -> transform, without clipping."""


def make_optimizer(config: Any) -> Optimizer:
    """The optimizer and schedule of a `TrainConfig`, after clipping by the global norm."""
    schedule = find("schedule", config.schedule, SCHEDULES)(config)
    transform = find("optimizer", config.optimizer, OPTIMIZERS)(config, schedule)
    return Optimizer(optax.chain(optax.clip_by_global_norm(config.clip_norm), transform), schedule)
