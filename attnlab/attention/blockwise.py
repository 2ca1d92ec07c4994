"""Attention in blocks that stay in the cache: no [T, S] array, forward or backward.

The softmax of a row is kept as its largest score, its sum and its output so far, and corrected
when a later key block has a larger score (online softmax: Milakov & Gimelshein 2018, arXiv
1805.02867; attention in O(T) memory: Rabe & Staats 2021, arXiv 2112.05682). The backward pass
computes the scores again, block by block (Dao et al. 2022, arXiv 2205.14135).

Where one block holds all queries and keys of a chunk of heads it is divided into pieces of fewer
heads, and by a causal rule or a window into strips of queries: each is a block with only the keys
that its queries may attend to.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attnlab.attention import masks
from attnlab.attention.blocks import (
    DEFAULT_LIMITS,
    BlockLimits,
    Blocks,
    Chunk,
    Place,
    ScoreInputs,
    Starts,
    add_block,
    among_all_keys,
    block_sizes,
    concatenate_pieces,
    from_chunks,
    keys_at,
    over_chunks,
    over_keys,
    pad,
    pieces,
    rows_at,
    same_varying_axes,
    split,
    take,
    to_chunks,
    unsplit,
)
from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.jax_nn import refuse_dense_only
from attnlab.attention.mask_spec import Indices, MaskSpec
from attnlab.attention.options import AttentionCall, AttentionOutput
from attnlab.attention.score_mods import apply_score_mods
from attnlab.attention.scores import (
    accumulation_dtype,
    add_sink,
    hide,
    lowest,
    row_max,
    scaled_scores,
    weighted_sum,
)
from attnlab.eager import KEPT, is_eager
from attnlab.remat import save_for_backward


def blockwise(call: AttentionCall, limits: BlockLimits = DEFAULT_LIMITS) -> AttentionOutput:
    """Attention without a [T, S] array. No second or forward-mode derivatives: see `dense`."""
    query, scale, options = call.query, call.options.scale, call.options
    if not isinstance(scale, int | float):  # an array: its gradient goes through q
        query, scale = query.astype(accumulation_dtype(query, call.key)) * scale, 1.0
    blocks, leaves = _divide(call, query, float(scale), limits)
    t = query.shape[1]
    more_t, more_s = (-a % b for a, b in zip(blocks.shape[2:], blocks.sizes[2:], strict=True))
    first, end = _ranges(blocks, call.mask, more_s)
    arrays = (
        _longer(query, more_t),
        _longer(call.key, more_s),
        _longer(call.value, more_s),
        ScoreInputs(
            pad(options.bias, more_t, more_s),
            pad(call.mask.mask, more_t, more_s),
            pad(first, more_t, more_s),
            pad(end, more_t, more_s),
            dropout_seed(options.dropout_rate, options.dropout_key),
            leaves,
        ),
    )
    run = _program(blocks) if is_eager(arrays) else functools.partial(_attend, blocks)
    output, residual = run(*same_varying_axes(arrays))
    output, residual = output[:, :t], residual[:, :t, :, 0]
    if options.sink is not None:
        output, residual = add_sink(output, residual, options.sink)
    return AttentionOutput(output, residual if call.return_residual else None)


def refuse_blockwise(call: AttentionCall) -> str | None:
    """Why the call needs all scores at once."""
    if not all(isinstance(size, int) for size in call.scores_shape):
        return "blocks need sizes that are known when JAX traces, not those of a symbolic shape"
    if call.options.talking_heads != (None, None):
        return "talking_heads needs the scores of all heads at once"
    if call.mask.edges is not None:
        return "edges lie anywhere, not in blocks"
    return refuse_dense_only(call)


def _divide(
    call: AttentionCall, query: Array, scale: float, limits: BlockLimits
) -> tuple[Blocks, tuple[Array, ...]]:
    """The blocks of a call, and the arrays of its score modifications."""
    shape, mask, options = call.scores_shape, call.mask, call.options
    n = shape[1]
    group = math.lcm(n // call.key.shape[2], n // call.value.shape[2])
    leaves, mods = jax.tree.flatten(options.score_mods)
    in_query = query.dtype == accumulation_dtype(query)
    blocks = Blocks(
        shape,
        block_sizes(shape, group, limits),
        group,
        scale if in_query else 1.0,
        1.0 if in_query else scale,
        options.logits_soft_cap,
        options.dropout_rate,
        MaskSpec(*shape[2:], is_causal=mask.is_causal, window=mask.window),
        mods if options.score_mods else None,
        limits,
    )
    return blocks, tuple(leaves)


def _ranges(
    blocks: Blocks, mask: MaskSpec, more_s: int
) -> tuple[Array | Indices | None, Array | Indices | None]:
    """first and end of the keys that a query attends to, [B or 1, 1, T, 1], or None twice."""
    ranges, s = mask.ranges(), mask.num_keys
    if ranges is None and more_s:
        ranges = MaskSpec(1, s + 1, key_lengths=jnp.full(1, s)).ranges()
    if ranges is None or (blocks.is_one_block and isinstance(ranges[0], np.ndarray)):
        return None, None  # pieces know the rule
    first, end = (a[:, None, :, None] for a in ranges)
    return first, end


def _longer(a: Array, more: int) -> Array:
    return jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0)))


# One block


def _block_scores(blocks: Blocks, q: Array, k: Array, inputs: ScoreInputs, at: Place) -> Array:
    """Scores of one block, before score modifications and the mask."""
    bias = _flipped_or_none(take(inputs.bias, at), at.flip)
    pair = (k, q) if at.flip else (q, k)
    return scaled_scores(*pair, bias, blocks.scale_scores, blocks.soft_cap)


def _hidden(x: Array, inputs: ScoreInputs, at: Place) -> Array:
    """The scores of a block, -inf where they are hidden."""
    axis = 2 if at.flip else 3
    shape = tuple(d if i == axis else 1 for i, d in enumerate(x.shape))
    key = at.starts[3] + lax.broadcasted_iota(jnp.int32, shape, axis)
    first, end = (_flipped_or_none(a, at.flip) for a in (at.first, at.end))
    allowed = masks.combine(
        _flipped_or_none(take(inputs.mask, at), at.flip),
        None if first is None else first <= key,
        None if end is None else key < end,
    )
    return hide(x, allowed)


def _flipped(a: Array, flip: bool) -> Array:
    """A block, kept as [S, T] where `flip`."""
    return a.swapaxes(2, 3) if flip else a


def _flipped_or_none(a: Array | Indices | None, flip: bool) -> Array | None:
    return None if a is None else _flipped(jnp.asarray(a), flip)


def _modified(blocks: Blocks, at: Place, x: Array, leaves: Sequence[Array]) -> Array:
    """The scores of a block after the score modifications."""
    if blocks.mods is None:
        return x
    head, query, key = (
        jnp.minimum(start + jnp.arange(size), most - 1)  # padding has no index of its own
        for start, size, most in zip(at.starts[1:], x.shape[1:], blocks.shape[1:], strict=True)
    )
    return apply_score_mods(
        jax.tree.unflatten(blocks.mods, leaves),
        x,
        head=head[:, None, None],
        query=query[:, None],
        key=key[None],
    )


def _drop(blocks: Blocks, inputs: ScoreInputs, at: Place, p: Array) -> Array:
    if not blocks.dropout_rate or inputs.seed is None:
        return p
    kept = keep_mask(inputs.seed, blocks.dropout_rate, at.starts, at.sizes, blocks.shape)
    return jnp.where(_flipped(kept, at.flip), p / (1 - blocks.dropout_rate), 0)


# Forward


class _Sums(NamedTuple):
    """The softmax of some rows so far: [b, n, t, 1] and [b, n, t, V]."""

    top: Array
    total: Array
    output: Array


_Saved: TypeAlias = tuple[Array, Array, Array, ScoreInputs, Array, Array, Array]
"""Of the forward pass: q, k, v, the inputs, the output, the largest scores and 1 / the sums."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: Blocks, query: Array, key: Array, value: Array, inputs: ScoreInputs
) -> tuple[Array, Array]:
    """Output and log sum exp, in blocks."""
    return _forward(blocks, query, key, value, inputs)[0]


