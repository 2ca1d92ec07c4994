"""Attention in blocks that stay in the cache: no [T, S] array, forward or backward.

The softmax of a row is kept as its largest score, its sum and its output so far, and corrected
when a later block of keys has a larger score (online softmax: Milakov & Gimelshein 2018, arXiv
1805.02867; attention in O(T) memory: Rabe & Staats 2021, arXiv 2112.05682). The backward pass
computes the scores again, block by block (Dao et al. 2022, arXiv 2205.14135).

A chunk, some batch rows and heads, is a loop over blocks of queries and keys. Where one block would
hold all of them it is divided into small blocks instead, without a loop: each has only the keys
that the causal rule or the window leaves to its queries.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attnlab.attention import blocks, masks
from attnlab.attention.blocks import Block, BlockLimits, Division, Kept, ScoreInputs, as_kept, part
from attnlab.attention.call import AttentionCall, AttentionOutput
from attnlab.attention.dense import (
    add_sink,
    scaled_scores,
    softmax_terms,
    weighted_sum,
    without_float16,
)
from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.masks import MaskSpec
from attnlab.attention.score_mods import apply_score_mods
from attnlab.ops import KEPT_PROGRAMS, is_eager, save_for_backward


def blockwise(call: AttentionCall, limits: BlockLimits | None = None) -> AttentionOutput:
    """Attention without a [T, S] array. No second or forward-mode derivatives: see `dense`."""
    query, options, segments = call.query, call.options, call.mask.segments
    if limits is None:
        limits = blocks.DEFAULT_LIMITS if segments is None else blocks.PACKED_LIMITS
    scale = options.scale
    if not isinstance(scale, int | float):  # an array: its gradient goes through q
        query = query.astype(jnp.result_type(jnp.float32, query, call.key)) * scale
        scale = 1.0
    division = _divide(call, query.dtype, float(scale), limits)
    t, s = call.scores_shape[2:]
    more_t, more_s = -t % division.sizes[2], -s % division.sizes[3]
    ranges = call.mask.ranges()
    if ranges is None and more_s:
        ranges = np.zeros((1, 1), np.int32), np.full((1, 1), s, np.int32)
    if ranges is not None and division.is_one_block and isinstance(ranges[0], np.ndarray):
        ranges = None  # small blocks know the rule
    first, end = ranges or (None, None)
    pad = functools.partial(blocks.pad, t=more_t, s=more_s)
    inputs = ScoreInputs(
        bias=pad(options.bias),
        mask=pad(call.mask.mask),
        first=pad(first),
        end=pad(end),
        query_segments=None if segments is None else pad(segments.queries),
        key_segments=None if segments is None else pad(segments.keys[:, None, None]),
        seed=dropout_seed(options.dropout_rate, options.dropout_key),
        mods=tuple(jax.tree.leaves(options.score_mods)),
    )
    longer = (
        jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0)))
        for a, more in ((query, more_t), (call.key, more_s), (call.value, more_s))
    )
    arrays = blocks.same_varying_axes((*longer, inputs))
    run = _program(division) if is_eager(arrays) else functools.partial(_attend, division)
    output, logsumexp = run(*arrays)
    output, logsumexp = output[:, :t], logsumexp[:, :t, :, 0]
    if options.sink is not None:
        output, logsumexp = add_sink(output, logsumexp, options.sink)
    return AttentionOutput(output, logsumexp if call.return_residual else None)


def refuse_blockwise(call: AttentionCall) -> str | None:
    """Why the call needs all scores at once."""
    if not all(isinstance(size, int) for size in call.scores_shape):
        return "blocks need sizes that are known when JAX traces, not those of a symbolic shape"
    if call.options.talking_heads != (None, None):
        return "talking_heads needs the scores of all heads at once"
    if call.mask.edges is not None:
        return "edges lie anywhere, not in blocks"
    return None


def _divide(call: AttentionCall, dtype: jnp.dtype, scale: float, limits: BlockLimits) -> Division:
    shape, mask, options = call.scores_shape, call.mask, call.options
    group = math.lcm(shape[1] // call.key.shape[2], shape[1] // call.value.shape[2])
    in_query = dtype == jnp.result_type(jnp.float32, dtype)
    return Division(
        shape,
        blocks.block_sizes(shape, group, limits),
        group,
        scale_q=scale if in_query else 1.0,
        scale_scores=1.0 if in_query else scale,
        soft_cap=options.logits_soft_cap,
        dropout_rate=options.dropout_rate,
        rule=MaskSpec(*shape[2:], is_causal=mask.is_causal, window=mask.window),
        mods=jax.tree.structure(options.score_mods) if options.score_mods else None,
        limits=limits,
        precision=jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )


# One block


def _block_scores(q: Array, k: Array, block: Block) -> Array:
    """Scores of one block, before score modifications and the mask."""
    division, pair = block.division, (k, q) if block.transposed else (q, k)
    bias = part(block.inputs.bias, block)
    return scaled_scores(*pair, bias, division.scale_scores, division.soft_cap)


def _allowed(scores: Array, block: Block) -> Array | None:
    """The mask of a block as its scores are kept."""
    axis, inputs = 2 if block.transposed else 3, block.inputs
    shape = tuple(d if i == axis else 1 for i, d in enumerate(scores.shape))
    key = block.starts[3] + lax.broadcasted_iota(jnp.int32, shape, axis)
    own, other = part(inputs.query_segments, block), part(inputs.key_segments, block)
    return masks.combine(
        None if own is None or other is None else own == other,
        part(inputs.mask, block),
        None if block.first is None else block.first <= key,
        None if block.end is None else key < block.end,
    )


def _modified(block: Block, x: Array, leaves: Sequence[Array]) -> Array:
    """The scores of a block after the score modifications."""
    division = block.division
    if division.mods is None:
        return x
    head, query, key = (
        jnp.minimum(start + jnp.arange(size), most - 1)  # padding has no index of its own
        for start, size, most in zip(block.starts[1:], x.shape[1:], division.shape[1:], strict=True)
    )
    return apply_score_mods(
        jax.tree.unflatten(division.mods, leaves),
        x,
        head=head[:, None, None],
        query=query[:, None],
        key=key[None],
    )


def _drop(block: Block, probs: Array) -> Array:
    rate, seed = block.division.dropout_rate, block.inputs.seed
    if seed is None:
        return probs
    kept = keep_mask(seed, rate, block.starts, block.sizes, block.division.shape)
    return jnp.where(as_kept(kept, block), probs / (1 - rate), 0)


# Forward


class _SoftmaxState(NamedTuple):
    """The softmax of some rows so far: [b, n, t, 1] and [b, n, t, V]."""

    top: Array
    total: Array
    output: Array


_Saved: TypeAlias = tuple[Array, Array, Array, ScoreInputs, Array, Array, Array]
"""Of the forward pass: q, k, v, the inputs, the output, the largest scores and 1 / the sums."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    division: Division, query: Array, key: Array, value: Array, inputs: ScoreInputs
) -> tuple[Array, Array]:
    """Output and log sum exp, in blocks."""
    return _forward(division, query, key, value, inputs)[0]


