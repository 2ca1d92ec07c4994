"""All scores at once: the reference that every other backend must agree with."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from attnlab.attention.dropout import dropout_seed, keep_mask
from attnlab.attention.options import AttentionCall, AttentionOutput
from attnlab.attention.score_mods import apply_score_mods
from attnlab.attention.scores import hide, row_max, scaled_scores, weighted_sum
from attnlab.remat import save_for_backward


def dense(call: AttentionCall) -> AttentionOutput:
    """Supports every option and every derivative; needs O(T S) memory."""
    options = call.options
    query, key, value = (a.swapaxes(1, 2) for a in (call.query, call.key, call.value))
    weights, total, top = _weights(_scores(query, key, call), call)
    divisor = jnp.where(total > 0, total, 1)
    logsumexp = jnp.where(total > 0, top + jnp.log(divisor), -math.inf)
    if options.talking_heads[1] is not None or "probs" in call.patch:
        weights, divisor = _probs(weights, total, call), jnp.ones((), total.dtype)
    seed, rate = dropout_seed(options.dropout_rate, options.dropout_key), options.dropout_rate
    if seed is not None:
        kept = keep_mask(seed, rate, (0,) * 4, *(weights.shape,) * 2)
        weights = jnp.where(kept, weights / (1 - rate), 0)
    # The rows are divided by their sums after the product with v: a [T, V] pass for a [T, S] one.
    out = (weighted_sum(weights, value) / divisor).swapaxes(1, 2).astype(value.dtype)
    out = save_for_backward(out)
    wanted = call.return_residual
    return AttentionOutput(out, logsumexp[..., 0].swapaxes(1, 2) if wanted else None)


def scores_and_probs(call: AttentionCall) -> dict[str, Array]:
    """Scores and probs [B, N, T, S], computed aside: no backend's output can depend on it.

    The barrier keeps the compiler from merging this with, or fusing it into, the output's path.
    """
    query, key = jax.lax.optimization_barrier((call.query, call.key))
    x = _scores(query.swapaxes(1, 2), key.swapaxes(1, 2), call)
    weights, total, _ = _weights(x, call)
    return {"scores": x, "probs": _probs(weights, total, call)}


def _scores(query: Array, key: Array, call: AttentionCall) -> Array:
    """What the softmax reads, after the first matrix of talking heads and before the mask."""
    options = call.options
    x = scaled_scores(query, key, options.bias, options.scale, options.logits_soft_cap)
    if options.score_mods:
        head, row, column = (jnp.arange(size) for size in x.shape[1:])
        x = apply_score_mods(
            options.score_mods, x, head=head[:, None, None], query=row[:, None], key=column[None]
        )
    before = options.talking_heads[0]
    if before is not None:
        x = jnp.einsum("BNTS,NM->BMTS", x, before.astype(x.dtype))
    return _patched(call, "scores", x)


def _weights(x: Array, call: AttentionCall) -> tuple[Array, Array, Array]:
    """exp(scores - top), its row sums, a sink's share included, and top."""
    x = hide(x, call.mask.allowed())
    top = row_max(x)
    sink = call.options.sink
    if sink is not None:
        sink = sink.astype(x.dtype)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = save_for_backward(jnp.exp(x - top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, total if sink is None else total + jnp.exp(sink - top), top


def _probs(weights: Array, total: Array, call: AttentionCall) -> Array:
    after, probs = call.options.talking_heads[1], weights / jnp.where(total > 0, total, 1)
    if after is not None:
        probs = jnp.einsum("BMTS,MN->BNTS", probs, after.astype(probs.dtype))
    return _patched(call, "probs", probs)


def _patched(call: AttentionCall, name: str, value: Array) -> Array:
    return call.patch[name](value) if name in call.patch else value