@functools.lru_cache(maxsize=KEPT)
def _program(blocks: Blocks) -> Callable[..., tuple[Array, Array]]:
    """`_attend` of calls outside of `jit`, where its loops would be compiled anew each time."""
    return jax.jit(functools.partial(_attend, blocks))


def _forward(
    blocks: Blocks, query: Array, key: Array, value: Array, inputs: ScoreInputs
) -> tuple[tuple[Array, Array], _Saved]:
    """In addition, for the backward pass: the largest score of a row and 1 / the sum of exp."""
    chunk = functools.partial(_forward_chunk, blocks, inputs)
    _, (output,), kept = over_chunks(blocks, chunk, None, (query, key, value))
    output, top, share = save_for_backward((output, *kept))
    lse = jnp.where(share > 0, top - jnp.log(jnp.where(share > 0, share, 1)), -math.inf)
    lse = from_chunks(blocks, lse.swapaxes(2, 3))
    return (output, lse), (query, key, value, inputs, output, top, share)


def _forward_chunk(
    blocks: Blocks,
    inputs: ScoreInputs,
    carry: None,
    starts: Starts,
    arrays: list[Array],
    _: tuple[Array, ...],
) -> tuple[None, list[Array], tuple[Array, ...]]:
    q, k, v = arrays
    q = q * blocks.scale_q
    run = _forward_pieces if blocks.is_one_block else _forward_loops
    top, total, output = run(Chunk(blocks, inputs, starts), q, k, v)
    divisor = jnp.where(total > 0, total, 1)
    share = jnp.where(total > 0, 1 / divisor, 0)
    return carry, [(output / divisor).astype(v.dtype)], (top, share)


