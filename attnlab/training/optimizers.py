"""Optimizers and their schedules."""

from typing import Any

import jax
import optax

from attnlab.training.config import TrainConfig


def decays(params: Any) -> Any:
    """True for matrices, False for biases and norm scales: by name, since slots are stacked."""

    def by_name(path, _):
        return not str(path[-1].key).endswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(by_name, params)


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, then a cosine down to the final rate at the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.final_learning_rate,
    )


def adamw(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2017) after clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )
