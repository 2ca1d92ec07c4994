"""Operations on arrays that every package uses."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

T = TypeVar("T")

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
    subscripts: str,
    dtype: DTypeLike,
    primals: tuple[Array, Array],
    tangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    (x, y), (dx, dy) = primals, tangents
    tangent = jnp.einsum(subscripts, dx, y) + jnp.einsum(subscripts, x, dy)
    return _narrow_einsum(subscripts, dtype, x, y), tangent.astype(dtype)
