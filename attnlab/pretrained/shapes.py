"""The tree that a config's weights make."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attnlab.model.config import ModelConfig


@functools.lru_cache(maxsize=32)
def param_shapes(config: ModelConfig) -> Any:
    """The tree of a model's weights as `jax.ShapeDtypeStruct`s; nothing is computed."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    texts = (tokens, tokens) if config.kind == "encoder_decoder" else (tokens,)
    model = config.build()
    return jax.eval_shape(lambda key: model.init(key, *texts), jax.random.key(0))["params"]