@functools.lru_cache(maxsize=KEPT_PROGRAMS)
def _program(division: Division) -> Callable[..., tuple[Array, Array]]:
    """`_attend` of calls outside of `jit`, where its loops would be compiled anew each time."""
    return jax.jit(functools.partial(_attend, division))


def _forward(
    division: Division, query: Array, key: Array, value: Array, inputs: ScoreInputs
) -> tuple[tuple[Array, Array], _Saved]:
    """In addition, for the backward pass: the largest score of a row and 1 / the sum of exp."""

    def of_chunk(
        chunk: Block, carry: None, arrays: list[Array], _: Kept
    ) -> tuple[None, list[Array], Kept]:
        q, k, v = arrays
        run = _forward_small if division.is_one_block else _forward_loops
        top, total, output = run(chunk, q * division.scale_q, k, v)
        divisor = jnp.where(total > 0, total, 1)
        inv_sum = jnp.where(total > 0, 1 / divisor, 0)
        return carry, [(output / divisor).astype(v.dtype)], (top, inv_sum)

    whole = Block(division, inputs, (0,) * 4, division.sizes, transposed=False)
    _, (output,), kept = blocks.over_chunks(whole, of_chunk, None, (query, key, value))
    output, top, inv_sum = save_for_backward((output, *kept))
    lse = jnp.where(inv_sum > 0, top - jnp.log(jnp.where(inv_sum > 0, inv_sum, 1)), -math.inf)
    lse = blocks.from_chunks(division, lse.swapaxes(2, 3))
    return (output, lse), (query, key, value, inputs, output, top, inv_sum)


def _forward_small(chunk: Block, q: Array, k: Array, v: Array) -> _SoftmaxState:
    def state(block: Block) -> _SoftmaxState:
        keys, values = blocks.keys_of(k, block), blocks.keys_of(v, block)
        return _block_state(blocks.queries_of(q, block), keys, values, block)

    states = [[state(block) for block in row] for row in blocks.small_blocks(chunk)]
    return _SoftmaxState(*(blocks.join([[a[i] for a in row] for row in states]) for i in range(3)))


