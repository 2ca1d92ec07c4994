"""Attention in blocks that stay in the cache: no [T, S] array, forward or backward.

The softmax of a row is kept as its largest score, its sum and its output so far, and corrected
when a later key block has a larger score (online softmax: Milakov & Gimelshein 2018, arXiv
1805.02867; attention in O(T) memory: Rabe & Staats 2021, arXiv 2112.05682). The backward pass
computes the scores again, block by block (Dao et al. 2022, arXiv 2205.14135).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from attnlab.attention.dense import (
    Options,
    dropout_seed,
    hide,
    kept,
    lowest,
    refuse_edit,
    row_top,
    scores,
    weighted,
    wide_dtype,
)
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward


class Blocks(NamedTuple):
    """How one call is cut: what is known before any array is."""

    shape: tuple[int, int, int, int]
    """B, N, T, S, before padding to whole blocks"""
    sizes: tuple[int, int, int, int]
    """batch rows, heads, queries and keys of a block"""
    scale: float
    soft_cap: float | None
    dropout_rate: float

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-a // b) for a, b in zip(self.shape, self.sizes, strict=True))


class Extras(NamedTuple):
    """Arrays that broadcast to [B, N, T, S], or None: a block takes its part of the axes not 1.

    And the two words of the dropout's seed, or None.
    """

    bias: Any
    mask: Any
    first: Any
    end: Any
    seed: Any


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
    heads = max(
        h for h in range(group, n + 1, group) if n % h == 0 and (h * t * s <= AREA or h == group)
    )
    rows = AREA // (heads * t * s) if heads == n else 1
    return max(c for c in range(1, b + 1) if b % c == 0 and c <= max(rows, 1)), heads, t, s


EDGE, AREA = 512, 2**19  # most queries (and keys beside them), most scores of a block


def blockwise(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """Attention without a [T, S] array. No second or forward-mode derivatives: see `dense`."""
    (b, t, n, _), (_, s, k, _), kv = query.shape, key.shape, value.shape[2]
    group = math.lcm(n // k, n // kv)
    shape = (b, n, t, s)
    scale = options.scale
    if not isinstance(scale, int | float):  # an array: its gradient goes through q
        query, scale = query.astype(wide_dtype(query, key)) * scale, 1.0
    sizes = block_sizes(shape, group)
    blocks = Blocks(shape, sizes, scale, options.logits_soft_cap, options.dropout_rate)
    cb, cn, tq, sk = blocks.sizes
    ranges = visible.ranges()
    if ranges is None and s % sk:
        ranges = Visible(1, s + 1, key_lengths=jnp.full(1, s)).ranges()
    first, end = (None, None) if ranges is None else (a[:, None, :, None] for a in ranges)
    pads = (-t % tq, -s % sk)
    arrays = (
        _cut(query, cb, cn, tq),
        _cut(key, cb, cn * k // n, sk),
        _cut(value, cb, cn * kv // n, sk),
        Extras(
            _pad(bias, *pads),
            _pad(visible.mask, *pads),
            _pad(first, *pads),
            _pad(end, *pads),
            dropout_seed(options),
        ),
    )
    out, residual = _attend(blocks, *_vary_alike(arrays))
    seen = {"out": _join(out, shape)}
    if options.return_residual:
        seen["residual"] = _join(residual, shape)[..., 0]
    return seen


def refuse_blockwise(query, key, value, bias, visible, options: Options) -> str | None:
    if options.mix != (None, None):
        return "mix needs the scores of all heads at once"
    if visible.edges is not None:
        return "edges lie anywhere, not in blocks"
    return refuse_edit(options)


def _vary_alike(arrays: Any) -> Any:
    """Inside `shard_map` a loop wants one set of mesh axes for all that it carries.

    A choice between an array and itself, by a False that varies over all of these axes; the
    compiler drops it. It stands outside the custom derivative, so JAX itself sums the gradient
    of a bias that the devices share.
    """
    false = jnp.zeros((), bool)
    for a in jax.tree.leaves(arrays):
        false |= jnp.zeros_like(a, bool)[(0,) * a.ndim]
    return jax.tree.map(lambda a: jnp.where(false, a, a), arrays)


def _cut(a: Array, batch: int, heads: int, length: int) -> Array:
    """[B, T, N, H] -> [B/batch * N/heads, T/length, batch, heads, length, H]."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % length), (0, 0), (0, 0)))
    b, t, n, h = a.shape
    a = a.reshape(b // batch, batch, t // length, length, n // heads, heads, h)
    return a.transpose(0, 4, 2, 1, 5, 3, 6).reshape(-1, t // length, batch, heads, length, h)


def _join(a: Array, shape: tuple[int, ...]) -> Array:
    """What `_cut` cut, without its padding."""
    (_, count, batch, heads, length, h), (b, n, t, _) = a.shape, shape
    a = a.reshape(b // batch, n // heads, count, batch, heads, length, h)
    return a.transpose(0, 3, 2, 5, 1, 4, 6).reshape(b, count * length, n, h)[:, :t]


def _pad(a: Any, t: int, s: int) -> Array | None:
    """Zeros at the end of the last two axes, where these are not 1."""
    if a is None:
        return None
    pads = [
        (0, 0),
        (0, 0),
        *((0, p if d > 1 else 0) for d, p in zip(a.shape[2:], (t, s), strict=True)),
    ]
    return jnp.pad(a, pads)


def _starts(a: Array, starts: tuple) -> tuple:
    return tuple(
        jnp.asarray(0 if d == 1 else i, jnp.int32) for d, i in zip(a.shape, starts, strict=True)
    )


def _part(a: Array, starts: tuple, sizes: tuple) -> Array:
    """The block of `a` at `starts`; axes of size 1 stay."""
    sizes = tuple(min(d, size) for d, size in zip(a.shape, sizes, strict=True))
    return lax.dynamic_slice(a, _starts(a, starts), sizes)


def _block_scores(blocks: Blocks, q, k, extras: Extras, starts: tuple) -> tuple[Array, Array]:
    """Scores of one block, before and after hidden ones sank."""
    sizes = blocks.sizes
    bias = None if extras.bias is None else _part(extras.bias, starts, sizes)
    x = scores(q, k, bias, blocks.scale, blocks.soft_cap)
    hidden = x
    if extras.mask is not None:
        hidden = hide(hidden, _part(extras.mask, starts, sizes))
    if extras.first is not None:
        first, end = (_part(a, starts, sizes) for a in (extras.first, extras.end))
        key = starts[3] + jnp.arange(sizes[3], dtype=jnp.int32)
        hidden = hide(hidden, (first <= key) & (key < end))
    return x, hidden


def key_blocks(blocks: Blocks, first, end) -> tuple[Any, Any]:
    """The key blocks from..to (exclusive) that any row of these ranges sees."""
    return jnp.min(first) // blocks.sizes[3], -(-jnp.max(end) // blocks.sizes[3])


def _over_keys(blocks: Blocks, extras: Extras, starts: tuple, step, carry):
    """carry = step(key block, carry) over the key blocks that these queries may see."""
    count = blocks.counts[3]
    if count == 1:
        return step(0, carry)
    lower, upper = 0, count
    if extras.first is not None:
        ranges = (_part(a, starts, blocks.sizes) for a in (extras.first, extras.end))
        lower, upper = key_blocks(blocks, *ranges)
    return lax.fori_loop(lower, upper, step, carry)


def _chunk_start(blocks: Blocks, chunk) -> tuple:
    heads = blocks.counts[1]
    return chunk // heads * blocks.sizes[0], chunk % heads * blocks.sizes[1]


def _drop(blocks: Blocks, extras: Extras, starts: tuple, p: Array) -> Array:
    if not blocks.dropout_rate:
        return p
    drawn = kept(extras.seed, blocks.dropout_rate, starts, blocks.sizes, blocks.shape)
    return jnp.where(drawn, p / (1 - blocks.dropout_rate), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, query, key, value, extras: Extras):
    """Output and log sum exp, in blocks."""
    return _forward(blocks, query, key, value, extras)[0]


def _forward(blocks: Blocks, query, key, value, extras: Extras):
    tq, sk = blocks.sizes[2:]

    def rows(chunk, k, v, i, q):
        def step(j, carry):
            top, total, out = carry
            at = (*starts, j * sk)
            _, x = _block_scores(blocks, q, k[j], extras, at)
            new = jnp.maximum(top, row_top(x))
            weights, fade = jnp.exp(x - new), jnp.exp(top - new)
            total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
            return new, total, out * fade + weighted(_drop(blocks, extras, at, weights), v[j])

        starts = (*_chunk_start(blocks, chunk), i * tq)
        wide = jnp.result_type(q, k, jnp.float32)
        zero = jnp.zeros_like(q, wide)[..., :1]
        out = jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1]))
        carry = (zero + lowest(wide) / 2, zero, out)
        top, total, out = _over_keys(blocks, extras, (*starts, 0), step, carry)
        some = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(some), -math.inf)
        return (out / some).astype(v.dtype), lse, top, jnp.where(total > 0, 1 / some, 0)

    def chunk(args):
        i, q, k, v = args
        return lax.map(lambda a: rows(i, k, v, *a), (jnp.arange(q.shape[0]), q))

    made = lax.map(chunk, (jnp.arange(query.shape[0]), query, key, value))
    out, lse, top, share = save_for_backward(made)
    return (out, lse), (query, key, value, extras, out, top, share)


