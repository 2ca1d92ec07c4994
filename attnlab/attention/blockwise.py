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
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attnlab.attention import masks
from attnlab.attention.blocks import (
    DEFAULT_LIMITS,
    PACKED_LIMITS,
    Block,
    BlockLimits,
    Chunk,
    Division,
    ScoreInputs,
    Starts,
    add_block,
    among_all_keys,
    as_kept,
    block_sizes,
    from_chunks,
    join,
    keys_of,
    over_chunks,
    over_keys,
    pad,
    queries_of,
    same_varying_axes,
    small_blocks,
    split,
    take,
    to_chunks,
    unsplit,
)
from attnlab.attention.call import AttentionCall, AttentionOutput
from attnlab.attention.dense import add_sink, scaled_scores, softmax_terms, weighted_sum
from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.masks import MaskSpec
from attnlab.attention.score_mods import apply_score_mods
from attnlab.eager import KEPT, is_eager
from attnlab.ops import save_for_backward


def blockwise(call: AttentionCall, limits: BlockLimits | None = None) -> AttentionOutput:
    """Attention without a [T, S] array. No second or forward-mode derivatives: see `dense`."""
    if limits is None:
        limits = DEFAULT_LIMITS if call.mask.segments is None else PACKED_LIMITS
    query, scale, options = call.query, call.options.scale, call.options
    if not isinstance(scale, int | float):  # an array: its gradient goes through q
        query = query.astype(jnp.result_type(jnp.float32, query, call.key)) * scale
        scale = 1.0
    leaves, mods = jax.tree.flatten(options.score_mods)
    division = _divide(call, query.dtype, float(scale), mods, limits)
    t, s = call.scores_shape[2:]
    more_t, more_s = -t % division.sizes[2], -s % division.sizes[3]
    first, end = call.mask.ranges() or (None, None)
    if first is None and more_s:
        first, end = np.zeros((1, 1), np.int32), np.full((1, 1), s, np.int32)
    if division.is_one_block and isinstance(first, np.ndarray):
        first = end = None  # small blocks know the rule
    columns = (None if a is None else a[:, None, :, None] for a in (first, end))
    bias, mask, first, end = (
        pad(a, more_t, more_s) for a in (options.bias, call.mask.mask, *columns)
    )
    seed = dropout_seed(options.dropout_rate, options.dropout_key)
    inputs = ScoreInputs(bias, mask, first, end, seed, mods=tuple(leaves))
    if (segments := call.mask.segments) is not None:
        inputs = inputs._replace(
            query_segments=pad(segments.queries[:, None, :, None], more_t, 0),
            key_segments=pad(segments.keys[:, None, None], 0, more_s),
        )
    longer = (
        jnp.pad(a, ((0, 0), (0, more), (0, 0), (0, 0)))
        for a, more in ((query, more_t), (call.key, more_s), (call.value, more_s))
    )
    arrays = same_varying_axes((*longer, inputs))
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


