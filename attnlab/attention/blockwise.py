"""Attention in blocks that stay in the cache: no [T, S] array, forward or backward.

The softmax of a row is kept as its largest score, its sum and its output so far, and corrected
when a later key block has a larger score (online softmax: Milakov & Gimelshein 2018, arXiv
1805.02867; attention in O(T) memory: Rabe & Staats 2021, arXiv 2112.05682). The backward pass
computes the scores again, block by block (Dao et al. 2022, arXiv 2205.14135).

Where one block holds all queries and keys of a chunk of heads it is cut into pieces of fewer heads,
and by a causal rule or a window into strips of queries: each is a block with the keys alone that
its queries may see.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from attnlab.attention import masks
from attnlab.attention.blocks import (
    Blocks,
    Extras,
    Place,
    add_part,
    among_keys,
    block_sizes,
    cut,
    join,
    keys_of,
    over_chunks,
    over_keys,
    pad,
    pieces,
    put_together,
    rows_of,
    split,
    take,
    unsplit,
    vary_alike,
)
from attnlab.attention.dense import (
    Options,
    beside_sink,
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


def blockwise(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """Attention without a [T, S] array. No second or forward-mode derivatives: see `dense`."""
    (b, t, n, _), (_, s, k, _), kv = query.shape, key.shape, value.shape[2]
    shape = (b, n, t, s)
    scale = options.scale
    if not isinstance(scale, int | float):  # an array: its gradient goes through q
        query, scale = query.astype(wide_dtype(query, key)) * scale, 1.0
    group = math.lcm(n // k, n // kv)
    sizes = block_sizes(shape, group)
    scale_q, scale_scores = (scale, 1.0) if query.dtype == wide_dtype(query) else (1.0, scale)
    rule = Visible(t, s, is_causal=visible.is_causal, window=visible.window)
    cap, rate = options.logits_soft_cap, options.dropout_rate
    blocks = Blocks(shape, sizes, group, scale_q, scale_scores, cap, rate, rule)
    ranges, (more_t, more_s) = visible.ranges(), (-t % sizes[2], -s % sizes[3])
    if ranges is None and more_s:
        ranges = Visible(1, s + 1, key_lengths=jnp.full(1, s)).ranges()
    if blocks.counts[2:] == (1, 1) and ranges is not None and isinstance(ranges[0], np.ndarray):
        ranges = None  # pieces know the rule
    first, end = (None, None) if ranges is None else (a[:, None, :, None] for a in ranges)
    longer = lambda a, more: jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0)))
    arrays = (
        longer(query, more_t),
        longer(key, more_s),
        longer(value, more_s),
        Extras(
            pad(bias, more_t, more_s),
            pad(visible.mask, more_t, more_s),
            pad(first, more_t, more_s),
            pad(end, more_t, more_s),
            dropout_seed(options),
        ),
    )
    out, residual = _attend(blocks, *vary_alike(arrays))
    out, residual = out[:, :t], residual[:, :t, :, 0]
    if options.sink is not None:
        out, residual = beside_sink(out, residual, options.sink)
    return {"out": out} | ({"residual": residual} if options.return_residual else {})


def refuse_blockwise(query, key, value, bias, visible, options: Options) -> str | None:
    if options.mix != (None, None):
        return "mix needs the scores of all heads at once"
    if visible.edges is not None:
        return "edges lie anywhere, not in blocks"
    return refuse_edit(options)


def _block_scores(blocks: Blocks, q, k, extras: Extras, at: Place) -> tuple[Array, Array]:
    """Scores of one block, before and after hidden ones sank."""
    turn = lambda a: a.swapaxes(2, 3) if at.flip and a is not None else a
    bias = turn(take(extras.bias, at))
    x = scores(*((k, q) if at.flip else (q, k)), bias, blocks.scale_scores, blocks.soft_cap)
    axes = (3, 2) if at.flip else (2, 3)
    key = at.starts[3] + lax.broadcasted_iota(
        jnp.int32, tuple(d if i == axes[1] else 1 for i, d in enumerate(x.shape)), axes[1]
    )
    allowed = masks.combine(
        turn(take(extras.mask, at)),
        None if at.first is None else turn(at.first) <= key,
        None if at.end is None else key < turn(at.end),
    )
    return x, hide(x, allowed)


def _drop(blocks: Blocks, extras: Extras, at: Place, p: Array) -> Array:
    if not blocks.dropout_rate:
        return p
    drawn = kept(extras.seed, blocks.dropout_rate, at.starts, at.sizes, blocks.shape)
    return jnp.where(drawn.swapaxes(2, 3) if at.flip else drawn, p / (1 - blocks.dropout_rate), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, query, key, value, extras: Extras):
    """Output and log sum exp, in blocks."""
    return _forward(blocks, query, key, value, extras)[0]


def _forward(blocks: Blocks, query, key, value, extras: Extras):
    """Beside both, for the backward pass: the largest score of a row and 1 / the sum of exp."""
    tq, sk = blocks.sizes[2:]

    def block(q, k, v, at):
        x = _block_scores(blocks, q, k, extras, at)[1]
        top = row_top(x)
        weights = jnp.exp(x - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return top, total, weighted(_drop(blocks, extras, at, weights), v)

    def nothing(q, v):
        zero = jnp.zeros_like(q, jnp.result_type(q, key, jnp.float32))[..., :1]
        return (
            zero + lowest(zero.dtype) / 2,
            zero,
            jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1])),
        )

    def rows(starts, k, v, q):
        def step(j, at, carry):
            new = block(q, k[j], v[j], at)
            top = jnp.maximum(carry[0], new[0])
            fade, grow = jnp.exp(carry[0] - top), jnp.exp(new[0] - top)
            return top, *(a * fade + b * grow for a, b in zip(carry[1:], new[1:], strict=True))

        return over_keys(blocks, extras, starts, False, step, nothing(q, v))

    def chunk(carry, starts, arrays, _):
        q, k, v = arrays
        q = q * blocks.scale_q
        if blocks.counts[2:] == (1, 1):
            made = [
                [
                    block(rows_of(q, at), keys_of(k, at, blocks), keys_of(v, at, blocks), at)
                    if at.sizes[3]
                    else nothing(rows_of(q, at), v)
                    for at in row
                ]
                for row in pieces(blocks, extras, starts, False)
            ]
            top, total, out = (
                put_together([[a[i] for a in row] for row in made]) for i in range(3)
            )
        else:
            k, v = split(k, sk), split(v, sk)
            one = lambda a: rows((*starts, a[0] * tq), k, v, a[1])
            made = lax.map(one, (jnp.arange(blocks.counts[2]), split(q, tq)))
            top, total, out = map(unsplit, made)
        some = jnp.where(total > 0, total, 1)
        share = jnp.where(total > 0, 1 / some, 0)
        return carry, [(out / some).astype(v.dtype)], (top, share)

    _, (out,), kept = over_chunks(blocks, chunk, None, (query, key, value))
    out, top, share = save_for_backward((out, *kept))
    lse = jnp.where(share > 0, top - jnp.log(jnp.where(share > 0, share, 1)), -math.inf)
    lse = join(blocks, lse.swapaxes(2, 3))
    return (out, lse), (query, key, value, extras, out, top, share)


def _backward(blocks: Blocks, saved, cotangents):
    query, key, value, extras, out, top, share = saved
    d_out, d_lse = cotangents
    (_, _, tq, sk), wide = blocks.sizes, top.dtype
    # Sums over the first axis of scores are slow on a CPU. Where every head has keys of its own
    # the scores can be kept as [S, T]: then no gradient needs such a sum.
    flip = query.shape[2] == key.shape[2] == value.shape[2]

    def block(rows, k, v, at):
        """Gradients of q and k (before `scale`) and of v, and of the scores.

        `do` and `delta` come multiplied by `share`: what is left of the probabilities is
        exp(scores - top).
        """
        q, do, delta, top = rows
        turn = lambda a: a.swapaxes(2, 3) if flip else a
        x, hidden = _block_scores(blocks, q, k, extras, at)
        weights = jnp.exp(hidden - turn(top))
        dp = _drop(blocks, extras, at, scores(*((v, do) if flip else (do, v)), None, 1.0, None))
        ds = weights * (dp - turn(delta))
        if blocks.soft_cap is not None:
            ds = ds * (1 - jnp.square(x / blocks.soft_cap))
        weights = _drop(blocks, extras, at, weights)
        if flip:
            return _of_flipped(ds, k), weighted(ds, q), weighted(weights, do), ds
        dk, dv = _transposed(ds, q, k.shape[1]), _transposed(weights, do, v.shape[1])
        return weighted(ds, k), dk, dv, ds

    def in_pieces(d_bias, starts, k, v, of_rows):
        made = []
        for row in pieces(blocks, extras, starts, flip):
            dq, dk, dv = [], [], []
            for at in row:
                of_keys = keys_of(k, at, blocks), keys_of(v, at, blocks)
                new, more_k, more_v, ds = block([rows_of(a, at) for a in of_rows], *of_keys, at)
                dq.append(new)
                dk.append(among_keys(more_k, at, blocks))
                dv.append(among_keys(more_v, at, blocks))
                d_bias = add_part(d_bias, at, ds)
            made.append((dq, [sum(dk)], [sum(dv)]))
        return d_bias, *(put_together(list(a)) for a in zip(*made, strict=True))

    def in_loops(d_bias, starts, k, v, of_rows):
        k, v = split(k, sk), split(v, sk)

        def rows(carry, args):
            i, of_block = args

            def step(j, at, carry):
                dq, dk, dv, d_bias = carry
                new, more_k, more_v, ds = block(of_block, k[j], v[j], at)
                dk, dv = dk.at[j].add(more_k), dv.at[j].add(more_v)
                return dq + new, dk, dv, add_part(d_bias, at, ds)

            carry = (jnp.zeros_like(of_block[0], wide), *carry)
            dq, *carry = over_keys(blocks, extras, (*starts, i * tq), flip, step, carry)
            return tuple(carry), dq

        carry = (jnp.zeros_like(k, wide), jnp.zeros_like(v, wide), d_bias)
        xs = (jnp.arange(blocks.counts[2]), [split(a, tq) for a in of_rows])
        (dk, dv, d_bias), dq = lax.scan(rows, carry, xs)
        return d_bias, *map(unsplit, (dq, dk, dv))

    def chunk(d_bias, starts, arrays, kept):
        (q, k, v, out, do), (top, share, d_lse) = arrays, kept
        delta = jnp.sum(do.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
        delta = (delta - jnp.where(share > 0, d_lse, 0)) * share  # an empty row's may be NaN
        do = (do * share).astype(do.dtype)
        run = in_pieces if blocks.counts[2:] == (1, 1) else in_loops
        d_bias, dq, dk, dv = run(d_bias, starts, k, v, (q * blocks.scale_q, do, delta, top))
        dq, dk = dq * (blocks.scale_q * blocks.scale_scores), dk * blocks.scale_scores
        return d_bias, [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)], ()

    d_bias = None if extras.bias is None else jnp.zeros_like(extras.bias, wide)
    arrays = (query, key, value, out, d_out)
    kept = (top, share, cut(blocks, d_lse).swapaxes(2, 3))
    # One array less, so a program of 16 texts of 256 tokens stays below the 32 MiB from which on
    # the C library gives its memory back after each call. A second one in place costs more waits.
    d_bias, grads, _ = over_chunks(blocks, chunk, d_bias, arrays, kept, reuse=True)
    if d_bias is not None:
        d_bias = d_bias.astype(extras.bias.dtype)
    return *grads, Extras(d_bias, None, None, None, None)


def _of_flipped(ds: Array, k: Array) -> Array:
    """[B, N, T, H] from [B, N, S, T] and [B, N, S, H], as (k^T ds)^T: both turns are small.

    The barrier keeps XLA from turning ds itself, or from a product that is slow on a CPU.
    """
    k = lax.optimization_barrier(k.swapaxes(2, 3))
    dq = jnp.einsum("BNHS,BNST->BNHT", k, ds.astype(k.dtype), preferred_element_type=ds.dtype)
    return dq.swapaxes(2, 3)


def _transposed(a: Array, b: Array, heads: int) -> Array:
    """[B, K, S, H] = sum over the rows of a key head of a [B, N, T, S] times b [B, N, T, H]."""
    wide = a.dtype
    a, b = (x.reshape(x.shape[0], heads, -1, x.shape[-1]) for x in (a.astype(b.dtype), b))
    return jnp.einsum("BKRS,BKRH->BKSH", a, b, preferred_element_type=wide)


_attend.defvjp(_forward, _backward)
