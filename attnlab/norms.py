"""Layer norm and RMS norm, of tokens, heads and latents."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.ops import with_rank

Params: TypeAlias = Mapping[str, Array]


def layer_norm(w: Params, x: Float[Array, "... D"], *, eps: float = 1e-5) -> Float[Array, "... D"]:
    """(x - mean) / sqrt(var + eps) * scale + bias, in float32 at least (Ba et al. 2016).

    Args:
      w: {"scale": [D], "bias": [D]}; what it does not have is left out.
      x: [..., D]; normalized over the last axis.
      eps: epsilon.

    Returns:
      [..., D] in the dtype of x.

    >>> layer_norm({"scale": jnp.ones(2)}, jnp.array([1.0, 3.0]), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    y = y * with_rank(w["scale"].astype(y.dtype), y.ndim) if "scale" in w else y
    y = y + with_rank(w["bias"].astype(y.dtype), y.ndim) if "bias" in w else y
    return y.astype(x.dtype)


def rms_norm(w: Params, x: Float[Array, "... D"], *, eps: float = 1e-6) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * scale, in float32 at least (Zhang and Sennrich 2019).

    Args:
      w: {"scale": [D]}; what it does not have is left out.
      x: [..., D]; normalized over the last axis.
      eps: epsilon.

    Returns:
      [..., D] in the dtype of x.

    >>> rms_norm({"scale": jnp.ones(2)}, jnp.array([2.0, 2.0]), eps=0.0).tolist()
    [1.0, 1.0]
    """
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    y = y * with_rank(w["scale"].astype(y.dtype), y.ndim) if "scale" in w else y
    return y.astype(x.dtype)


def rms_plus_one(
    w: Params, x: Float[Array, "... D"], *, eps: float = 1e-6
) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * (1 + scale): `rms_norm` with a scale counted from 1 (Gemma).

    >>> rms_plus_one({"scale": jnp.zeros(2)}, jnp.array([2.0, 2.0]), eps=0.0).tolist()
    [1.0, 1.0]
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return rms_norm({name: 1 + a.astype(wide) for name, a in w.items()}, x, eps=eps)


@runtime_checkable
class NormFunction(Protocol):
    """A norm: (params with "scale" and perhaps "bias", x) -> x, normalized over its last axis."""

    def __call__(self, w: Params, x: Array, *, eps: float = ...) -> Array: ...


NORM_KINDS: dict[str, NormFunction] = {
    "layer": layer_norm,
    "rms": rms_norm,
    "rms_plus_one": rms_plus_one,
}


STARTS = {"layer": 1.0, "rms": 1.0, "rms_plus_one": 0.0}
"""Kind of norm -> its initial scale, which leaves the size of x unchanged."""
