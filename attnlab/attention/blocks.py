"""The division of a call into chunks of batch rows and heads, and blocks of queries and keys."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attnlab.attention.masks import MaskSpec
from attnlab.attention.segments import Indices

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
"""What a loop passes on: arrays in tuples."""
Index: TypeAlias = Array | int
Kept: TypeAlias = tuple[Array, ...]
"""What a chunk keeps for the backward pass."""


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
PACKED_LIMITS = BlockLimits(queries=64, head_scores=64**2, block_scores=2**14)
"""Of packed texts: small blocks, which fewer texts share, are skipped more often; and blocks of one
batch row, as each row has its own texts."""


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
    mods: jax.tree_util.PyTreeDef | None
    """the structure of the score modifications"""
    limits: BlockLimits
    precision: str | None
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
    query_segments: Array | None
    key_segments: Array | None
    seed: Array | None
    mods: tuple[Array, ...]


class Block(NamedTuple):
    """A part of the scores [B, N, T, S]: a chunk (batch rows and heads), or a block of one."""

    division: Division
    inputs: ScoreInputs
    starts: tuple[Index, ...]
    sizes: tuple[int, ...]
    transposed: bool
    """Are its scores kept as [S, T]?"""
    head: int = 0
    """where its heads start in the chunk"""
    first: Array | None = None
    end: Array | None = None
    """query t attends at most to the keys from first[b, 0, t, 0] on and before end[b, 0, t, 0], in
    the order of axes of the scores; None hides nothing"""


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
    whole: Block,
    body: Callable[[Block, Carry, list[Array], Kept], tuple[Carry, list[Array], Kept]],
    carry: Carry,
    arrays: tuple[Array, ...],
    kept: Kept = (),
    reuse: bool = False,
) -> tuple[Carry, list[Array], Kept]:
    """body(chunk, carry, arrays, kept) -> (carry, made, kept), over all chunks.

    Arrays and what is made of them are [B, T, N, H] here and [b, n, T, H] there, transposed while
    they are in the cache. What is kept [chunks, b, n, T, 1] comes back as it was in a later call.
    `reuse`: what is made first takes the place of the first array, chunk by chunk.
    """
    division = whole.division
    (rows, heads, _, _), across = division.sizes, division.counts[1]

    def step(state: Any, xs: Any) -> Any:
        (carry, reused), (i, others, kept) = state, xs
        own = [lax.dynamic_index_in_dim(a, i, keepdims=False) for a in reused]
        chunk = whole._replace(starts=(i // across * rows, i % across * heads, 0, 0))
        transposed = [a.swapaxes(1, 2) for a in (*own, *others)]
        carry, made, kept = body(chunk, carry, transposed, kept)
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
    chunk: Block, query: Index, step: Callable[[Array, Block, Carry], Carry], carry: Carry
) -> Carry:
    """carry = step(index, block, carry) over the blocks of keys that the queries of a block, from
    `query` on, attend to."""
    size, starts = chunk.division.sizes[3], (*chunk.starts[:2], query)
    rows = chunk._replace(starts=(*starts, 0))
    first, end = part(chunk.inputs.first, rows), part(chunk.inputs.end, rows)
    lower: Index = 0
    upper: Index = chunk.division.counts[3]
    if first is not None and end is not None and upper > 1:
        lower, upper = jnp.min(first) // size, -(-jnp.max(end) // size)

    def body(j: Array, carry: Carry) -> Carry:
        return step(j, rows._replace(starts=(*starts, j * size), first=first, end=end), carry)

    last: Carry = lax.fori_loop(lower, upper, body, carry)
    return last


def small_blocks(chunk: Block) -> list[list[Block]]:
    """The one block of a chunk, divided: rows of small blocks for some heads at a time.

    A small block has only the keys that the causal rule and the window leave to its queries, and at
    least one. XLA's products of many small matrices run on one core of a CPU, so heads are divided
    too: each core works on scores that stay in its cache.
    """
    division, inputs, (b, n, _, _) = chunk.division, chunk.inputs, chunk.starts
    (rows, heads, t, s), rule, limits = division.sizes, division.rule.ranges(), division.limits
    size = t if rule is None else max(-(-t // limits.small_rows), min(limits.small_queries, t))
    rule = rule or (np.zeros((1, t), np.int32), np.full((1, t), s, np.int32))
    some = heads
    if jax.default_backend() == "cpu":
        some = _most_heads(heads, division.group, rows * size * s, limits.small_scores)
    made = []
    for head in range(0, heads, some):
        row = []
        for start in range(0, t, size):
            count = min(size, t - start)
            low, high = (a[:, None, start : start + count, None] for a in rule)
            lower = min(int(low.min()), s - 1)
            upper = max(int(high.max()), lower + 1)
            block = chunk._replace(
                starts=(b, n + head, start, lower), sizes=(rows, some, count, upper - lower),
                head=head,
            )  # fmt: skip
            if inputs.first is not None:  # lengths too
                first, end = part(inputs.first, block), part(inputs.end, block)
            else:
                first = as_kept(low if low.max() > lower else None, block)
                end = as_kept(high if high.min() < upper else None, block)
            row.append(block._replace(first=first, end=end))
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
    """An array that broadcasts to the scores, or [B or 1, T] of the queries, with zeros at the end
    of the last two axes, where these are not 1."""
    if a is None:
        return None
    a = a[:, None, :, None] if a.ndim == 2 else a
    last = [(0, p if d > 1 else 0) for d, p in zip(a.shape[2:], (t, s), strict=True)]
    return jnp.pad(a, [(0, 0), (0, 0), *last])


def _corner(a: Array, block: Block) -> tuple[Array, ...]:
    """Where the block starts in `a`: 0 on the axes where `a` has size 1."""
    return tuple(
        jnp.asarray(0 if d == 1 else i, jnp.int32)
        for d, i in zip(a.shape, block.starts, strict=True)
    )


def part(a: Array | None, block: Block) -> Array | None:
    """The block of an array that broadcasts to the scores, in their order of axes; axes of size 1
    stay."""
    if a is None:
        return None
    sizes = tuple(map(min, a.shape, block.sizes))
    found: Array = as_kept(lax.dynamic_slice(a, _corner(a, block), sizes), block)
    return found


def as_kept(a: Any, block: Block) -> Any:
    """[b, n, t, s] in the order of axes of the scores of the block, or back; None stays None."""
    if a is None:
        return None
    return jnp.swapaxes(a, 2, 3) if block.transposed else jnp.asarray(a)


def add_block(total: Array | None, block: Block, scores: Array) -> Array | None:
    """Adds a block of a [B, N, T, S] array, summed over the axes where `total` has size 1."""
    if total is None:
        return None
    axes = tuple(i for i, d in enumerate(total.shape) if d == 1)
    new = jnp.sum(as_kept(scores, block), axis=axes, keepdims=True)
    corner = _corner(total, block)
    old = lax.dynamic_slice(total, corner, new.shape)
    return lax.dynamic_update_slice(total, old + new, corner)


def keys_of(a: Array, block: Block) -> Array:
    """The keys (or values) of a small block."""
    per_head = block.division.sizes[1] // a.shape[1]
    heads = slice(block.head // per_head, (block.head + block.sizes[1]) // per_head)
    return a[:, heads, block.starts[3] : block.starts[3] + block.sizes[3]]


def queries_of(a: Array, block: Block) -> Array:
    """The queries of a small block."""
    heads = slice(block.head, block.head + block.sizes[1])
    return a[:, heads, block.starts[2] : block.starts[2] + block.sizes[2]]


def among_all_keys(a: Array, block: Block) -> Array:
    """The gradient of a small block's keys among zeros for the others."""
    before = block.starts[3]
    after = block.division.sizes[3] - before - block.sizes[3]
    return jnp.pad(a, ((0, 0), (0, 0), (before, after), (0, 0)))


def same_varying_axes(arrays: Tree) -> Tree:
    """Inside `shard_map` a loop needs one set of mesh axes for all that it carries.

    A choice between an array and itself, by a False that varies over all of these axes; the
    compiler drops it. It stands outside the custom derivative, so JAX itself sums the gradient
    of a bias that the devices share.
    """
    false = jnp.zeros((), bool)
    for a in jax.tree.leaves(arrays):
        false |= jnp.zeros_like(a, bool)[(0,) * a.ndim]
    same: Tree = jax.tree.map(lambda a: jnp.where(false, a, a), arrays)
    return same
