"""Layer norm and RMS norm: of a position, of a head, of a latent."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Weights = dict[str, Array]


def layer_norm(w: Weights, x: Float[Array, "... D"], *, eps: float = 1e-5) -> Float[Array, "... D"]:
    """(x - mean) / sqrt(var + eps) * scale + bias, in float32 at least (Ba et al. 2016).

    >>> layer_norm({"scale": jnp.ones(2)}, jnp.array([1.0, 3.0]), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    y = y * w["scale"].astype(y.dtype)
    return (y + w["bias"].astype(y.dtype) if "bias" in w else y).astype(x.dtype)


def rms_norm(w: Weights, x: Float[Array, "... D"], *, eps: float = 1e-6) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * scale, in float32 at least (Zhang and Sennrich 2019).

    >>> rms_norm({"scale": jnp.ones(2)}, jnp.array([2.0, 2.0]), eps=0.0).tolist()
    [1.0, 1.0]
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * w["scale"].astype(y.dtype)).astype(x.dtype)


NORM_KINDS: dict[str, Callable] = {"layer": layer_norm, "rms": rms_norm}
CENTRES: dict[str, Callable] = {
    "layer": lambda x: x - x.mean(axis=-1, keepdims=True),
    "rms": lambda x: x,
}
"""What each does to x before it divides by the root of its mean square."""


def init_norm(width: int, *, bias: bool = True) -> Weights:
    """Scale one, bias zero."""
    return {"scale": jnp.ones(width)} | ({"bias": jnp.zeros(width)} if bias else {})