def _forward_pieces(chunk: Chunk, q: Array, k: Array, v: Array) -> _Sums:
    blocks = chunk.blocks

    def piece(at: Place) -> _Sums:
        rows = rows_at(q, at)
        if not at.sizes[3]:
            return _nothing(rows, k, v)
        keys, values = keys_at(k, at, blocks), keys_at(v, at, blocks)
        return _block_sums(blocks, chunk.inputs, rows, keys, values, at)

    made = [[piece(at) for at in row] for row in pieces(chunk)]
    return _Sums(*(concatenate_pieces([[a[i] for a in row] for row in made]) for i in range(3)))


def _forward_loops(chunk: Chunk, q: Array, k: Array, v: Array) -> _Sums:
    blocks = chunk.blocks
    tq, sk = blocks.sizes[2:]
    k, v = split(k, sk), split(v, sk)

    def query_block(args: tuple[Array, Array]) -> _Sums:
        i, q = args

        def step(j: Array, at: Place, carry: _Sums) -> _Sums:
            new = _block_sums(blocks, chunk.inputs, q, k[j], v[j], at)
            top = jnp.maximum(carry[0], new[0])
            fade, grow = jnp.exp(carry[0] - top), jnp.exp(new[0] - top)
            return _Sums(
                top, *(a * fade + b * grow for a, b in zip(carry[1:], new[1:], strict=True))
            )

        return over_keys(chunk, i * tq, step, _nothing(q, k, v))

    made = lax.map(query_block, (jnp.arange(blocks.counts[2]), split(q, tq)))
    return _Sums(*map(unsplit, made))


def _block_sums(
    blocks: Blocks, inputs: ScoreInputs, q: Array, k: Array, v: Array, at: Place
) -> _Sums:
    x = _modified(blocks, at, _block_scores(blocks, q, k, inputs, at), inputs.mods)
    x = _hidden(x, inputs, at)
    top = row_max(x)
    weights = jnp.exp(x - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return _Sums(top, total, weighted_sum(_drop(blocks, inputs, at, weights), v))


def _nothing(q: Array, k: Array, v: Array) -> _Sums:
    """Of rows that have met no key yet."""
    zero = jnp.zeros_like(q, accumulation_dtype(q, k))[..., :1]
    output = jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1]))
    return _Sums(zero + lowest(zero.dtype), zero, output)


# Backward

