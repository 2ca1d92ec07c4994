"""The steps of softmax attention that several backends share. Arrays are [B, N, T, H] here."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.typing import ArrayLike

from attnlab.products import wide_einsum


def accumulation_dtype(*arrays: Array | None) -> jnp.dtype:
    """The dtype of scores and sums: that of the arrays, float32 at least."""
    return jnp.result_type(jnp.float32, *(a for a in arrays if a is not None))


def scaled_scores(
    query: Array, key: Array, bias: Array | None, scale: ArrayLike, soft_cap: float | None
) -> Array:
    """cap tanh((scale q k^T + bias) / cap), in the accumulation dtype and before any mask.

    Args:
      query: [B, N, T, H]; key: [B, K, S, H]. Query head n uses key head n // (N/K).
      bias: broadcasts to [B, N, T, S], or None.
      soft_cap: cap, or None for no cap.

    Returns:
      [B, N, T, S].
    """
    (b, n, t, h), (_, k, s, _) = query.shape, key.shape
    dtype = accumulation_dtype(query, key)
    # The query heads of a key head are rows of one product.
    rows = query.reshape(b, k, n // k * t, h)
    x = wide_einsum("BKRH,BKSH->BKRS", rows, key, dtype)
    x = x.reshape(b, n, t, s) * jnp.asarray(scale, dtype)
    if bias is not None:
        x = x + bias.astype(dtype)
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def hide(scores: Array, allowed: Array | None) -> Array:
    """The scores, -inf where they are hidden."""
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


def lowest(dtype: npt.DTypeLike) -> float:
    """The smallest finite score."""
    return float(np.finfo(np.dtype(dtype)).min)


def row_max(scores: Array) -> Array:
    """The largest score of a row, finite where all are -inf, so that exp(-inf - max) is always 0.

    A constant for the gradient: the softmax does not depend on it.
    """
    top = jnp.max(scores, axis=-1, keepdims=True)
    return jax.lax.stop_gradient(jnp.maximum(top, lowest(scores.dtype)))


def weighted_sum(weights: Array, value: Array) -> Array:
    """[B, N, T, V] from [B, N, T, S] and [B, Kv, S, V], summed in the dtype of the weights."""
    (b, n, t, s), (_, kv, _, v) = weights.shape, value.shape
    rows = weights.astype(value.dtype).reshape(b, kv, n // kv * t, s)
    out = wide_einsum("BKRS,BKSV->BKRV", rows, value, weights.dtype)
    return out.reshape(b, n, t, v)


def add_sink(output: Array, residual: Array, sink: Array) -> tuple[Array, Array]:
    """Output and log sum exp with a sink in the softmax, from those of the keys alone.

    Args:
      output: [B, T, N, V]; residual: [B, T, N]; sink: broadcasts to [B, N, T, 1].
    """
    sink = jnp.squeeze(sink, -1).swapaxes(1, 2).astype(residual.dtype)
    # Without a key and with a sink of -inf, the difference would be NaN, in the gradient too.
    empty = (residual == -jnp.inf) & (sink == -jnp.inf)
    keys, sink = (jnp.where(empty, 0, a) for a in (residual, sink))
    # Not sigmoid: its derivative s (1 - s) has no digits left where the sink's share is small.
    share = jnp.exp(jax.nn.log_sigmoid(keys - sink))[..., None]
    total = jnp.where(empty, -jnp.inf, jnp.logaddexp(keys, sink))
    return (output * share).astype(output.dtype), total
