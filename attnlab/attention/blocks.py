"""How blockwise attention is cut: chunks of batch rows and heads, blocks of queries and keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from attnlab.attention.visible import Visible


class Blocks(NamedTuple):
    """How one call is cut: what is known before any array is."""

    shape: tuple[int, int, int, int]
    """B, N, T, S, before padding to whole blocks"""
    sizes: tuple[int, int, int, int]
    """batch rows, heads, queries and keys of a block"""
    group: int
    """heads that are never parted: they share key or value heads"""
    scale_q: float
    scale_scores: float
    """The scale is a factor of q or, where q is too narrow to be rounded again, of the scores"""
    soft_cap: float | None
    dropout_rate: float
    rule: Visible
    """the causal rule and the window alone"""

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-a // b) for a, b in zip(self.shape, self.sizes, strict=True))

    def together(self, queries: int) -> int:
        """Heads of a piece with so many queries."""
        rows, heads, _, s = self.sizes
        if jax.default_backend() != "cpu":
            return heads
        return most_heads(heads, self.group, rows * queries * s, PIECE)


class Extras(NamedTuple):
    """Arrays that broadcast to [B, N, T, S], or None: a block takes its part of the axes not 1.

    And the two words of the dropout's seed, or None.
    """

    bias: Any
    mask: Any
    first: Any
    end: Any
    seed: Any


class Place(NamedTuple):
    """A block of [B, N, T, S], and which of its keys each of its queries may see at most."""

    starts: tuple
    sizes: tuple[int, ...]
    flip: bool
    """Are its scores kept as [S, T]?"""
    head: int = 0
    """Where its heads start in the chunk"""
    first: Any = None
    end: Any = None
    """query t sees the keys from first[b, 0, t, 0] to end[b, 0, t, 0]; None hides nothing"""


def block_sizes(shape: tuple[int, int, int, int], group: int) -> tuple[int, int, int, int]:
    """Batch rows, heads, queries and keys of a block: on a CPU its scores stay in the cache.

    Heads come in whole groups, those that share key or value heads. Measured on a CPU with 1 MiB
    of L2 per core; an accelerator takes all batch rows and heads at once (not measured).
    """
    b, n, t, s = shape
    even = lambda length, most: -(-length // -(-length // most))  # the least padding
    t = even(t, EDGE)
    s = even(s, EDGE**2 // t)
    if jax.default_backend() != "cpu":
        return b, n, t, s
    heads = most_heads(n, group, t * s, AREA)
    rows = AREA // (heads * t * s) if heads == n else 1
    return max(c for c in range(1, b + 1) if b % c == 0 and c <= max(rows, 1)), heads, t, s


def most_heads(heads: int, group: int, scores: int, area: int) -> int:
    """That divide the heads in whole groups and have no more scores than the area, if any do."""
    fit = lambda h: heads % h == 0 and (h * scores <= area or h == group)
    return max(h for h in range(group, heads + 1, group) if fit(h))


EDGE, AREA = 512, 2**19  # most queries (and keys beside them), most scores of a block
STRIP, STRIPS = 64, 4  # least queries of a strip, most strips of a block
PIECE = 2**16  # most scores of a piece of more than one head


def over_chunks(
    blocks: Blocks, body: Callable, carry: Any, arrays: tuple, kept: tuple = (), reuse: bool = False
) -> tuple[Any, list[Array], tuple]:
    """body(carry, starts, arrays, kept) -> (carry, made, kept) of a chunk, over all chunks.

    Arrays and what is made of them are [B, T, N, H] here and [b, n, T, H] there, turned while they
    are in the cache. What is kept [chunks, b, n, T, 1] comes back as it was in a later call.
    `reuse`: what is made first takes the place of the first array, chunk by chunk.
    """
    (rows, heads, _, _), across = blocks.sizes, blocks.counts[1]

    def step(carry, args):
        carry, place = carry
        i, others, kept = args
        own = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in place]
        starts = (i // across * rows, i % across * heads)
        turned = [a.swapaxes(1, 2) for a in (*own, *others)]
        carry, made, kept = body(carry, starts, turned, kept)
        made = [a.swapaxes(1, 2) for a in made]
        fill = lambda a, new: lax.dynamic_update_index_in_dim(a, new, i, 0)
        return (carry, list(map(fill, place, made))), (made[len(place) :], kept)

    cuts = [cut(blocks, a) for a in arrays]
    xs = (jnp.arange(len(cuts[0])), cuts[reuse:], kept)
    (carry, place), (made, kept) = lax.scan(step, (carry, cuts[:reuse]), xs)
    return carry, [join(blocks, a) for a in (*place, *made)], kept


def cut(blocks: Blocks, a: Array) -> Array:
    """[B, T, N, H] -> [chunks, b, T, n, H]"""
    (b, t, h, w), (rows, _, _, _), across = a.shape, blocks.sizes, blocks.counts[1]
    a = a.reshape(b // rows, rows, t, across, h // across, w)
    return a.transpose(0, 3, 1, 2, 4, 5).reshape(-1, rows, t, h // across, w)


def join(blocks: Blocks, a: Array) -> Array:
    (_, rows, t, h, w), across = a.shape, blocks.counts[1]
    a = a.reshape(-1, across, rows, t, h, w).transpose(0, 2, 3, 1, 4, 5)
    return a.reshape(-1, t, across * h, w)


def split(a: Array, size: int) -> Array:
    """[b, n, T, H] -> [T / size, b, n, size, H]"""
    b, n, t, h = a.shape
    return a.reshape(b, n, t // size, size, h).transpose(2, 0, 1, 3, 4)


def unsplit(a: Array) -> Array:
    count, b, n, size, h = a.shape
    return a.transpose(1, 2, 0, 3, 4).reshape(b, n, count * size, h)


def pad(a: Any, t: int, s: int) -> Array | None:
    """Zeros at the end of the last two axes, where these are not 1."""
    if a is None:
        return None
    pads = [
        (0, 0),
        (0, 0),
        *((0, p if d > 1 else 0) for d, p in zip(a.shape[2:], (t, s), strict=True)),
    ]
    return jnp.pad(a, pads)


def corner(a: Array, starts: tuple) -> tuple:
    """`starts`, 0 on the axes where `a` has size 1."""
    return tuple(
        jnp.asarray(0 if d == 1 else i, jnp.int32) for d, i in zip(a.shape, starts, strict=True)
    )


def take(a: Any, at: Place) -> Any:
    """The block of `a` at `at`; axes of size 1 stay."""
    if a is None:
        return None
    sizes = tuple(min(d, size) for d, size in zip(a.shape, at.sizes, strict=True))
    return lax.dynamic_slice(a, corner(a, at.starts), sizes)


def key_blocks(blocks: Blocks, first, end) -> tuple[Any, Any]:
    """The key blocks from..to (exclusive) that any row of these ranges sees."""
    return jnp.min(first) // blocks.sizes[3], -(-jnp.max(end) // blocks.sizes[3])


def over_keys(blocks: Blocks, extras: Extras, starts: tuple, flip: bool, step, carry):
    """carry = step(key block, place, carry) over the key blocks that these queries may see."""
    rows = Place((*starts, 0), blocks.sizes, flip)
    rows = rows._replace(first=take(extras.first, rows), end=take(extras.end, rows))
    lower, upper = 0, blocks.counts[3]
    if extras.first is not None and upper > 1:
        lower, upper = key_blocks(blocks, rows.first, rows.end)
    place = lambda j: rows._replace(starts=(*starts, j * blocks.sizes[3]))
    return lax.fori_loop(lower, upper, lambda j, carry: step(j, place(j), carry), carry)


def pieces(blocks: Blocks, extras: Extras, starts: tuple, flip: bool) -> list[list[Place]]:
    """The one block of a chunk, some heads at a time, each in strips of queries.

    A strip has the keys alone that the rule leaves. XLA's products of many small matrices run on
    one core of a CPU, so heads are cut too: each core works on pieces that stay in its own cache.
    """
    (rows, heads, t, s), (b, n) = blocks.sizes, starts
    rule = blocks.rule.ranges()
    size = t if rule is None else max(-(-t // STRIPS), min(STRIP, t))
    some = blocks.together(size)
    places = []
    for head in range(0, heads, some):
        row = []
        for start in range(0, t, size):
            count = min(size, t - start)
            lower, upper, first, end = 0, s, None, None
            if rule is not None:
                first, end = (a[:, None, start : start + count, None] for a in rule)
                lower, upper = int(first.min()), max(int(end.max()), int(first.min()))
                first = first if first.max() > lower else None
                end = end if end.min() < upper else None
            at = (b, n + head, start, lower), (rows, some, count, upper - lower)
            place = Place(*at, flip, head, first, end)
            if extras.first is not None:  # lengths too
                place = place._replace(first=take(extras.first, place), end=take(extras.end, place))
            row.append(place)
        places.append(row)
    return places


def put_together(made: list[list[Array]]) -> Array:
    """What is made of `pieces`, as one array of the chunk."""
    return jnp.concatenate([jnp.concatenate(row, axis=2) for row in made], axis=1)


def keys_of(a: Array, at: Place, blocks: Blocks) -> Array:
    share = blocks.sizes[1] // a.shape[1]
    heads = slice(at.head // share, (at.head + at.sizes[1]) // share)
    return a[:, heads, at.starts[3] : at.starts[3] + at.sizes[3]]


def rows_of(a: Array, at: Place) -> Array:
    heads = slice(at.head, at.head + at.sizes[1])
    return a[:, heads, at.starts[2] : at.starts[2] + at.sizes[2]]


def among_keys(a: Array, at: Place, blocks: Blocks) -> Array:
    """The gradient of a strip's keys among zeros for the others."""
    before = at.starts[3]
    after = blocks.sizes[3] - before - at.sizes[3]
    return jnp.pad(a, ((0, 0), (0, 0), (before, after), (0, 0)))


def add_part(total: Any, at: Place, part: Array) -> Any:
    """Adds a block of a [B, N, T, S] array, summed over the axes where `total` has size 1."""
    if total is None:
        return None
    part = part.swapaxes(2, 3) if at.flip else part
    axes = tuple(i for i, d in enumerate(total.shape) if d == 1)
    part = jnp.sum(part, axis=axes, keepdims=True)
    old = take(total, at._replace(sizes=part.shape))
    return lax.dynamic_update_slice(total, old + part, corner(total, at.starts))


def vary_alike(arrays: Any) -> Any:
    """Inside `shard_map` a loop wants one set of mesh axes for all that it carries.

    A choice between an array and itself, by a False that varies over all of these axes; the
    compiler drops it. It stands outside the custom derivative, so JAX itself sums the gradient
    of a bias that the devices share.
    """
    false = jnp.zeros((), bool)
    for a in jax.tree.leaves(arrays):
        false |= jnp.zeros_like(a, bool)[(0,) * a.ndim]
    return jax.tree.map(lambda a: jnp.where(false, a, a), arrays)