Sums: TypeAlias = tuple[Array | None, tuple[Array, ...]]
"""The gradients of the bias and of the arrays of the score modifications so far."""


_QueryCarry: TypeAlias = tuple[Array, Array, Array, Sums]
"""The gradients of the queries of a block, of all keys and values, and the sums."""


class _Grads(NamedTuple):
    """The gradients of one block."""

    query: Array
    """before the scale"""
    key: Array
    value: Array
    bias: Array
    """of the scores before score modifications; all of [b, n, t, s], or [b, n, s, t] if flipped"""
    mods: tuple[Array, ...]
    """of the floating-point leaves"""


def _backward(
    blocks: Blocks, saved: _Saved, cotangents: tuple[Array, Array]
) -> tuple[Array | ScoreInputs, ...]:
    query, key, value, inputs, output, top, share = saved
    d_output, d_lse = cotangents
    # Sums over the first axis of scores are slow on a CPU. Where every head has keys of its own
    # the scores can be kept as [S, T]: then no gradient needs such a sum. Score modifications are
    # promised [T, S].
    flip = query.shape[2] == key.shape[2] == value.shape[2] and blocks.mods is None
    floats = [a for a in inputs.mods if _is_float(a)]
    sums = (
        None if inputs.bias is None else jnp.zeros_like(inputs.bias, top.dtype),
        tuple(jnp.zeros_like(a, top.dtype) for a in floats),
    )
    chunk = functools.partial(_backward_chunk, blocks, inputs, flip)
    arrays = (query, key, value, output, d_output)
    kept = (top, share, to_chunks(blocks, d_lse).swapaxes(2, 3))
    # One array less, so a program of 16 texts of 256 tokens stays below the 32 MiB from which on
    # the C library gives its memory back after each call. A second one in place costs more waits.
    (d_bias, d_mods), grads, _ = over_chunks(blocks, chunk, sums, arrays, kept, reuse=True)
    if d_bias is not None and inputs.bias is not None:
        d_bias = d_bias.astype(inputs.bias.dtype)
    rest = iter(d_mods)
    of_mods = tuple(next(rest).astype(a.dtype) if _is_float(a) else None for a in inputs.mods)
    # None is the cotangent of integers.
    return *grads, ScoreInputs(d_bias, None, None, None, None, cast(tuple[Array, ...], of_mods))


def _is_float(a: Array) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def _backward_chunk(
    blocks: Blocks,
    inputs: ScoreInputs,
    flip: bool,
    sums: Sums,
    starts: Starts,
    arrays: list[Array],
    kept: tuple[Array, ...],
) -> tuple[Sums, list[Array], tuple[Array, ...]]:
    (q, k, v, output, do), (top, share, d_lse) = arrays, kept
    wide = top.dtype
    delta = jnp.sum(do.astype(wide) * output.astype(wide), axis=-1, keepdims=True)
    delta = (delta - jnp.where(share > 0, d_lse, 0)) * share  # an empty row's may be NaN
    do = (do * share).astype(do.dtype)
    run = _backward_pieces if blocks.is_one_block else _backward_loops
    rows = (q * blocks.scale_q, do, delta, top)
    sums, dq, dk, dv = run(Chunk(blocks, inputs, starts, flip), sums, rows, k, v)
    dq, dk = dq * (blocks.scale_q * blocks.scale_scores), dk * blocks.scale_scores
    return sums, [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)], ()


