"""The division of a call into chunks of batch rows and heads, and blocks of queries and keys."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from attnlab.attention.masks import MaskSpec
from attnlab.attention.segments import Indices

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
"""What a loop passes on: arrays in tuples."""
Index: TypeAlias = Array | int
Starts: TypeAlias = tuple[Index, ...]


class BlockLimits(NamedTuple):
    """Limits of the division; the defaults were measured on a CPU with 1 MiB of L2 per core."""

    queries: int = 512
    """most queries of a block"""
    head_scores: int = 512**2
    """most scores of a head in a block"""
    block_scores: int = 2**19
    """most scores of a block of more than one group of heads"""
    small_queries: int = 64
    """fewest queries of a small block, unless there are fewer"""
    small_rows: int = 4
    """most rows of small blocks, one below the other"""
    small_scores: int = 2**16
    """most scores of a small block of more than one head"""


DEFAULT_LIMITS = BlockLimits()
PACKED_LIMITS = BlockLimits(queries=128, head_scores=128**2)
"""Of packed texts: small blocks, which fewer texts share, are skipped more often."""


class Division(NamedTuple):
    """How one call is divided: static, known before any array is."""

    shape: tuple[int, int, int, int]
    """B, N, T, S, before padding to whole blocks"""
    sizes: tuple[int, int, int, int]
    """batch rows, heads, queries and keys of a block"""
    group: int
    """heads that share key or value heads and stay in one block"""
    scale_q: float
    scale_scores: float
    """The scale is a factor of q or, where q is too narrow to be rounded again, of the scores"""
    soft_cap: float | None
    dropout_rate: float
    rule: MaskSpec
    """the causal rule and the window alone"""
    mods: jax.tree_util.PyTreeDef | None = None
    """the structure of the score modifications"""
    limits: BlockLimits = DEFAULT_LIMITS
    precision: str | None = None
    """of the products, for the backward pass, which JAX may trace in another context"""

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each axis."""
        return tuple(-(-a // b) for a, b in zip(self.shape, self.sizes, strict=True))

    @property
    def is_one_block(self) -> bool:
        """Does one block hold all queries and keys?"""
        return self.counts[2:] == (1, 1)


class ScoreInputs(NamedTuple):
    """What scores depend on, apart from q and k.

    Arrays that broadcast to [B, N, T, S], or None: a block takes its part of the axes that are not
    1. And the seed of dropout, or None, and the leaves of the score modifications.
    """

    bias: Array | None
    mask: Array | None
    first: Array | None
    end: Array | None
    seed: Array | None
    query_segments: Array | None = None
    key_segments: Array | None = None
    mods: tuple[Array, ...] = ()


class Chunk(NamedTuple):
    """Some batch rows and heads of a call."""

    division: Division
    inputs: ScoreInputs
    starts: Starts
    """of its batch rows and heads"""
    transposed: bool = False
    """Are scores kept as [S, T]?"""


class Block(NamedTuple):
    """A part of the scores [B, N, T, S], and which of its keys each query may attend to at most."""

    chunk: Chunk
    starts: Starts
    sizes: tuple[int, ...]
    head: int = 0
    """where its heads start in the chunk"""
    first: Array | Indices | None = None
    end: Array | Indices | None = None
    """query t attends to keys first[b, 0, t, 0] <= s < end[b, 0, t, 0]; None hides nothing"""


def block_sizes(
    shape: tuple[int, int, int, int], group: int, limits: BlockLimits = DEFAULT_LIMITS
) -> tuple[int, int, int, int]:
    """Batch rows, heads, queries and keys of a block: on a CPU its scores stay in the cache.

    Heads come in whole groups, those that share key or value heads. An accelerator takes all batch
    rows and heads at once (not measured).

    >>> block_sizes((2, 8, 4096, 4096), group=1)
    (1, 2, 512, 512)
    """

    def even(length: int, most: int) -> int:  # the size that needs the least padding
        return -(-length // -(-length // most))

    b, n, t, s = shape
    t = even(t, limits.queries)
    s = even(s, limits.head_scores // t)
    if jax.default_backend() != "cpu":
        return b, n, t, s
    heads = _most_heads(n, group, t * s, limits.block_scores)
    rows = limits.block_scores // (heads * t * s) if heads == n else 1
    return max(c for c in range(1, b + 1) if b % c == 0 and c <= max(rows, 1)), heads, t, s


def _most_heads(heads: int, group: int, scores: int, area: int) -> int:
    """The most heads that divide all heads in whole groups and have at most `area` scores."""
    return max(
        h
        for h in range(group, heads + 1, group)
        if heads % h == 0 and (h * scores <= area or h == group)
    )


# Loops


def over_chunks(
    division: Division,
    body: Callable[
        [Carry, Starts, list[Array], tuple[Array, ...]],
        tuple[Carry, list[Array], tuple[Array, ...]],
    ],
    carry: Carry,
    arrays: tuple[Array, ...],
    kept: tuple[Array, ...] = (),
    reuse: bool = False,
) -> tuple[Carry, list[Array], tuple[Array, ...]]:
    """body(carry, starts, arrays, kept) -> (carry, made, kept) of a chunk, over all chunks.

    Arrays and what is made of them are [B, T, N, H] here and [b, n, T, H] there, transposed while
    they are in the cache. What is kept [chunks, b, n, T, 1] comes back as it was in a later call.
    `reuse`: what is made first takes the place of the first array, chunk by chunk.
    """
    (rows, heads, _, _), across = division.sizes, division.counts[1]

    def step(
        state: tuple[Carry, list[Array]], xs: tuple[Array, list[Array], tuple[Array, ...]]
    ) -> tuple[tuple[Carry, list[Array]], tuple[list[Array], tuple[Array, ...]]]:
        (carry, reused), (i, others, kept) = state, xs
        own = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in reused]
        starts = (i // across * rows, i % across * heads)
        transposed = [a.swapaxes(1, 2) for a in (*own, *others)]
        carry, made, kept = body(carry, starts, transposed, kept)
        made = [a.swapaxes(1, 2) for a in made]
        reused = [
            lax.dynamic_update_index_in_dim(a, new, i, 0)
            for a, new in zip(reused, made, strict=False)
        ]
        return (carry, reused), (made[len(reused) :], kept)

    cuts = [to_chunks(division, a) for a in arrays]
    xs = (jnp.arange(len(cuts[0])), cuts[reuse:], kept)
    (carry, reused), (made, kept) = lax.scan(step, (carry, cuts[:reuse]), xs)
    return carry, [from_chunks(division, a) for a in (*reused, *made)], kept


def over_keys(
    chunk: Chunk, query: Index, step: Callable[[Array, Block, Carry], Carry], carry: Carry
) -> Carry:
    """carry = step(index, block, carry) over the blocks of keys that the queries of a block, from
    `query` on, attend to."""
    division, inputs, starts = chunk.division, chunk.inputs, (*chunk.starts, query)
    rows = Block(chunk, (*starts, 0), division.sizes)
    first, end = take(inputs.first, rows), take(inputs.end, rows)
    size = division.sizes[3]
    lower: Index = 0
    upper: Index = division.counts[3]
    if first is not None and end is not None and upper > 1:
        lower, upper = jnp.min(first) // size, -(-jnp.max(end) // size)

    def body(j: Array, carry: Carry) -> Carry:
        block = Block(chunk, (*starts, j * size), division.sizes, first=first, end=end)
        return step(j, block, carry)

    last: Carry = lax.fori_loop(lower, upper, body, carry)
    return last


def small_blocks(chunk: Chunk) -> list[list[Block]]:
    """The one block of a chunk, divided: rows of small blocks for some heads at a time.

    A small block has only the keys that the causal rule and the window leave to its queries. XLA's
    products of many small matrices run on one core of a CPU, so heads are divided too: each core
    works on scores that stay in its cache.
    """
    division, inputs, (b, n), _ = chunk
    (rows, heads, t, s), rule, limits = division.sizes, division.rule.ranges(), division.limits
    size = t if rule is None else max(-(-t // limits.small_rows), min(limits.small_queries, t))
    some = heads
    if jax.default_backend() == "cpu":
        some = _most_heads(heads, division.group, rows * size * s, limits.small_scores)
    made = []
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
            starts, sizes = (b, n + head, start, lower), (rows, some, count, upper - lower)
            block = Block(chunk, starts, sizes, head, first, end)
            if inputs.first is not None:  # lengths too
                block = block._replace(first=take(inputs.first, block), end=take(inputs.end, block))
            row.append(block)
        made.append(row)
    return made


# Parts of arrays


def to_chunks(division: Division, a: Array) -> Array:
    """[B, T, N, H] -> [chunks, b, T, n, H]"""
    (b, t, h, w), (rows, _, _, _), across = a.shape, division.sizes, division.counts[1]
    a = a.reshape(b // rows, rows, t, across, h // across, w)
    return a.transpose(0, 3, 1, 2, 4, 5).reshape(-1, rows, t, h // across, w)


def from_chunks(division: Division, a: Array) -> Array:
    """[chunks, b, T, n, H] -> [B, T, N, H]"""
    (_, rows, t, h, w), across = a.shape, division.counts[1]
    a = a.reshape(-1, across, rows, t, h, w).transpose(0, 2, 3, 1, 4, 5)
    return a.reshape(-1, t, across * h, w)


def split(a: Array, size: int) -> Array:
    """[b, n, T, H] -> [T / size, b, n, size, H]"""
    b, n, t, h = a.shape
    return a.reshape(b, n, t // size, size, h).transpose(2, 0, 1, 3, 4)


def unsplit(a: Array) -> Array:
    """[T / size, b, n, size, H] -> [b, n, T, H]"""
    count, b, n, size, h = a.shape
    return a.transpose(1, 2, 0, 3, 4).reshape(b, n, count * size, h)


def join(parts: list[list[Array]]) -> Array:
    """One array of a chunk from those of its small blocks."""
    return jnp.concatenate([jnp.concatenate(row, axis=2) for row in parts], axis=1)


def pad(a: Array | Indices | None, t: int, s: int) -> Array | None:
    """Zeros at the end of the last two axes, where these are not 1."""
    if a is None:
        return None
    last = [(0, p if d > 1 else 0) for d, p in zip(a.shape[2:], (t, s), strict=True)]
    return jnp.pad(a, [(0, 0), (0, 0), *last])


def _corner(a: Array, starts: Starts) -> tuple[Array, ...]:
    """`starts`, 0 on the axes where `a` has size 1."""
    return tuple(
        jnp.asarray(0 if d == 1 else i, jnp.int32) for d, i in zip(a.shape, starts, strict=True)
    )


def take(a: Array | None, block: Block) -> Array | None:
    """The block of an array that broadcasts to the scores; axes of size 1 stay."""
    if a is None:
        return None
    sizes = tuple(min(d, size) for d, size in zip(a.shape, block.sizes, strict=True))
    return lax.dynamic_slice(a, _corner(a, block.starts), sizes)


def keys_of(a: Array, block: Block) -> Array:
    """The keys (or values) of a small block."""
    per_head = block.chunk.division.sizes[1] // a.shape[1]
    heads = slice(block.head // per_head, (block.head + block.sizes[1]) // per_head)
    return a[:, heads, block.starts[3] : block.starts[3] + block.sizes[3]]


def queries_of(a: Array, block: Block) -> Array:
    """The queries of a small block."""
    heads = slice(block.head, block.head + block.sizes[1])
    return a[:, heads, block.starts[2] : block.starts[2] + block.sizes[2]]


def among_all_keys(a: Array, block: Block) -> Array:
    """The gradient of a small block's keys among zeros for the others."""
    before = block.starts[3]
    after = block.chunk.division.sizes[3] - before - block.sizes[3]
    return jnp.pad(a, ((0, 0), (0, 0), (before, after), (0, 0)))


def as_kept(a: Array | Indices | None, block: Block) -> Array | None:
    """[b, n, t, s] in the order of axes in which the scores of the chunk are kept, or back."""
    if a is None:
        return None
    a = jnp.asarray(a)
    return a.swapaxes(2, 3) if block.chunk.transposed else a


def add_block(total: Array | None, block: Block, scores: Array) -> Array | None:
    """Adds a block of a [B, N, T, S] array, summed over the axes where `total` has size 1."""
    if total is None:
        return None
    axes = tuple(i for i, d in enumerate(total.shape) if d == 1)
    new = as_kept(scores, block)
    assert new is not None
    new = jnp.sum(new, axis=axes, keepdims=True)
    old = take(total, block._replace(sizes=new.shape))
    assert old is not None
    return lax.dynamic_update_slice(total, old + new, _corner(total, block.starts))


def same_varying_axes(arrays: Tree) -> Tree:
    """Inside `shard_map` a loop needs one set of mesh axes for all that it carries.

    A choice between an array and itself, by a False that varies over all of these axes; the
    compiler drops it. It stands outside the custom derivative, so JAX itself sums the gradient
    of a bias that the devices share.
    """
    false = jnp.zeros((), bool)
    for a in jax.tree.leaves(arrays):
        false |= jnp.zeros_like(a, bool)[(0,) * a.ndim]
    leaves, tree = jax.tree.flatten(arrays)
    result: Tree = jax.tree.unflatten(tree, [jnp.where(false, a, a) for a in leaves])
    return result
