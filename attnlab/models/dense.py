"""Functions of each position alone: dense layers and dropout."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.linear import add_bias


def dense(
    params: Mapping[str, Array], name: str, x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
    """x W + b with W = params[name]; b = params[name_bias], if there is one.

    >>> dense({"up": jnp.ones((2, 1)), "up_bias": jnp.ones(1)}, "up", jnp.array([3.0, 4.0]))
    Array([8.], dtype=float32)
    """
    return add_bias(params, name, x @ params[name].astype(x.dtype))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """0 with probability `rate`, else x / (1 - rate). Without a key, x.

    >>> dropout(jnp.ones(2), 0.5, None).tolist()
    [1.0, 1.0]
    """
    if not rate or key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
