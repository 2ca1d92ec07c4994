"""Masks: booleans, True = may attend, broadcastable to [B, N, T, S], combined with AND.

`MaskSpec` is what backends read: which keys each query attends to, without a [T, S] array unless
one is needed.
"""

import functools
from typing import NamedTuple, TypeAlias, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, Integer

from attnlab.attention.segments import Indices, Segments
from attnlab.ops import with_rank

__all__ = [
    "Edges", "MaskSpec", "causal", "check_boolean", "combine",
    "edge_ends", "from_edges", "padding", "segments", "window",
]  # fmt: skip

Nodes = Integer[Array | np.ndarray, "*graphs edges"]
"""One end of each edge."""
Booleans: TypeAlias = Array | np.ndarray


def __dir__() -> list[str]:
    return sorted(__all__)


class Edges(NamedTuple):
    """A graph as a list of edges: `from_edges` without the matrix.

    Pass it as `mask` to `dot_product_attention`, a layer or a model; the cost is then O(edges).
    Listing an edge twice changes nothing; pad the lists as in `edge_ends`.

    >>> edges = Edges(jnp.array([1, 2, 2]), jnp.array([0, 0, 1]))
    >>> bool((edges.matrix(3)[0] == from_edges(*edges, 3)).all())
    True
    """

    senders: Nodes
    """[edges], or [B, edges] where every batch row is a graph of its own"""
    receivers: Nodes

    def matrix(self, num_nodes: int, num_keys: int | None = None) -> Bool[Array, "*B 1 T S"]:
        """The boolean mask, with an axis for the heads."""
        make = functools.partial(from_edges, num_nodes=num_nodes, num_keys=num_keys)
        for _ in range(jnp.ndim(self.senders) - 1):
            make = jax.vmap(make)
        return jnp.expand_dims(make(self.senders, self.receivers), -3)

    def checked(self, batch: int, num_nodes: int, num_keys: int) -> "Edges":
        """[B or 1, edges] each, as `edge_ends` returns them; raises what that raises."""
        # NumPy stays NumPy: indices that are known while JAX traces can be checked.
        senders, receivers = (a if isinstance(a, jax.Array) else np.asarray(a) for a in self)
        if senders.ndim not in (1, 2) or senders.shape[:-1] not in ((), (1,), (batch,)):
            raise ValueError(
                f"edges {senders.shape} must be [edges] or [B, edges] with B = {batch}"
            )
        ends = edge_ends(senders, receivers, num_nodes, num_keys)
        return Edges(*map(jnp.atleast_2d, ends))


def causal(num_queries: int, num_keys: int | None = None, *, offset: int = 0) -> Bool[Array, "T S"]:
    """Query t attends to keys up to t + offset (top-left aligned, as in `jax.nn`).

    Args:
      num_queries: T.
      num_keys: S; None is T.
      offset: added to the last key.

    Returns:
      [T, S].

    >>> causal(2, 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    t, s = _positions(num_queries, num_keys)
    return s <= t + offset


def window(
    num_queries: int, num_keys: int | None = None, *, left: int, right: int
) -> Bool[Array, "T S"]:
    """Query t attends to keys t - left to t + right, both ends included.

    Args:
      num_queries: T.
      num_keys: S; None is T.
      left, right: at least 0.

    Returns:
      [T, S].

    Raises:
      ValueError: left or right is negative.

    >>> window(3, left=1, right=0).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    if left < 0 or right < 0:
        raise ValueError(f"a window needs left and right of at least 0, not {left} and {right}")
    t, s = _positions(num_queries, num_keys)
    return (s >= t - left) & (s <= t + right)


def padding(lengths: Int[Array, " B"], num_keys: int) -> Bool[Array, "B 1 1 S"]:
    """Every query of batch row b attends to the first lengths[b] keys.

    Args:
      lengths: [B].
      num_keys: S.

    Returns:
      [B, 1, 1, S].

    >>> padding(jnp.array([1, 2]), 2)[:, 0, 0].tolist()
    [[True, False], [True, True]]
    """
    return (jnp.arange(num_keys)[None] < lengths[:, None])[:, None, None]


