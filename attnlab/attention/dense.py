"""All scores at once: the reference that every other backend is held to."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array

from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward

Mix = tuple[Array | None, Array | None]


class Options(NamedTuple):
    """What a backend is asked for beside q, k, v, bias and what is visible."""

    scale: Any
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    dropout_key: Any = None
    mix: Mix = (None, None)
    return_residual: bool = False
    edit: Mapping[str, Callable[[Array], Array]] = {}
    """"scores", "probs" -> what takes their place"""
    sink: Any = None
    """Broadcasts to [B, N, T, 1]: a score that takes its share of a row and gives nothing"""


def refuse_edit(options: Options) -> str | None:
    """Of a backend that never holds all scores."""
    return f"it has no {' and no '.join(options.edit)} to edit" if options.edit else None


def edited(options: Options, name: str, value: Array) -> Array:
    """The value, or what takes its place."""
    return options.edit[name](value) if name in options.edit else value


def wide_dtype(*arrays: Array | None) -> Any:
    """What scores and sums are kept in: the dtype of the arrays, float32 at least."""
    return jnp.result_type(jnp.float32, *(a for a in arrays if a is not None))


def scores(query, key, bias, scale, soft_cap) -> Array:
    """[B, N, T, S] from [B, N, T, H] and [B, K, S, H] in the wide dtype, before any mask."""
    (b, n, t, h), (_, k, s, _) = query.shape, key.shape
    wide = wide_dtype(query, key)
    # The query heads of a key head are rows of one product.
    rows = query.reshape(b, k, n // k * t, h)
    x = jnp.einsum("BKRH,BKSH->BKRS", rows, key, preferred_element_type=wide)
    x = x.reshape(b, n, t, s) * jnp.asarray(scale, wide)
    if bias is not None:
        x = x + bias.astype(wide)
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def hide(x: Array, allowed: Array | None) -> Array:
    """Hidden scores sink to `lowest`: finite, and below all that `row_top` returns."""
    return x if allowed is None else jnp.where(allowed, x, lowest(x.dtype))


def lowest(dtype: Any) -> float:
    return -float(jnp.finfo(dtype).max) / 2


def row_top(x: Array) -> Array:
    """The largest score of a row, at least lowest / 2: exp(hidden - top) is 0 in an empty row too.

    A constant for the gradient: the softmax does not depend on it.
    """
    top = jnp.max(x, axis=-1, keepdims=True)
    return jax.lax.stop_gradient(jnp.maximum(top, lowest(x.dtype) / 2))


def weighted(weights: Array, value: Array) -> Array:
    """[B, N, T, V] from [B, N, T, S] and [B, Kv, S, V], summed in the dtype of the weights."""
    (b, n, t, s), (_, kv, _, v) = weights.shape, value.shape
    rows = weights.astype(value.dtype).reshape(b, kv, n // kv * t, s)
    out = jnp.einsum("BKRS,BKSV->BKRV", rows, value, preferred_element_type=weights.dtype)
    return out.reshape(b, n, t, v)


def dropout_seed(options: Options) -> Any:
    """Two words from a key of any kind; None without dropout."""
    if not options.dropout_rate:
        return None
    return jax.random.bits(options.dropout_key, (2,), jnp.uint32)


def kept(seed: Array, rate: float, starts: tuple, sizes: tuple, shape: tuple) -> Array:
    """Which probabilities of a block of [B, N, T, S] dropout keeps.

    Each one is its own draw: Threefry (Salmon et al. 2011) of (row, key position). So every
    backend draws the same ones, in blocks of any size.
    """
    b, n, t, s = (
        jnp.asarray(start, jnp.uint32) + jax.lax.broadcasted_iota(jnp.uint32, sizes, axis)
        for axis, start in enumerate(starts)
    )
    return kept_at(seed, rate, (b * shape[1] + n) * shape[2] + t, s)


def kept_at(seed: Array, rate: float, row: Array, key: Array) -> Array:
    """`kept` of probabilities one by one: row (b N + n) T + t and key position, both uint32."""
    bits = threefry_2x32((seed[0], seed[1]), jnp.stack([row, key]))[0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _scores(query, key, bias, options: Options) -> Array:
    """What the softmax reads, after the first head mix and before the mask."""
    before = options.mix[0]
    x = scores(query, key, bias, options.scale, options.logits_soft_cap)
    if before is not None:
        x = jnp.einsum("BNTS,NM->BMTS", x, before.astype(x.dtype))
    return edited(options, "scores", x)


def _weights(x: Array, visible: Visible, sink: Array | None) -> tuple[Array, Array, Array]:
    """exp(scores - top), its row sums, a sink's share included, and top."""
    x = hide(x, visible.allowed())
    top = row_top(x)
    if sink is not None:
        sink = sink.astype(x.dtype)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    weights = save_for_backward(jnp.exp(x - top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, total if sink is None else total + jnp.exp(sink - top), top


def beside_sink(out: Array, residual: Array, sink: Array) -> tuple[Array, Array]:
    """Output [B, T, N, V] and log sum exp [B, T, N] of the keys alone -> those beside a sink."""
    sink = jnp.squeeze(sink, -1).swapaxes(1, 2).astype(residual.dtype)
    share = jax.nn.sigmoid(residual - sink)[..., None]
    return (out * share).astype(out.dtype), jnp.logaddexp(residual, sink)


def _probs(weights: Array, total: Array, options: Options) -> Array:
    after, probs = options.mix[1], weights / jnp.where(total > 0, total, 1)
    if after is not None:
        probs = jnp.einsum("BMTS,MN->BNTS", probs, after.astype(probs.dtype))
    return edited(options, "probs", probs)


def inside(query, key, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """Scores and probs [B, N, T, S], computed aside: no backend's output can depend on it.

    The barrier keeps the compiler from merging this with, or fusing it into, the output's path.
    """
    query, key = jax.lax.optimization_barrier((query, key))
    query, key = query.swapaxes(1, 2), key.swapaxes(1, 2)
    x = _scores(query, key, bias, options)
    weights, total, _ = _weights(x, visible, options.sink)
    return {"scores": x, "probs": _probs(weights, total, options)}


def dense(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """Any feature, any derivative; O(T S) memory."""
    query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    weights, total, top = _weights(_scores(query, key, bias, options), visible, options.sink)
    some = jnp.where(total > 0, total, 1)
    residual = jnp.where(total > 0, top + jnp.log(some), -math.inf)
    if options.mix[1] is not None or "probs" in options.edit:
        weights, some = _probs(weights, total, options), jnp.ones((), total.dtype)
    if options.dropout_rate:
        drawn = kept(dropout_seed(options), options.dropout_rate, (0,) * 4, *(weights.shape,) * 2)
        weights = jnp.where(drawn, weights / (1 - options.dropout_rate), 0)
    # The rows are divided by their sums after the product with v: a [T, V] pass for a [T, S] one.
    out = (weighted(weights, value) / some).swapaxes(1, 2).astype(value.dtype)
    return {"out": save_for_backward(out)} | (
        {"residual": residual[..., 0].swapaxes(1, 2)} if options.return_residual else {}
    )