def _divide(
    call: AttentionCall,
    dtype: jnp.dtype,
    scale: float,
    mods: jax.tree_util.PyTreeDef,
    limits: BlockLimits,
) -> Division:
    shape, mask, options = call.scores_shape, call.mask, call.options
    n = shape[1]
    group = math.lcm(n // call.key.shape[2], n // call.value.shape[2])
    in_query = dtype == jnp.result_type(jnp.float32, dtype)
    return Division(
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
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    )


# One block


def _block_scores(q: Array, k: Array, block: Block) -> Array:
    """Scores of one block, before score modifications and the mask."""
    (division, inputs, _, transposed) = block.chunk
    bias = as_kept(take(inputs.bias, block), block)
    pair = (k, q) if transposed else (q, k)
    return scaled_scores(*pair, bias, division.scale_scores, division.soft_cap)


def _allowed(scores: Array, block: Block) -> Array | None:
    """The mask of a block as its scores are kept."""
    axis = 2 if block.chunk.transposed else 3
    shape = tuple(d if i == axis else 1 for i, d in enumerate(scores.shape))
    key = block.starts[3] + lax.broadcasted_iota(jnp.int32, shape, axis)
    first, end = as_kept(block.first, block), as_kept(block.end, block)
    own, other = (
        as_kept(take(a, block), block)
        for a in (block.chunk.inputs.query_segments, block.chunk.inputs.key_segments)
    )
    return masks.combine(
        None if own is None or other is None else own == other,
        as_kept(take(block.chunk.inputs.mask, block), block),
        None if first is None else first <= key,
        None if end is None else key < end,
    )


def _modified(block: Block, x: Array, leaves: Sequence[Array]) -> Array:
    """The scores of a block after the score modifications."""
    division = block.chunk.division
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
    division, seed = block.chunk.division, block.chunk.inputs.seed
    if not division.dropout_rate or seed is None:
        return probs
    kept = keep_mask(seed, division.dropout_rate, block.starts, block.sizes, division.shape)
    kept = cast(Array, as_kept(kept, block))
    return jnp.where(kept, probs / (1 - division.dropout_rate), 0)


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


@functools.lru_cache(maxsize=KEPT)
def _program(division: Division) -> Callable[..., tuple[Array, Array]]:
    """`_attend` of calls outside of `jit`, where its loops would be compiled anew each time."""
    return jax.jit(functools.partial(_attend, division))


def _forward(
    division: Division, query: Array, key: Array, value: Array, inputs: ScoreInputs
) -> tuple[tuple[Array, Array], _Saved]:
    """In addition, for the backward pass: the largest score of a row and 1 / the sum of exp."""
    chunk = functools.partial(_forward_chunk, division, inputs)
    _, (output,), kept = over_chunks(division, chunk, None, (query, key, value))
    output, top, inv_sum = save_for_backward((output, *kept))
    lse = jnp.where(inv_sum > 0, top - jnp.log(jnp.where(inv_sum > 0, inv_sum, 1)), -math.inf)
    lse = from_chunks(division, lse.swapaxes(2, 3))
    return (output, lse), (query, key, value, inputs, output, top, inv_sum)


def _forward_chunk(
    division: Division,
    inputs: ScoreInputs,
    carry: None,
    starts: Starts,
    arrays: list[Array],
    _: tuple[Array, ...],
) -> tuple[None, list[Array], tuple[Array, ...]]:
    q, k, v = arrays
    run = _forward_small if division.is_one_block else _forward_loops
    top, total, output = run(Chunk(division, inputs, starts), q * division.scale_q, k, v)
    divisor = jnp.where(total > 0, total, 1)
    inv_sum = jnp.where(total > 0, 1 / divisor, 0)
    return carry, [(output / divisor).astype(v.dtype)], (top, inv_sum)


def _forward_small(chunk: Chunk, q: Array, k: Array, v: Array) -> _SoftmaxState:
    def state(block: Block) -> _SoftmaxState:
        if not block.sizes[3]:
            return _no_keys(queries_of(q, block), k, v)
        return _block_state(queries_of(q, block), keys_of(k, block), keys_of(v, block), block)

    states = [[state(block) for block in row] for row in small_blocks(chunk)]
    return _SoftmaxState(*(join([[a[i] for a in row] for row in states]) for i in range(3)))


def _forward_loops(chunk: Chunk, q: Array, k: Array, v: Array) -> _SoftmaxState:
    tq, sk = chunk.division.sizes[2:]
    k, v = split(k, sk), split(v, sk)

    def query_block(args: tuple[Array, Array]) -> _SoftmaxState:
        i, q = args

        def step(j: Array, block: Block, old: _SoftmaxState) -> _SoftmaxState:
            new = _block_state(q, k[j], v[j], block)
            top = jnp.maximum(old.top, new.top)
            fade, grow = jnp.exp(old.top - top), jnp.exp(new.top - top)
            return _SoftmaxState(
                top, old.total * fade + new.total * grow, old.output * fade + new.output * grow
            )

        return over_keys(chunk, i * tq, step, _no_keys(q, k, v))

    states = lax.map(query_block, (jnp.arange(chunk.division.counts[2]), split(q, tq)))
    return _SoftmaxState(*map(unsplit, states))


def _block_state(q: Array, k: Array, v: Array, block: Block) -> _SoftmaxState:
    x = _modified(block, _block_scores(q, k, block), block.chunk.inputs.mods)
    weights, total, top = softmax_terms(x, _allowed(x, block))
    return _SoftmaxState(top, total, weighted_sum(_drop(block, weights), v))


def _no_keys(q: Array, k: Array, v: Array) -> _SoftmaxState:
    """Of rows that have met no key yet."""
    zero = jnp.zeros_like(q, jnp.result_type(jnp.float32, q, k))[..., :1]
    output = jnp.broadcast_to(zero, (*zero.shape[:-1], v.shape[-1]))
    return _SoftmaxState(zero + float(np.finfo(zero.dtype).min), zero, output)


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
    """of the floating-point leaves"""


def _backward(
    division: Division, saved: _Saved, cotangents: tuple[Array, Array]
) -> tuple[Array | ScoreInputs, ...]:
    query, key, value, inputs, output, top, inv_sum = saved
    d_output, d_lse = cotangents
    # Sums over the first axis of scores are slow on a CPU. Where every head has keys of its own
    # the scores can be kept as [S, T]: then no gradient needs such a sum. Score modifications are
    # promised [T, S].
    transposed = query.shape[2] == key.shape[2] == value.shape[2] and division.mods is None
    sums = (
        None if inputs.bias is None else jnp.zeros_like(inputs.bias, top.dtype),
        tuple(jnp.zeros_like(a, top.dtype) for a in inputs.mods if _is_float(a)),
    )
    chunk = functools.partial(_backward_chunk, division, inputs, transposed)
    arrays = (query, key, value, output, d_output)
    kept = (top, inv_sum, to_chunks(division, d_lse).swapaxes(2, 3))
    # One array less, so a program of 16 texts of 256 tokens stays below the 32 MiB from which on
    # the C library gives its memory back after each call. A second one in place costs more waits.
    with jax.default_matmul_precision(division.precision):
        (d_bias, d_mods), grads, _ = over_chunks(division, chunk, sums, arrays, kept, reuse=True)
    if d_bias is not None and inputs.bias is not None:
        d_bias = d_bias.astype(inputs.bias.dtype)
    rest = iter(d_mods)
    of_mods = tuple(next(rest).astype(a.dtype) if _is_float(a) else None for a in inputs.mods)
    # None is the cotangent of integers.
    none = ScoreInputs(d_bias, None, None, None, None)
    return *grads, none._replace(mods=cast(tuple[Array, ...], of_mods))


def _is_float(a: Array) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def _backward_chunk(
    division: Division,
    inputs: ScoreInputs,
    transposed: bool,
    sums: _GradSums,
    starts: Starts,
    arrays: list[Array],
    kept: tuple[Array, ...],
) -> tuple[_GradSums, list[Array], tuple[Array, ...]]:
    (q, k, v, output, d_output), (top, inv_sum, d_lse) = arrays, kept
    acc_dtype = top.dtype
    delta = jnp.sum(d_output.astype(acc_dtype) * output.astype(acc_dtype), axis=-1, keepdims=True)
    delta = (delta - jnp.where(inv_sum > 0, d_lse, 0)) * inv_sum  # an empty row's may be NaN
    d_output = (d_output * inv_sum).astype(d_output.dtype)
    run = _backward_small if division.is_one_block else _backward_loops
    rows = (q * division.scale_q, d_output, delta, top)
    sums, dq, dk, dv = run(Chunk(division, inputs, starts, transposed), sums, rows, k, v)
    dq, dk = dq * (division.scale_q * division.scale_scores), dk * division.scale_scores
    return sums, [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)], ()