def _backward_pieces(
    chunk: Chunk, sums: Sums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[Sums, Array, Array, Array]:
    blocks, made = chunk.blocks, []
    for row in pieces(chunk):
        dq, dk, dv = [], [], []
        for at in row:
            own = [rows_at(a, at) for a in rows]
            keys, values = keys_at(k, at, blocks), keys_at(v, at, blocks)
            new = _block_gradients(blocks, chunk.inputs, own, keys, values, at)
            dq.append(new.query)
            dk.append(among_all_keys(new.key, at, blocks))
            dv.append(among_all_keys(new.value, at, blocks))
            sums = _add(sums, at, new)
        made.append((dq, [_sum(dk)], [_sum(dv)]))
    of_q, of_k, of_v = (concatenate_pieces(list(a)) for a in zip(*made, strict=True))
    return sums, of_q, of_k, of_v


def _backward_loops(
    chunk: Chunk, sums: Sums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[Sums, Array, Array, Array]:
    blocks = chunk.blocks
    tq, sk = blocks.sizes[2:]
    k, v, wide = split(k, sk), split(v, sk), rows[3].dtype

    def query_block(
        carry: tuple[Array, Array, Sums], args: tuple[Array, list[Array]]
    ) -> tuple[tuple[Array, Array, Sums], Array]:
        i, own = args

        def step(j: Array, at: Place, carry: _QueryCarry) -> _QueryCarry:
            dq, dk, dv, sums = carry
            new = _block_gradients(blocks, chunk.inputs, own, k[j], v[j], at)
            dk, dv = dk.at[j].add(new.key), dv.at[j].add(new.value)
            return dq + new.query, dk, dv, _add(sums, at, new)

        first = (jnp.zeros_like(own[0], wide), *carry)
        dq, dk, dv, sums = over_keys(chunk, i * tq, step, first)
        return (dk, dv, sums), dq

    carry = (jnp.zeros_like(k, wide), jnp.zeros_like(v, wide), sums)
    xs = (jnp.arange(blocks.counts[2]), [split(a, tq) for a in rows])
    (dk, dv, sums), dq = lax.scan(query_block, carry, xs)
    return sums, unsplit(dq), unsplit(dk), unsplit(dv)


def _add(sums: Sums, at: Place, new: _Grads) -> Sums:
    d_bias, d_mods = sums
    more = tuple(a + b.astype(a.dtype) for a, b in zip(d_mods, new.mods, strict=True))
    return add_block(d_bias, at, new.bias), more


def _sum(arrays: list[Array]) -> Array:
    return functools.reduce(jnp.add, arrays)


def _block_gradients(
    blocks: Blocks, inputs: ScoreInputs, rows: Sequence[Array], k: Array, v: Array, at: Place
) -> _Grads:
    """The gradients of q, k, v and the scores of one block.

    `do` and `delta` come multiplied by `share`: what is left of the probabilities is
    exp(scores - top).
    """
    q, do, delta, top = rows
    x = _block_scores(blocks, q, k, inputs, at)
    modified, pull = _modified_and_vjp(blocks, inputs, at, x)
    weights = jnp.exp(_hidden(modified, inputs, at) - _flipped(top, at.flip))
    pair = (v, do) if at.flip else (do, v)
    dp = _drop(blocks, inputs, at, scaled_scores(*pair, None, 1.0, None))
    ds, d_mods = pull(weights * (dp - _flipped(delta, at.flip)))
    if blocks.soft_cap is not None:
        ds = ds * (1 - jnp.square(x / blocks.soft_cap))
    weights = _drop(blocks, inputs, at, weights)
    if at.flip:
        dq = _product_with_flipped(ds, k)
        return _Grads(dq, weighted_sum(ds, q), weighted_sum(weights, do), ds, d_mods)
    dk, dv = _transposed(ds, q, k.shape[1]), _transposed(weights, do, v.shape[1])
    return _Grads(weighted_sum(ds, k), dk, dv, ds, d_mods)


def _modified_and_vjp(
    blocks: Blocks, inputs: ScoreInputs, at: Place, x: Array
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """`_modified`, and its gradients of the scores and of the floating-point leaves."""
    if blocks.mods is None:
        return x, lambda ds: (ds, ())

    def run(x: Array, floats: tuple[Array, ...]) -> Array:
        rest = iter(floats)
        leaves = [next(rest) if _is_float(a) else a for a in inputs.mods]
        return _modified(blocks, at, x, leaves)

    modified, pull = jax.vjp(run, x, tuple(a for a in inputs.mods if _is_float(a)))
    return modified, pull


def _product_with_flipped(ds: Array, k: Array) -> Array:
    """[B, N, T, H] from [B, N, S, T] and [B, N, S, H], as (k^T ds)^T: both transposes are small.

    The barrier keeps XLA from transposing ds itself, or from a product that is slow on a CPU.
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