def segments(
    query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"] | None = None
) -> Bool[Array, "B 1 T S"]:
    """Positions of one segment attend to each other: several texts packed into one row.

    `dot_product_attention(..., segments=...)` needs no [T, S] array for it, and has padding.

    Args:
      query_segments: [B, T], a number per segment.
      key_segments: [B, S]; None is `query_segments`.

    Returns:
      [B, 1, T, S].

    >>> segments(jnp.array([[0, 0, 1]]))[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    key_segments = query_segments if key_segments is None else key_segments
    return (query_segments[:, :, None] == key_segments[:, None, :])[:, None]


def from_edges(
    senders: Nodes, receivers: Nodes, num_nodes: int, num_keys: int | None = None
) -> Bool[Array, "T S"]:
    """Node receivers[i] attends to node senders[i], for every edge i of a graph.

    An edge is directed (list both directions of an undirected one), listing it twice changes
    nothing, and a node attends to itself only where a self-loop is listed.

    Args:
      senders, receivers: [edges]; pad them as in `edge_ends`.
      num_nodes: T, the nodes that receive.
      num_keys: S, the nodes that send; None is T.

    Returns:
      [T, S].

    >>> import jax.numpy as jnp
    >>> from_edges(jnp.array([1, 2, 2]), jnp.array([0, 0, 1]), 3).astype(int).tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    if senders.ndim != 1:
        raise ValueError(f"edges {senders.shape} of several graphs make no one mask: use jax.vmap")
    num_keys = num_nodes if num_keys is None else num_keys
    senders, receivers = edge_ends(senders, receivers, num_nodes, num_keys)
    return jnp.zeros((num_nodes, num_keys), bool).at[receivers, senders].set(True, mode="drop")


def edge_ends(
    senders: Nodes, receivers: Nodes, num_nodes: int, num_keys: int
) -> tuple[Integer[Array, "*graphs edges"], Integer[Array, "*graphs edges"]]:
    """(senders, receivers) with both ends one past the last node on edges that do not count.

    Pad an edge list to a fixed length with senders = num_keys and receivers = num_nodes: such an
    edge is dropped. Any other index outside the nodes is a ValueError; under `jit`, where indices
    cannot be checked, its edge is dropped too (JAX by itself would clip or wrap the index).

    Raises:
      TypeError: indices that are not integers.
      ValueError: two lists of different lengths, or indices outside the nodes.
    """
    ends = {"senders": (senders, num_keys), "receivers": (receivers, num_nodes)}
    if senders.shape != receivers.shape:
        raise ValueError(
            f"senders and receivers have the shapes {senders.shape} and {receivers.shape}, not one"
        )
    for name, (index, size) in ends.items():
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, not {index.dtype}")
        if not isinstance(index, jax.core.Tracer):
            bad = np.asarray(index)[(np.asarray(index) < 0) | (np.asarray(index) > size)]
            if bad.size:
                raise ValueError(
                    f"{name} holds {bad[0]}, which is no index of {size} nodes; "
                    f"an edge that pads the list has index {size}"
                )
    # As JAX's own integers: int8 could not hold num_keys itself.
    senders, receivers = (jnp.asarray(a).astype(jnp.result_type(int)) for a in (senders, receivers))
    real = (senders >= 0) & (senders < num_keys) & (receivers >= 0) & (receivers < num_nodes)
    return jnp.where(real, senders, num_keys), jnp.where(real, receivers, num_nodes)


