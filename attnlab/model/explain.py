"""How a model computes attention: what its own call says of itself while JAX traces it."""

from collections.abc import Mapping
from typing import Any

import jax

from attnlab.attention.api import trace
from attnlab.model.config import ModelConfig


def explain_model(
    config: ModelConfig, inputs: Mapping[str, Any], *, training: bool = False
) -> dict[str, dict[str, Any]]:
    """What the model's call on `inputs` does: order of contraction and backend of "self", and of a
    decoder that reads a source also of "cross" and of the "encoder", each as `explain_heads` tells
    it. All layers of a stack do the same; of several kinds it tells by the names of `stacks`.

    `inputs` are the arguments of the call by name; arrays may be `jax.ShapeDtypeStruct`s. The call
    itself is traced, without gradient; with `training` the one with dropout. A backend that was
    asked for and cannot run here is told of, not refused.

    >>> config = ModelConfig(width=8, num_heads=2, talking_heads=True, max_len=2048)
    >>> inputs = {"tokens": jax.ShapeDtypeStruct((64, 2048), "int32")}
    >>> explain_model(config, inputs)["self"]["implementation"]["blockwise"]
    'talking_heads needs the scores of all heads at once'
    """
    model, told = config.build(), dict[str, Any]()

    def call(key: Any, **inputs: Any) -> None:
        keys = {"params": key, "dropout": key}
        model.init(keys, **inputs, deterministic=not training, told=told)

    trace(call, key=jax.random.key(0), **inputs)
    apart = [name for name in ("encoder", *config.stacks) if name in told]
    return told | {name: told[name]["self"] for name in apart}
