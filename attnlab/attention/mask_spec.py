"""Which keys each query attends to, without a [T, S] array unless one is needed."""

from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from attnlab.attention import masks

Indices: TypeAlias = Int[Array | np.ndarray, "..."]
"""A NumPy array where the values are known while JAX traces."""
Booleans: TypeAlias = Array | np.ndarray


class MaskSpec(NamedTuple):
    """Query t of batch row b attends to key s if `mask` is True and first[b, t] <= s < end[b, t].

    The ranges come from the causal rule, the window and the lengths (see `ranges`). A field that is
    None hides nothing.
    """

    num_queries: int
    num_keys: int
    mask: Array | None = None
    """four axes, each 1 or that of [B, N, T, S]"""
    is_causal: bool = False
    window: tuple[int, int] | None = None
    query_lengths: Array | None = None
    """[B]"""
    key_lengths: Array | None = None
    """[B]"""
    edges: masks.Edges | None = None
    """[B or 1, edges]: in addition to all else, query t attends to key s only along an edge"""

    def ranges(self) -> tuple[Indices, Indices] | None:
        """first and end, [B or 1, T]; S and 0 in an empty row. None if every key is attended to.

        NumPy arrays, known while JAX traces, unless there are lengths. Costs O(T).
        """
        t, s = self.num_queries, self.num_keys
        row = np.arange(t, dtype=np.int32)[None]
        first: Indices = np.zeros_like(row)
        end: Indices = np.full_like(row, s)
        if self.is_causal:
            end = np.minimum(end, row + 1)
        if self.window is not None:
            left, right = (min(w, t + s) for w in self.window)  # no int32 overflow
            first, end = np.maximum(row - left, 0), np.minimum(end, row + right + 1)
        if self.key_lengths is not None:
            end = jnp.minimum(end, self.key_lengths[:, None])
        if self.query_lengths is not None:
            end = jnp.where(row < self.query_lengths[:, None], end, 0)
        known = isinstance(end, np.ndarray)
        where = np.where if known else jnp.where
        empty = first >= end
        first, end = where(empty, s, first).astype(np.int32), where(empty, 0, end).astype(np.int32)
        return None if known and not first.any() and (end == s).all() else (first, end)

    def allowed(self) -> Array | None:
        """The whole mask as booleans that broadcast to [B, N, T, S], or None."""
        ranges, mask = self.ranges(), self.mask
        if self.edges is not None:
            edges = self.edges.matrix(self.num_queries, self.num_keys)
            mask = edges if mask is None else mask & edges
        if ranges is None:
            return mask
        first, end = (a[:, None, :, None] for a in ranges)
        key = jnp.arange(self.num_keys, dtype=jnp.int32)[None, None, None]
        inside = jnp.logical_and(first <= key, key < end)
        return inside if mask is None else mask & inside

    @property
    def only_edges(self) -> masks.Edges | None:
        """The edges, if nothing else hides a key."""
        return self.edges if self.mask is None and self.ranges() is None else None

    def used(self) -> tuple[Booleans | None, Booleans | None]:
        """Queries that attend to a key [B, N, T] and keys that a query attends to [B, S].

        Axes may be 1; None means all. Row 0 starts at key 0 and from row to row both ends of a
        range move by at most one, so the keys in any range are the first ones. Costs
        O(T + S), except for a mask that differs from query to query.
        """
        ranges, mask = self.ranges(), self.mask
        if self.only_edges is not None:
            senders, receivers = self.only_edges
            return (
                _reached(receivers, self.num_queries)[:, None],
                _reached(senders, self.num_keys),
            )
        if self.edges is not None or (mask is not None and (ranges is None or mask.shape[2] > 1)):
            allowed = cast(Array, self.allowed())
            return jnp.any(allowed, axis=3), jnp.any(allowed, axis=(1, 2))
        if ranges is None:
            return None, None
        first, end = ranges
        queries: Booleans = (first < end)[:, None]
        keys: Booleans = np.arange(self.num_keys, dtype=np.int32)[None] < end.max(1)[:, None]
        if mask is not None:
            return self._used_with_key_mask(mask, first, end, keys)
        if isinstance(queries, np.ndarray):
            return (
                None if queries.all() else queries,
                None if isinstance(keys, np.ndarray) and keys.all() else keys,
            )
        return queries, keys

    def _used_with_key_mask(
        self, mask: Array, first: Indices, end: Indices, keys: Booleans
    ) -> tuple[Booleans, Booleans]:
        """`used` with a mask of keys alone: counts of its True values up to each end."""
        of_keys = jnp.broadcast_to(mask[:, :, 0], (*mask.shape[:2], self.num_keys))
        before = jnp.pad(jnp.cumsum(of_keys, axis=2), ((0, 0), (0, 0), (1, 0)))
        to_end, to_first = (
            jnp.take_along_axis(before, jnp.asarray(at)[:, None], axis=2) for at in (end, first)
        )
        return to_end > to_first, keys & jnp.any(of_keys, axis=1)


def _reached(ends: Indices, size: int) -> Array:
    """Which of `size` nodes are in each row of `ends`."""

    def one(indices: Indices) -> Array:
        return jnp.zeros(size, bool).at[indices].set(True, mode="drop")

    return jax.vmap(one)(ends)