def _backward_small(
    chunk: Chunk, sums: _GradSums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[_GradSums, Array, Array, Array]:
    made: list[tuple[list[Array], list[Array], list[Array]]] = []
    for row in small_blocks(chunk):
        dq, dk, dv = [], [], []
        for block in row:
            own = [queries_of(a, block) for a in rows]
            new = _block_gradients(own, keys_of(k, block), keys_of(v, block), block)
            dq.append(new.query)
            dk.append(among_all_keys(new.key, block))
            dv.append(among_all_keys(new.value, block))
            sums = _add(sums, block, new)
        made.append((dq, [functools.reduce(jnp.add, dk)], [functools.reduce(jnp.add, dv)]))
    of_q, of_k, of_v = (join(list(a)) for a in zip(*made, strict=True))
    return sums, of_q, of_k, of_v


def _backward_loops(
    chunk: Chunk, sums: _GradSums, rows: tuple[Array, ...], k: Array, v: Array
) -> tuple[_GradSums, Array, Array, Array]:
    tq, sk = chunk.division.sizes[2:]
    k, v, acc_dtype = split(k, sk), split(v, sk), rows[3].dtype

    def query_block(
        carry: tuple[Array, Array, _GradSums], args: tuple[Array, list[Array]]
    ) -> tuple[tuple[Array, Array, _GradSums], Array]:
        i, own = args

        def step(
            j: Array, block: Block, carry: tuple[Array, Array, Array, _GradSums]
        ) -> tuple[Array, Array, Array, _GradSums]:
            dq, dk, dv, sums = carry
            new = _block_gradients(own, k[j], v[j], block)
            dk, dv = dk.at[j].add(new.key), dv.at[j].add(new.value)
            return dq + new.query, dk, dv, _add(sums, block, new)

        first = (jnp.zeros_like(own[0], acc_dtype), *carry)
        dq, dk, dv, sums = over_keys(chunk, i * tq, step, first)
        return (dk, dv, sums), dq

    carry = (jnp.zeros_like(k, acc_dtype), jnp.zeros_like(v, acc_dtype), sums)
    xs = (jnp.arange(chunk.division.counts[2]), [split(a, tq) for a in rows])
    (dk, dv, sums), dq = lax.scan(query_block, carry, xs)
    return sums, unsplit(dq), unsplit(dk), unsplit(dv)


def _add(sums: _GradSums, block: Block, new: _Grads) -> _GradSums:
    d_bias, d_mods = sums
    more = tuple(a + b.astype(a.dtype) for a, b in zip(d_mods, new.mods, strict=True))
    return add_block(d_bias, block, new.scores), more


def _block_gradients(rows: Sequence[Array], k: Array, v: Array, block: Block) -> _Grads:
    """The gradients of q, k, v and the scores of one block.

    `d_output` and `delta` come multiplied by `inv_sum`: what is left of the probabilities is
    exp(scores - top).
    """
    q, d_output, delta, top = rows
    division, _, _, transposed = block.chunk
    x = _block_scores(q, k, block)
    modified, pull = _modified_and_vjp(block, x)
    allowed = _allowed(x, block)
    weights = modified if allowed is None else jnp.where(allowed, modified, -jnp.inf)
    weights = jnp.exp(weights - cast(Array, as_kept(top, block)))
    pair = (v, d_output) if transposed else (d_output, v)
    d_probs = _drop(block, scaled_scores(*pair, None, 1.0, None))
    ds, d_mods = pull(weights * (d_probs - cast(Array, as_kept(delta, block))))
    if division.soft_cap is not None:
        ds = ds * (1 - jnp.square(x / division.soft_cap))
    weights = _drop(block, weights)
    if transposed:
        dq = _product_with_transposed(ds, k)
        return _Grads(dq, weighted_sum(ds, q), weighted_sum(weights, d_output), ds, d_mods)
    dk, dv = _sum_over_queries(ds, q, k.shape[1]), _sum_over_queries(weights, d_output, v.shape[1])
    return _Grads(weighted_sum(ds, k), dk, dv, ds, d_mods)


def _modified_and_vjp(
    block: Block, x: Array
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """`_modified`, and its gradients of the scores and of the floating-point leaves."""
    mods = block.chunk.inputs.mods
    if block.chunk.division.mods is None:
        return x, lambda ds: (ds, ())

    def run(x: Array, floats: tuple[Array, ...]) -> Array:
        rest = iter(floats)
        return _modified(block, x, [next(rest) if _is_float(a) else a for a in mods])

    modified, pull = jax.vjp(run, x, tuple(a for a in mods if _is_float(a)))
    return modified, pull


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