def _forward_loops(chunk: Block, q: Array, k: Array, v: Array) -> _SoftmaxState:
    tq, sk = chunk.division.sizes[2:]
    k, v = blocks.split(k, sk), blocks.split(v, sk)

    def query_block(args: tuple[Array, Array]) -> _SoftmaxState:
        i, q = args

        def step(j: Array, block: Block, old: _SoftmaxState) -> _SoftmaxState:
            new = _block_state(q, k[j], v[j], block)
            top = jnp.maximum(old.top, new.top)
            fade, grow = jnp.exp(old.top - top), jnp.exp(new.top - top)
            return _SoftmaxState(
                top, old.total * fade + new.total * grow, old.output * fade + new.output * grow
            )

        zero = jnp.zeros_like(q, jnp.result_type(jnp.float32, q, k))[..., :1]
        output = jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1]))
        no_keys = _SoftmaxState(zero + float(np.finfo(zero.dtype).min), zero, output)
        return blocks.over_keys(chunk, i * tq, step, no_keys)

    states = lax.map(query_block, (jnp.arange(chunk.division.counts[2]), blocks.split(q, tq)))
    return _SoftmaxState(*map(blocks.unsplit, states))


def _block_state(q: Array, k: Array, v: Array, block: Block) -> _SoftmaxState:
    x = _modified(block, _block_scores(q, k, block), block.inputs.mods)
    weights, total, top = softmax_terms(x, _allowed(x, block))
    return _SoftmaxState(top, total, weighted_sum(_drop(block, weights), v))


# Backward

_GradSums: TypeAlias = tuple[Array | None, tuple[Array, ...]]
"""The gradients of the bias and of the arrays of the score modifications so far."""


class _Grads(NamedTuple):
    """The gradients of one block."""

    query: Array
    """before the scale"""
    key: Array
    value: Array
    scores: Array
    """before score modifications, as they are kept"""
    mods: tuple[Array, ...]


