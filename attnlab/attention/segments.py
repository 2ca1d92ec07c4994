"""Packed texts: which keys of its own text a query attends to, without a [T, S] array."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int

Indices = Int[Array | np.ndarray, "..."]


class Segments(NamedTuple):
    """The segments of a call, and the keys that they, with all other rules, leave to a query.

    Query t of batch row b attends to the keys order[b, lower[b, t] : upper[b, t]].
    """

    queries: Int[Array, "B T"]
    keys: Int[Array, "B S"]
    order: Int[Array, "B S"]
    """the keys, sorted by segment and within one by position"""
    lower: Int[Array, "B T"]
    upper: Int[Array, "B T"]
    first: Int[Array, "B T"]
    """the first of the keys of a query, S if it has none"""
    end: Int[Array, "B T"]
    """one past the last of them, 0 if it has none"""
    used: Bool[Array, "B S"]
    """which keys a query attends to"""
    length: int | None = None
    """of each text, where that is known and the same for all of them"""

    def any_of_keys(self, marked: Bool[Array, "*B S"], axis: int = 1) -> Bool[Array, "*B T"]:
        """Is one of the keys of a query marked?"""
        order, lower, upper = (
            jnp.expand_dims(a, tuple(range(1, axis))) for a in (self.order, self.lower, self.upper)
        )
        before = jnp.cumsum(jnp.take_along_axis(marked, order, axis), axis)
        before = jnp.pad(before, [(0, 0)] * axis + [(1, 0)])
        found: Array = jnp.take_along_axis(before, upper, axis) > jnp.take_along_axis(
            before, lower, axis
        )
        return found


def find_segments(
    queries: Int[Array, "B T"], keys: Int[Array, "B S"], first: Indices | int, end: Indices | int
) -> Segments:
    """The `Segments` of these numbers; query t attends at most to the keys from first to end.

    Costs O((T + S) log S): the keys are sorted by segment, so those of a query are one range.

    Args:
      queries, keys: the number of the text of each; 0 for padding.
      first, end: [B or 1, T], or one number.

    >>> packed = jnp.array([[1, 1, 2, 0]])
    >>> found = find_segments(packed, packed, 0, 4)
    >>> found.first.tolist(), found.end.tolist(), found.used.tolist()
    ([[0, 0, 2, 4]], [[2, 2, 3, 0]], [[True, True, True, False]])
    """
    bounds = (jnp.broadcast_to(jnp.asarray(a, jnp.int32), queries.shape) for a in (first, end))
    return Segments(queries, keys, *_of_rows(queries, keys, *bounds))


def _of_one_row(queries: Array, keys: Array, first: Array, end: Array) -> tuple[Array, ...]:
    """order, lower, upper, first, end, used."""
    size = len(keys)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    lower, upper = (
        jnp.searchsorted(keys[order], queries, side=side).astype(jnp.int32)
        for side in ("left", "right")
    )
    upper = jnp.where(queries == 0, lower, upper)

    def before(position: Array) -> Array:
        """The index of the first key of the segment from this position on, by bisection."""

        def halve(_: object, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            is_before = (low < high) & (order[middle] < position)
            return jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)

        found: Array = lax.fori_loop(0, size.bit_length(), halve, (lower, upper))[0]
        return found

    lower, upper = before(first), before(end)
    upper = jnp.maximum(lower, upper)
    some = lower < upper
    first = jnp.where(some, order[lower], size)
    end = jnp.where(some, order[upper - 1] + 1, 0)
    count = some.astype(jnp.int32)
    edges = jnp.zeros(size + 1, jnp.int32).at[lower].add(count).at[upper].add(-count)
    used = jnp.zeros(size, bool).at[order].set(jnp.cumsum(edges)[:-1] > 0)
    return order, lower, upper, first, end, used


_of_rows = jax.jit(jax.vmap(_of_one_row))
"""`_of_one_row` of each batch row; outside of `jit` it is compiled once for each shape."""


def equal_length(queries: object, keys: object) -> int | None:
    """The length of every text, if NumPy arrays say that all have one and fill the rows.

    >>> packed = np.array([[1, 1, 2, 2]])
    >>> equal_length(packed, packed), equal_length(packed[:, 1:], packed[:, 1:])
    (2, None)
    """
    if not isinstance(queries, np.ndarray) or not isinstance(keys, np.ndarray):
        return None
    if queries.shape != keys.shape or (queries != keys).any() or not queries.all():
        return None
    ids = queries.reshape(-1, queries.shape[-1])
    size = int(np.argmax(np.append(ids[0] != ids[0, 0], True)))
    if ids.shape[1] % size:
        return None
    texts = ids.reshape(len(ids), -1, size)
    differ = all(len(np.unique(row)) == len(row) for row in texts[..., 0])
    return size if differ and (texts == texts[..., :1]).all() else None


def restarted(count: Int[Array, "*B T"], segments: Indices) -> Int[Array, "B T"]:
    """A count along the tokens that is 0 at the first token of each text.

    Args:
      count: does not fall from token to token.
      segments: [B, T]; the tokens of one text stand in a row.

    >>> restarted(jnp.arange(5), jnp.array([[1, 1, 1, 2, 2]])).tolist()
    [[0, 1, 2, 0, 1]]
    """
    segments = jnp.asarray(segments)
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return count - lax.cummax(jnp.where(is_first, count, 0), axis=1)
