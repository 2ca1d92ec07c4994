"""Operations on arrays that every package uses: products, norms, and whether a call is traced."""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

T = TypeVar("T")
Params: TypeAlias = Mapping[str, Array]

KEPT_PROGRAMS = 64
"""How many programs are kept, for as many configs and options; each for every shape of its call."""

SAVED = "saved_for_backward"
"""The name by which a policy of `jax.checkpoint` knows a value of `save_for_backward`."""


def with_rank(a: Array, rank: int) -> Array:
    """`a` with leading axes of size 1, `rank` axes in all; as it is where it has as many.

    Broadcasting written out also runs under `jax.numpy_rank_promotion("raise")`.

    >>> with_rank(jnp.ones((2, 3)), 4).shape
    (1, 1, 2, 3)
    """
    return a.reshape((1,) * (rank - a.ndim) + a.shape)


def save_for_backward(x: T) -> T:
    """`x` itself; `run_stack(..., remat=False)` saves it, if the backward pass reads it.

    For values that are expensive to compute twice: products of tokens. Not for values computed from
    weights alone (a matrix and its delta): that would be one copy of the weights per layer.

    >>> save_for_backward(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """
    saved: T = checkpoint_name(x, SAVED)
    return saved


def wide_einsum(subscripts: str, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """einsum(x, y), summed and returned in `dtype`.

    Where x and y are narrower their derivatives are products in their own dtype: the cotangent is
    cast to it first. JAX alone would multiply a float32 cotangent by a bfloat16 array.

    >>> x = jnp.ones((2, 3), jnp.bfloat16)
    >>> wide_einsum("ij,kj->ik", x, x, jnp.float32)[0].tolist()
    [3.0, 3.0]
    """
    if x.dtype != y.dtype or x.dtype == dtype:
        return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)
    return _narrow_einsum(subscripts, dtype, x, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _narrow_einsum(subscripts: str, dtype: DTypeLike, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)


@_narrow_einsum.defjvp
def _derivative(
    subscripts: str, dtype: DTypeLike, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, y), (dx, dy) = primals, tangents
    tangent = jnp.einsum(subscripts, dx, y) + jnp.einsum(subscripts, x, dy)
    return _narrow_einsum(subscripts, dtype, x, y), tangent.astype(dtype)


# Norms -------------------------------------------------------------------------------------------


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


NORM_KINDS: dict[str, Callable[..., Array]] = {
    "layer": layer_norm,
    "rms": rms_norm,
    "rms_plus_one": rms_plus_one,
}
"""Kind of norm -> (params with "scale" and perhaps "bias", x, eps=...) -> x, normalized over its
last axis."""
NORM_STARTS = {"layer": 1.0, "rms": 1.0, "rms_plus_one": 0.0}
"""Kind of norm -> its initial scale, which leaves the size of x unchanged."""


# Calls outside of jit -----------------------------------------------------------------------------


def is_eager(*trees: object) -> bool:
    """Whether nothing traces this call, and everything in it is an array.

    >>> is_eager(jnp.ones(2)), jax.eval_shape(lambda: jnp.asarray(is_eager(np.ones(2)))).dtype
    (True, dtype('bool'))
    >>> _ = jax.jit(lambda x: print(is_eager(x), is_eager(np.ones(2))))(1.0)
    False False
    """
    leaves = [jnp.zeros(()), *jax.tree.leaves(trees)]  # zeros are traced where anything is
    of_jax = (jax.Array, np.ndarray)
    return all(isinstance(a, of_jax) and not isinstance(a, jax.core.Tracer) for a in leaves)