def _backward(
    division: Division, saved: _Saved, cotangents: tuple[Array, Array]
) -> tuple[Array | ScoreInputs, ...]:
    query, key, value, inputs, output, top, inv_sum = saved
    d_output, d_lse = cotangents
    acc_dtype = top.dtype

    def of_chunk(
        chunk: Block, sums: _GradSums, arrays: list[Array], kept: Kept
    ) -> tuple[_GradSums, list[Array], Kept]:
        (q, k, v, output, d_output), (top, inv_sum, d_lse) = map(without_float16, arrays), kept
        delta = d_output.astype(acc_dtype) * output.astype(acc_dtype)
        delta = jnp.sum(delta, axis=-1, keepdims=True)
        delta = (delta - jnp.where(inv_sum > 0, d_lse, 0)) * inv_sum  # an empty row's may be NaN
        d_output = (d_output * inv_sum).astype(d_output.dtype)
        run = _backward_small if division.is_one_block else _backward_loops
        rows = (q * division.scale_q, d_output, delta, top)
        sums, dq, dk, dv = run(chunk, sums, rows, k, v)
        dq, dk = dq * (division.scale_q * division.scale_scores), dk * division.scale_scores
        grads = zip((dq, dk, dv), arrays[:3], strict=True)
        return sums, [grad.astype(a.dtype) for grad, a in grads], ()

    # Sums over the first axis of scores are slow on a CPU. Where every head has keys of its own
    # the scores can be kept as [S, T]: then no gradient needs such a sum. Score modifications are
    # promised [T, S].
    transposed = query.shape[2] == key.shape[2] == value.shape[2] and division.mods is None
    whole = Block(division, inputs, (0,) * 4, division.sizes, transposed)
    sums = (
        None if inputs.bias is None else jnp.zeros_like(inputs.bias, acc_dtype),
        tuple(jnp.zeros_like(a, acc_dtype) for a in inputs.mods),
    )
    arrays = (query, key, value, output, d_output)
    kept = (top, inv_sum, blocks.to_chunks(division, d_lse).swapaxes(2, 3))
    # One array less, so a program of 16 texts of 256 tokens stays below the 32 MiB from which on
    # the C library gives its memory back after each call. A second one in place costs more waits.
    with jax.default_matmul_precision(division.precision):
        sums, grads, _ = blocks.over_chunks(whole, of_chunk, sums, arrays, kept, reuse=True)
    d_bias, d_mods = sums
    none = jax.tree.map(lambda a: None, inputs)  # the cotangent of integers
    if d_bias is not None and inputs.bias is not None:
        none = none._replace(bias=d_bias.astype(inputs.bias.dtype))
    of_mods = (
        new.astype(a.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else None
        for a, new in zip(inputs.mods, d_mods, strict=True)
    )
    return *grads, none._replace(mods=tuple(of_mods))


def _backward_small(
    chunk: Block, sums: _GradSums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[_GradSums, Array, Array, Array]:
    made: list[tuple[list[Array], list[Array], list[Array]]] = []
    for row in blocks.small_blocks(chunk):
        dq, dk, dv = [], [], []
        for block in row:
            own = [blocks.queries_of(a, block) for a in rows]
            new = _block_gradients(own, blocks.keys_of(k, block), blocks.keys_of(v, block), block)
            dq.append(new.query)
            dk.append(blocks.among_all_keys(new.key, block))
            dv.append(blocks.among_all_keys(new.value, block))
            sums = _add(sums, block, new)
        made.append((dq, [functools.reduce(jnp.add, dk)], [functools.reduce(jnp.add, dv)]))
    of_q, of_k, of_v = (blocks.join(list(a)) for a in zip(*made, strict=True))
    return sums, of_q, of_k, of_v


def _backward_loops(
    chunk: Block, sums: _GradSums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[_GradSums, Array, Array, Array]:
    tq, sk = chunk.division.sizes[2:]
    k, v, acc_dtype = blocks.split(k, sk), blocks.split(v, sk), rows[3].dtype

    def query_block(carry: Any, args: Any) -> Any:
        i, own = args

        def step(j: Array, block: Block, carry: Any) -> Any:
            dq, dk, dv, sums = carry
            new = _block_gradients(own, k[j], v[j], block)
            dk, dv = dk.at[j].add(new.key), dv.at[j].add(new.value)
            return dq + new.query, dk, dv, _add(sums, block, new)

        first = (jnp.zeros_like(own[0], acc_dtype), *carry)
        dq, dk, dv, sums = blocks.over_keys(chunk, i * tq, step, first)
        return (dk, dv, sums), dq

    carry = (jnp.zeros_like(k, acc_dtype), jnp.zeros_like(v, acc_dtype), sums)
    xs = (jnp.arange(chunk.division.counts[2]), [blocks.split(a, tq) for a in rows])
    (dk, dv, sums), dq = lax.scan(query_block, carry, xs)
    return sums, blocks.unsplit(dq), blocks.unsplit(dk), blocks.unsplit(dv)


def _add(sums: _GradSums, block: Block, new: _Grads) -> _GradSums:
    d_bias, d_mods = sums
    more = tuple(
        a if b.dtype == jax.dtypes.float0 else a + b.astype(a.dtype)  # float0: of integers
        for a, b in zip(d_mods, new.mods, strict=True)
    )
    return blocks.add_block(d_bias, block, new.scores), more


def _block_gradients(rows: Sequence[Array], k: Array, v: Array, block: Block) -> _Grads:
    """The gradients of q, k, v and the scores of one block.

    `d_output` and `delta` come multiplied by `inv_sum`: what is left of the probabilities is
    exp(scores - top).
    """
    q, d_output, delta, top = rows
    soft_cap, transposed = block.division.soft_cap, block.transposed
    x = _block_scores(q, k, block)
    modified, pull = jax.vjp(functools.partial(_modified, block), x, block.inputs.mods)
    allowed = _allowed(x, block)
    weights = modified if allowed is None else jnp.where(allowed, modified, -jnp.inf)
    weights = jnp.exp(weights - as_kept(top, block))
    pair = (v, d_output) if transposed else (d_output, v)
    d_probs = _drop(block, scaled_scores(*pair, None, 1.0, None))
    ds, d_mods = pull(weights * (d_probs - as_kept(delta, block)))
    if soft_cap is not None:
        ds = ds * (1 - jnp.square(x / soft_cap))
    weights = _drop(block, weights)
    if transposed:
        dq = _product_with_transposed(ds, k)
        return _Grads(dq, weighted_sum(ds, q), weighted_sum(weights, d_output), ds, d_mods)
    dk, dv = _sum_over_queries(ds, q, k.shape[1]), _sum_over_queries(weights, d_output, v.shape[1])
    return _Grads(weighted_sum(ds, k), dk, dv, ds, d_mods)


def _product_with_transposed(ds: Array, k: Array) -> Array:
    """[B, N, T, H] from [B, N, S, T] and [B, N, S, H], as (k^T ds)^T: both transposes are small.

    The barrier keeps XLA from transposing ds itself, or from a product that is slow on a CPU.
    """
    k = lax.optimization_barrier(k.swapaxes(2, 3))
    dq = jnp.einsum("BNHS,BNST->BNHT", k, ds.astype(k.dtype), preferred_element_type=ds.dtype)
    return dq.swapaxes(2, 3)


def _sum_over_queries(a: Array, b: Array, heads: int) -> Array:
    """[B, K, S, H] = sum over the rows of a key head of a [B, N, T, S] times b [B, N, T, H]."""
    acc_dtype, (rows, n, t, _) = a.dtype, a.shape
    a, b = (x.reshape(rows, heads, n // heads * t, x.shape[-1]) for x in (a.astype(b.dtype), b))
    return jnp.einsum("BKRS,BKRH->BKSH", a, b, preferred_element_type=acc_dtype)


_attend.defvjp(_forward, _backward)
