"""All scores at once: the reference that every other backend must agree with, and its steps.

Arrays are [B, N, T, H] in these steps, which other backends and extra keys use too.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from attnlab.attention.call import AttentionCall, AttentionOutput
from attnlab.attention.dropout import drop
from attnlab.attention.score_mods import apply_score_mods
from attnlab.ops import save_for_backward, wide_einsum


def dense(call: AttentionCall) -> AttentionOutput:
    """softmax(scale q k^T + bias) v, with every option and every derivative; O(T S) memory."""
    options = call.options
    query, key, value = (
        without_float16(a).swapaxes(1, 2) for a in (call.query, call.key, call.value)
    )
    scores = _scores(query, key, call)  # scale q k^T + bias, soft cap, modifications
    weights, total, top = softmax_terms(scores, call.mask.allowed(), options.sink)
    weights = save_for_backward(weights)  # exp(scores - top): probabilities without 1 / total
    divisor = jnp.where(total > 0, total, 1)
    logsumexp = jnp.where(total > 0, top + jnp.log(divisor), -math.inf)
    if options.talking_heads[1] is not None or "probs" in call.patch:
        weights, divisor = _probs(weights, total, call), jnp.ones((), total.dtype)
    if options.dropout_rate:
        weights = drop(weights, options.dropout_rate, options.dropout_key)
    # Divided after the product with v: a pass over [T, V] in place of one over [T, S].
    output = (weighted_sum(weights, value) / divisor).swapaxes(1, 2).astype(call.value.dtype)
    output = save_for_backward(output)
    wanted = call.return_residual
    return AttentionOutput(output, logsumexp[..., 0].swapaxes(1, 2) if wanted else None)


def scores_and_probs(call: AttentionCall) -> dict[str, Array]:
    """Scores and probs [B, N, T, S], computed aside: no backend's output can depend on it.

    The barrier keeps the compiler from merging this with, or fusing it into, the output's path.
    """
    query, key = jax.lax.optimization_barrier((call.query, call.key))
    scores = _scores(query.swapaxes(1, 2), key.swapaxes(1, 2), call)
    weights, total, _ = softmax_terms(scores, call.mask.allowed(), call.options.sink)
    return {"scores": scores, "probs": _probs(weights, total, call)}


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
    return call.patch["scores"](x) if "scores" in call.patch else x


def _probs(weights: Array, total: Array, call: AttentionCall) -> Array:
    after, probs = call.options.talking_heads[1], weights / jnp.where(total > 0, total, 1)
    if after is not None:
        probs = jnp.einsum("BMTS,MN->BNTS", probs, after.astype(probs.dtype))
    return call.patch["probs"](probs) if "probs" in call.patch else probs


def without_float16(a: Array) -> Array:
    """float16 as float32: between a query and many keys its gradients would underflow."""
    return a.astype(jnp.float32) if a.dtype == jnp.float16 else a


def scaled_scores(
    query: Array, key: Array, bias: Array | None, scale: ArrayLike, soft_cap: float | None
) -> Array:
    """cap tanh((scale q k^T + bias) / cap), in float32 at least and before any mask.

    Args:
      query: [B, N, T, H]; key: [B, K, S, H]. Query head n uses key head n // (N/K).
      bias: broadcasts to [B, N, T, S], or None.
      soft_cap: cap, or None for no cap.

    Returns:
      [B, N, T, S].
    """
    (b, n, t, h), (_, k, s, _) = query.shape, key.shape
    acc_dtype = jnp.result_type(jnp.float32, query, key)
    # The query heads of a key head are rows of one product.
    rows = query.reshape(b, k, n // k * t, h)
    x = wide_einsum("BKRH,BKSH->BKRS", rows, key, acc_dtype)
    x = x.reshape(b, n, t, s) * jnp.asarray(scale, acc_dtype)
    if bias is not None:
        x = x + bias.astype(acc_dtype)
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def softmax_terms(
    scores: Array, allowed: Array | None, sink: Array | None = None
) -> tuple[Array, Array, Array]:
    """exp(scores - top), 0 where hidden, its row sums and `top`: softmax = exp(scores - top) / sum.

    `top` is the largest score of a row, and a constant for the gradient: the softmax does not
    depend on it. It is finite where all scores are -inf, so that exp(-inf - top) is always 0.

    Args:
      scores: [B, N, T, S].
      allowed: broadcasts to the scores, False = hidden; None hides nothing.
      sink: broadcasts to [B, N, T, 1]: one more score of each row, which counts in its sum.
    """
    x = scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(x, axis=-1, keepdims=True), float(np.finfo(x.dtype).min))
    top = jax.lax.stop_gradient(top)
    if sink is not None:
        sink = sink.astype(x.dtype)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = jnp.exp(x - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, total if sink is None else total + jnp.exp(sink - top), top


def weighted_sum(weights: Array, value: Array) -> Array:
    """[B, N, T, V] from [B, N, T, S] and [B, Kv, S, V], summed in the dtype of the weights."""
    (b, n, t, s), (_, kv, _, v) = weights.shape, value.shape
    rows = weights.astype(value.dtype).reshape(b, kv, n // kv * t, s)
    out = wide_einsum("BKRS,BKSV->BKRV", rows, value, weights.dtype)
    return out.reshape(b, n, t, v)


def add_sink(output: Array, logsumexp: Array, sink: Array) -> tuple[Array, Array]:
    """Output and log sum exp with a sink in the softmax, from those of the keys alone.

    Args:
      output: [B, T, N, V]; logsumexp: [B, T, N]; sink: broadcasts to [B, N, T, 1].
    """
    sink = jnp.squeeze(sink, -1).swapaxes(1, 2).astype(logsumexp.dtype)
    # Without a key and with a sink of -inf, the difference would be NaN, in the gradient too.
    empty = (logsumexp == -jnp.inf) & (sink == -jnp.inf)
    keys, sink = (jnp.where(empty, 0, a) for a in (logsumexp, sink))
    # Not sigmoid: its derivative s (1 - s) has no digits left where the keys' part is small.
    of_keys = jnp.exp(jax.nn.log_sigmoid(keys - sink))[..., None]
    total = jnp.where(empty, -jnp.inf, jnp.logaddexp(keys, sink))
    return (output * of_keys).astype(output.dtype), total
