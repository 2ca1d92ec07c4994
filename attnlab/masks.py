"""Masks: booleans, True = may attend, broadcastable to [B, N, T, S], combined with AND."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def causal(num_queries: int, num_keys: int | None = None, *, offset: int = 0) -> Bool[Array, "T S"]:
    """Query t sees keys up to t + offset (top-left aligned, as in `jax.nn`).

    >>> causal(2, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    t, s = _positions(num_queries, num_keys)
    return s <= t + offset


def window(
    num_queries: int, num_keys: int | None = None, *, left: int, right: int
) -> Bool[Array, "T S"]:
    """Query t sees keys t - left to t + right, both ends included.

    >>> window(3, left=1, right=0).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    if left < 0 or right < 0:
        raise ValueError(f"a window needs left and right of at least 0, not {left} and {right}")
    t, s = _positions(num_queries, num_keys)
    return (s >= t - left) & (s <= t + right)


def padding(lengths: Int[Array, " B"], num_keys: int) -> Bool[Array, "B 1 1 S"]:
    """Every query of batch row b sees the first lengths[b] keys."""
    return (jnp.arange(num_keys)[None] < lengths[:, None])[:, None, None]


def segments(
    query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"] | None = None
) -> Bool[Array, "B 1 T S"]:
    """Positions of one segment see each other: several texts packed into one row."""
    key_segments = query_segments if key_segments is None else key_segments
    return (query_segments[:, :, None] == key_segments[:, None, :])[:, None]


def combine(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
    """AND of the masks that are not None; None where there is none.

    >>> combine(causal(2), None, window(2, left=0, right=0)).astype(int).tolist()
    [[1, 0], [0, 1]]
    """
    given = [m for m in masks if m is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _positions(num_queries: int, num_keys: int | None) -> tuple[Array, Array]:
    num_keys = num_queries if num_keys is None else num_keys
    return jnp.arange(num_queries)[:, None], jnp.arange(num_keys)[None]