@overload
def combine(*masks: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None: ...
@overload
def combine(*masks: Bool[Array, "..."] | Edges | None) -> Bool[Array, "..."] | Edges | None: ...
def combine(*masks: Bool[Array, "..."] | Edges | None) -> Bool[Array, "..."] | Edges | None:
    """AND of the masks that are not None; None where there is none.

    Raises:
      TypeError: `Edges` together with another mask, or a mask that is not boolean.
      ValueError: shapes that do not broadcast to each other.

    >>> combine(causal(2), None, window(2, left=0, right=0)).astype(int).tolist()
    [[1, 0], [0, 1]]
    """
    present = [m for m in masks if m is not None]
    arrays = [m for m in present if not isinstance(m, Edges)]
    for mask in arrays:
        check_boolean("masks", mask)
    if len(arrays) == len(present):
        rank = max((m.ndim for m in arrays), default=0)
        arrays = [with_rank(m, rank) for m in arrays]
        if any(len({*sizes} - {1}) > 1 for sizes in zip(*(m.shape for m in arrays), strict=True)):
            shapes = " and ".join(str(m.shape) for m in arrays)
            raise ValueError(f"masks {shapes} do not fit together: each axis is 1 or as long")
        return functools.reduce(jnp.logical_and, arrays) if arrays else None
    if len(present) > 1:
        raise TypeError("Edges cannot be combined with another mask; leave out the hidden edges")
    return present[0]


def _positions(num_queries: int, num_keys: int | None) -> tuple[Array, Array]:
    num_keys = num_queries if num_keys is None else num_keys
    return jnp.arange(num_queries)[:, None], jnp.arange(num_keys)[None]


def check_boolean(name: str, mask: ArrayLike) -> None:
    """Raises TypeError for a mask of numbers.

    >>> check_boolean("mask", jnp.zeros((2, 2)))
    Traceback (most recent call last):
    TypeError: mask must be boolean (True = may attend), not float32; write mask > 0.5 for zeros \
and ones, mask == 0 for zeros and -inf, pass other numbers that are added as bias
    """
    if (dtype := jnp.result_type(mask)) != jnp.bool_:
        raise TypeError(
            f"{name} must be boolean (True = may attend), not {dtype}; write {name} > 0.5 for zeros"
            f" and ones, {name} == 0 for zeros and -inf, pass other numbers that are added as bias"
        )


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
    edges: Edges | None = None
    """[B or 1, edges]: in addition to all else, query t attends to key s only along an edge"""
    segments: Segments | None = None
    """found within the causal rule, the window and the lengths"""

    def ranges(self) -> tuple[Indices, Indices] | None:
        """first and end, [B or 1, T]; S and 0 in an empty row. None if every key is attended to.

        NumPy arrays, known while JAX traces, unless there are lengths or segments. Costs O(T).
        """
        if self.segments is not None:
            return self.segments.first, self.segments.end
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
        if self.segments is not None:
            inside &= segments(self.segments.queries, self.segments.keys)
        return inside if mask is None else mask & inside

    def used(self) -> tuple[Booleans | None, Booleans | None]:
        """Queries that attend to a key [B, N, T] and keys that a query attends to [B, S].

        Axes may be 1; None means all. Row 0 starts at key 0 and from row to row both ends of a
        range move by at most one, so the keys in any range are the first ones. Costs
        O(T + S), except for a mask that differs from query to query.
        """
        ranges, mask = self.ranges(), self.mask
        if self.edges is not None and mask is None and ranges is None:
            attending = _reached(self.edges.receivers, self.num_queries)[:, None]
            return attending, _reached(self.edges.senders, self.num_keys)
        if self.edges is not None or (mask is not None and (ranges is None or mask.shape[2] > 1)):
            allowed = cast(Array, self.allowed())
            return jnp.any(allowed, axis=3), jnp.any(allowed, axis=(1, 2))
        if ranges is None:
            return None, None
        first, end = ranges
        queries: Booleans = (first < end)[:, None]
        keys: Booleans = np.arange(self.num_keys, dtype=np.int32)[None] < end.max(1)[:, None]
        if self.segments is not None:
            keys = self.segments.used
        if mask is not None:
            return self._used_with_key_mask(mask, first, end, keys)
        all_attend = isinstance(queries, np.ndarray) and queries.all()
        all_used = isinstance(keys, np.ndarray) and keys.all()
        return None if all_attend else queries, None if all_used else keys

    def _used_with_key_mask(
        self, mask: Array, first: Indices, end: Indices, keys: Booleans
    ) -> tuple[Booleans, Booleans]:
        """`used` with a mask of keys alone: counts of its True values up to each end."""
        of_keys = jnp.broadcast_to(mask[:, :, 0], (*mask.shape[:2], self.num_keys))
        if self.segments is not None:
            batch = len(self.segments.keys)
            of_each = jnp.broadcast_to(of_keys, (batch, *of_keys.shape[1:]))
            return self.segments.any_of_keys(of_each, 2), keys & jnp.any(of_keys, axis=1)
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
