"""Broadcasting written out, which also runs under `jax.numpy_rank_promotion("raise")`."""

from jax import Array


def with_rank(a: Array, rank: int) -> Array:
    """`a` with leading axes of size 1, `rank` axes in all; as it is where it has as many.

    >>> import jax.numpy as jnp
    >>> with_rank(jnp.ones((2, 3)), 4).shape
    (1, 1, 2, 3)
    """
    return a.reshape((1,) * (rank - a.ndim) + a.shape)
