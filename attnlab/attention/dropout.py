"""Dropout on probabilities: one key drops the same ones in every backend.

Each probability has its own draw: Threefry (Salmon et al. 2011) of (row, key position).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import threefry_2x32


def is_key(key: object) -> bool:
    """Is it one random key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)?"""
    if not isinstance(key, Array | np.ndarray):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return key.dtype == jnp.uint32 and key.ndim == 1


def drop(probs: Array, rate: float, key: Array | None, first_key: int = 0) -> Array:
    """Probabilities [B, N, T, S], 0 where they are dropped, else divided by 1 - rate.

    Args:
      probs: of the keys from `first_key` on.
      rate, key: of the dropout.
    """
    seed = dropout_seed(rate, key)
    if seed is None:
        return probs
    kept = keep_mask(seed, rate, (0, 0, 0, first_key), *(probs.shape,) * 2)
    return jnp.where(kept, probs / (1 - rate), 0)


def dropout_seed(rate: float, key: Array | None) -> Array | None:
    """Two words from a key of any kind; None without dropout."""
    if not rate or key is None:
        return None
    return jax.random.bits(key, (2,), jnp.uint32)


def keep_mask(
    seed: Array,
    rate: float,
    starts: tuple[Array | int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
) -> Array:
    """Which probabilities of a block dropout keeps.

    Args:
      seed: of `dropout_seed`.
      starts, sizes: of the block, along [B, N, T, S].
      shape: (B, N, T, S) of the whole call.

    Returns:
      Booleans of shape `sizes`.
    """
    b, n, t, s = (
        jnp.asarray(start, jnp.uint32) + jax.lax.broadcasted_iota(jnp.uint32, sizes, axis)
        for axis, start in enumerate(starts)
    )
    return keep_at(seed, rate, (b * shape[1] + n) * shape[2] + t, s)


def keep_at(seed: Array, rate: float, query: Array, key: Array) -> Array:
    """`keep_mask` of single probabilities.

    Args:
      seed, rate: of the dropout.
      query, key: of each, uint32: index (b N + n) T + t of the query, position of the key.
    """
    bits = threefry_2x32((seed[0], seed[1]), jnp.stack([query, key]))[0]
    return jnp.greater_equal(bits, jnp.uint32(min(round(rate * 2**32), 2**32 - 1)))
