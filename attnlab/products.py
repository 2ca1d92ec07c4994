"""Matrix products of narrow arrays, summed in a wider dtype, whose gradients are as narrow."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


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