def _backward(blocks: Blocks, saved, cotangents):
    query, key, value, extras, out, top, share = saved
    d_out, d_lse = cotangents
    (_, _, tq, sk), wide = blocks.sizes, top.dtype
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    delta = delta - jnp.where(share > 0, d_lse, 0)  # an empty row's may be NaN
    d_bias = None if extras.bias is None else jnp.zeros_like(extras.bias, wide)

    def rows(chunk, k, v, carry, args):
        i, q, do, delta, top, share = args
        starts = (*_chunk_start(blocks, chunk), i * tq)

        def step(j, carry):
            dq, dk, dv, d_bias = carry
            at = (*starts, j * sk)
            x, hidden = _block_scores(blocks, q, k[j], extras, at)
            p = jnp.exp(hidden - top) * share
            dp = _drop(blocks, extras, at, scores(do, v[j], None, 1.0, None))
            ds = p * (dp - delta)
            if blocks.soft_cap is not None:
                ds = ds * (1 - jnp.square(x / blocks.soft_cap))
            if d_bias is not None:
                d_bias = _add_part(d_bias, at, ds)
            ds = ds.astype(q.dtype)
            dv = dv.at[j].add(
                _transposed(_drop(blocks, extras, at, p).astype(v.dtype), do, v.shape[2], wide)
            )
            dk = dk.at[j].add(_transposed(ds, q, k.shape[2], wide))
            return dq + weighted(ds, k[j]).astype(wide), dk, dv, d_bias

        dq, *carry = _over_keys(
            blocks, extras, (*starts, 0), step, (jnp.zeros_like(q, wide), *carry)
        )
        return tuple(carry), (dq * blocks.scale).astype(q.dtype)

    def chunk(d_bias, args):
        i, q, k, v, *of_rows = args
        carry = (jnp.zeros_like(k, wide), jnp.zeros_like(v, wide), d_bias)
        body = functools.partial(rows, i, k, v)
        (dk, dv, d_bias), dq = lax.scan(body, carry, (jnp.arange(q.shape[0]), q, *of_rows))
        return d_bias, (dq, (dk * blocks.scale).astype(k.dtype), dv.astype(v.dtype))

    xs = (jnp.arange(query.shape[0]), query, key, value, d_out, delta, top, share)
    d_bias, grads = lax.scan(chunk, d_bias, xs)
    if d_bias is not None:
        d_bias = d_bias.astype(extras.bias.dtype)
    return *grads, Extras(d_bias, None, None, None, None)


def _transposed(a: Array, b: Array, heads: int, wide) -> Array:
    """[B, K, S, H] = sum over the rows of a key head of a [B, N, T, S] times b [B, N, T, H]."""
    a, b = (x.reshape(x.shape[0], heads, -1, x.shape[-1]) for x in (a, b))
    return jnp.einsum("BKRS,BKRH->BKSH", a, b, preferred_element_type=wide)


def _add_part(total: Array, starts: tuple, part: Array) -> Array:
    """Adds a block of a [B, N, T, S] array, summed over the axes where `total` has size 1."""
    axes = tuple(i for i, d in enumerate(total.shape) if d == 1)
    part = jnp.sum(part, axis=axes, keepdims=True)
    old = _part(total, starts, part.shape)
    return lax.dynamic_update_slice(total, old + part, _starts(total, starts))


_attend.defvjp(_forward, _backward)
