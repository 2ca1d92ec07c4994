"""Which keys each query may see, without a [T, S] array unless somebody asks for one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.attention import masks


class Visible(NamedTuple):
    """Query t of batch row b sees key s where `mask` is True and first[b, t] <= s < end[b, t].

    The ranges come from the causal rule, the window and the lengths (see `ranges`). Whatever is
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
    """[B or 1, edges]: of all else query t sees key s where there is an edge"""

    def ranges(self) -> tuple[Any, Any] | None:
        """first and end, [B or 1, T]; in an empty row S and 0. None where every key is seen.

        NumPy arrays, known while JAX traces, unless there are lengths. Costs O(T).
        """
        t, s = self.num_queries, self.num_keys
        row = np.arange(t, dtype=np.int32)[None]
        first: Any = np.zeros_like(row)
        end: Any = np.full_like(row, s)
        if self.is_causal:
            end = np.minimum(end, row + 1)
        if self.window is not None:
            left, right = (min(w, t + s) for w in self.window)  # no int32 overflow
            first, end = np.maximum(row - left, 0), np.minimum(end, row + right + 1)
        if self.key_lengths is not None:
            end = jnp.minimum(end, self.key_lengths[:, None])
        if self.query_lengths is not None:
            end = jnp.where(row < self.query_lengths[:, None], end, 0)
        xp: Any = np if isinstance(end, np.ndarray) else jnp
        empty = first >= end
        first, end = (xp.where(empty, x, y).astype(np.int32) for x, y in ((s, first), (0, end)))
        return None if xp is np and not first.any() and (end == s).all() else (first, end)

    def allowed(self) -> Any:
        """The whole matrix as booleans that broadcast to [B, N, T, S], or None."""
        ranges, mask = self.ranges(), self.mask
        if self.edges is not None:
            mask = masks.combine(mask, self.edges.matrix(self.num_queries, self.num_keys))
        if ranges is None:
            return mask
        first, end = (a[:, None, :, None] for a in ranges)
        key = jnp.arange(self.num_keys, dtype=jnp.int32)
        return masks.combine(mask, (first <= key) & (key < end))

    @property
    def only_edges(self) -> masks.Edges | None:
        """The edges, where nothing else hides."""
        return self.edges if self.mask is None and self.ranges() is None else None

    def sees_and_used(self) -> Any:
        """Rows that see a key [B, N, T] and keys that a row sees [B, S], axes maybe 1; None: all.

        Row 0 starts at key 0 and from row to row both ends of a range move by at most one, so the
        keys in any range are the first ones. Costs O(T + S), but for a mask that differs from
        query to query.
        """
        ranges, mask = self.ranges(), self.mask
        if self.only_edges is not None:
            reached = lambda ends, size: jax.vmap(
                lambda e: jnp.zeros(size, bool).at[e].set(True, mode="drop")
            )(ends)
            senders, receivers = self.only_edges
            return [reached(receivers, self.num_queries)[:, None], reached(senders, self.num_keys)]
        if self.edges is not None or (mask is not None and (ranges is None or mask.shape[2] > 1)):
            allowed = self.allowed()
            return [jnp.any(allowed, axis=3), jnp.any(allowed, axis=(1, 2))]
        if ranges is None:
            return [None, None]
        first, end = ranges
        sees, key = (first < end)[:, None], np.arange(self.num_keys, dtype=np.int32)
        used = key < end.max(1)[:, None]
        if mask is not None:
            keys = jnp.broadcast_to(mask[:, :, 0], (*mask.shape[:2], self.num_keys))
            before = jnp.pad(jnp.cumsum(keys, axis=2), ((0, 0), (0, 0), (1, 0)))
            count = lambda at: jnp.take_along_axis(before, jnp.asarray(at)[:, None], axis=2)
            return [count(end) > count(first), used & jnp.any(keys, axis=1)]
        known = isinstance(sees, np.ndarray)
        return [None if known and a.all() else a for a in (sees, used)]
