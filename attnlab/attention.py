"""q, k, v -> output: one function, several backends, one set of rules that all of them keep.

`dot_product_attention` has the names and axes of `jax.nn.dot_product_attention` and drops in
where that stood. It settles what a mask means before any backend runs, so no backend can differ.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from attnlab import masks

Mix = tuple[Array | None, Array | None]


class Options(NamedTuple):
    """What a backend is asked for beside q, k, v, bias and mask."""

    scale: float
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    dropout_key: Any = None
    mix: Mix = (None, None)
    return_probs: bool = False
    return_residual: bool = False


class Backend(NamedTuple):
    """One way to compute attention. `refuse` says why it cannot do a call, or returns None."""

    run: Callable[..., dict[str, Array]]
    """(q, k, v, bias, allowed, options) -> {"out", and "probs", "residual" where asked}"""
    refuse: Callable[..., str | None]
    """(q, k, v, bias, options) -> reason or None"""


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S Kv V"],
    bias: Float[Array, "..."] | None = None,
    mask: Num[Array, "..."] | Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    mix: Mix | None = None,
    return_probs: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """softmax(scale q k^T + bias) v, per head (Vaswani et al. 2017, section 3.2.1).

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, Kv, V]; B may be left out. V may
        differ from H. K and Kv each divide N: query head n uses key head n // (N/K).
      bias: added to the scores, broadcastable to [B, N, T, S].
      mask: boolean, True = may attend, broadcastable to [B, N, T, S].
      scale: multiplies q k^T; None is 1/sqrt(H).
      is_causal: query t sees keys 0..t (top-left aligned where T != S, as in jax.nn).
      query_seq_lengths, key_value_seq_lengths: valid positions per batch row; each works alone.
      local_window_size: (left, right): query t sees keys t-left..t+right; w means (w, w).
      logits_soft_cap: c tanh(scores / c), after scale and bias, before the mask.
      dropout_rate, dropout_key: dropout on the probabilities.
      mix: two [N, M] and [M, N] matrices that mix heads before and after the softmax, either of
        them None (talking heads, Shazeer et al. 2020, arXiv 2003.02436).
      return_probs: also return the probabilities [B, N, T, S], before dropout. Never changes a
        bit of the output.
      return_residual: also return log sum exp of the scores [B, T, N], -inf for empty rows.
      implementation: a row of `BACKENDS`; None chooses (see `explain`).

    Returns: [B, T, N, V] in the value's dtype, or a tuple (output, probs, residual) of those asked
      for. The softmax and the sums run in float32 at least. A row with nothing to attend to gives
      zeros and zero gradient. Keys and values at positions that no query of their batch row may
      see reach neither outputs nor gradients, whatever they hold (NaN, inf).

    Raises: TypeError for a mask that is not boolean; ValueError for shapes that do not fit, a
      missing dropout key, or a backend that cannot do what is asked (with a way out).

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    batched = query.ndim == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
    options = Options(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        mix=mix or (None, None),
        return_probs=return_probs,
        return_residual=return_residual,
    )
    _check(query, key, value, mask, options)
    query, key, value, allowed, sees = _apply_masks(
        query,
        key,
        value,
        _four_axes(mask),
        is_causal,
        query_seq_lengths,
        key_value_seq_lengths,
        local_window_size,
    )
    bias = _four_axes(bias)
    name = implementation or CHOSEN
    backend = _backend(name)
    reason = backend.refuse(query, key, value, bias, options)
    if reason:
        raise ValueError(
            f"implementation={name!r} cannot run this call: {reason}; "
            "use implementation='dense' or None"
        )
    seen = backend.run(query, key, value, bias, allowed, options)
    if sees is not None:
        # Kernels of other libraries give a uniform mean in an empty row; ours gives zeros.
        seen["out"] = jnp.where(sees.swapaxes(1, 2)[..., None], seen["out"], 0)
    results = tuple(
        seen[n] if batched else seen[n][0] for n in ("out", "probs", "residual") if n in seen
    )
    return results if len(results) > 1 else results[0]


def explain(query: Array, key: Array, value: Array, bias=None, **options: Any) -> dict[str, str]:
    """Backend -> "chosen", "could run" or the reason why it could not.

    Takes the keywords of `Options` (scale, logits_soft_cap, dropout_rate, mix, return_probs, ...).

    >>> q, v = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))
    >>> explain(q, q, v)["xla"]
    'it needs as many key heads (2) as value heads (1)'
    """
    asked = Options(**{"scale": 1.0} | options)
    reasons = {n: b.refuse(query, key, value, bias, asked) for n, b in BACKENDS.items()}
    return {n: "chosen" if n == CHOSEN else reasons[n] or "could run" for n in BACKENDS}


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"unknown implementation {name!r}; known: {', '.join(BACKENDS)}, None")
    return BACKENDS[name]


def _check(query, key, value, mask, options) -> None:
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean (True = may attend), not {mask.dtype}; "
            "pass numbers that are added to the scores as bias"
        )
    q, k, v = query.shape, key.shape, value.shape
    if q[0] != k[0] or k[:2] != v[:2] or q[3] != k[3]:
        raise ValueError(f"query {q}, key {k} and value {v} do not fit together")
    if q[2] % k[2] or q[2] % v[2]:
        raise ValueError(f"{k[2]} key heads and {v[2]} value heads must divide {q[2]} query heads")
    if options.dropout_rate and options.dropout_key is None:
        raise ValueError(f"dropout_rate={options.dropout_rate} needs a dropout_key")


def _four_axes(a: Array | None) -> Array | None:
    """Leading axes of size 1, so that [T, S] and [N, T, S] broadcast to [B, N, T, S]."""
    return a if a is None else a.reshape((1,) * (4 - a.ndim) + a.shape)


def _apply_masks(query, key, value, mask, is_causal, query_lengths, key_lengths, window):
    """One boolean `allowed`, with positions that no one may see or use set to zero.

    `sees` [B, N, T] tells which query rows have anything to attend to; None means all.
    """
    (_, t, _, _), s = query.shape, key.shape[1]
    if isinstance(window, int):
        window = (window, window)
    allowed = masks.combine(
        mask,
        masks.causal(t, s)[None, None] if is_causal else None,
        masks.window(t, s, left=window[0], right=window[1])[None, None] if window else None,
        None if key_lengths is None else masks.padding(key_lengths, s),
        None if query_lengths is None else masks.padding(query_lengths, t).swapaxes(2, 3),
    )
    only_causal = allowed is not None and (mask, query_lengths, key_lengths, window) == (None,) * 4
    if allowed is None or (only_causal and s <= t):  # every key is seen, every row sees one
        return query, key, value, allowed, None
    used = jnp.any(allowed, axis=(1, 2))[:, :, None, None]
    sees = jnp.any(allowed, axis=3)
    # A zero times NaN is NaN, in the gradient too: what is hidden must not be multiplied at all.
    query = jnp.where(sees.swapaxes(1, 2)[..., None], query, 0)
    key, value = jnp.where(used, key, 0), jnp.where(used, value, 0)
    return query, key, value, allowed, sees


def _dense(query, key, value, bias, allowed, options: Options) -> dict[str, Array]:
    """The reference: all scores at once."""
    (b, t, n, h), (_, s, k, _), (_, _, kv, v) = query.shape, key.shape, value.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    before, after = options.mix
    # The query heads of a key head are rows of one product: only q, which is small, is moved.
    rows = query.swapaxes(1, 2).reshape(b, k, n // k * t, h)
    scores = jnp.einsum("BKRH,BSKH->BKRS", rows, key, preferred_element_type=wide)
    scores = scores.reshape(b, n, t, s) * jnp.asarray(options.scale, wide)
    if bias is not None:
        scores = scores + bias.astype(wide)
    if options.logits_soft_cap is not None:
        scores = options.logits_soft_cap * jnp.tanh(scores / options.logits_soft_cap)
    if before is not None:
        scores = jnp.einsum("BNTS,NM->BMTS", scores, before.astype(wide))
    # Hidden scores sink to -lowest and the row's top stays above -lowest / 2, so exp() of a
    # hidden score is exactly 0, in an empty row too, and no gradient is ever NaN.
    lowest = float(jnp.finfo(wide).max) / 2
    if allowed is not None:
        scores = jnp.where(allowed, scores, -lowest)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.maximum(top, -lowest / 2))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = jnp.where(total > 0, total, 1)
    seen: dict[str, Array] = {}
    # The rows are divided by their sums after the product with v: a [T, V] pass for a [T, S] one.
    # So the probabilities, where they are asked for, are a side branch that cannot touch `out`.
    if options.return_probs or after is not None:
        probs = weights / some
        if after is not None:
            probs = jnp.einsum("BMTS,MN->BNTS", probs, after.astype(wide))
            weights, some = probs, jnp.ones((), wide)
        if options.return_probs:
            seen["probs"] = probs
    if options.dropout_rate:
        keep = jax.random.bernoulli(options.dropout_key, 1 - options.dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1 - options.dropout_rate), 0)
    weights = weights.astype(value.dtype).reshape(b, kv, n // kv * t, s)
    out = jnp.einsum("BKRS,BSKV->BKRV", weights, value, preferred_element_type=wide)
    out = out.reshape(b, n, t, v) / some
    seen["out"] = out.swapaxes(1, 2).astype(value.dtype)
    if options.return_residual:
        residual = jnp.where(total > 0, top + jnp.log(some), -math.inf)
        seen["residual"] = residual[..., 0].swapaxes(1, 2)
    return seen


def _jax_nn(name: Any) -> Callable:
    def run(query, key, value, bias, allowed, options: Options) -> dict[str, Array]:
        h, v = query.shape[-1], value.shape[-1]
        size = max(h, v)  # jax.nn wants H == V; zero columns change no product
        query, key, value = (
            jnp.pad(a, [(0, 0)] * 3 + [(0, size - a.shape[-1])]) for a in (query, key, value)
        )
        out = jax.nn.dot_product_attention(
            query, key, value, bias, allowed, scale=options.scale, implementation=name
        )
        return {"out": out[..., :v]}

    return run


def _refuse_jax_nn(query, key, value, bias, options: Options) -> str | None:
    for field, default in Options._field_defaults.items():
        if field != "dropout_key" and getattr(options, field) != default:
            return f"jax.nn has no {field}"
    if key.shape[-2] != value.shape[-2]:
        return f"it needs as many key heads ({key.shape[-2]}) as value heads ({value.shape[-2]})"
    if not query.dtype == key.dtype == value.dtype:
        return f"it needs one dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
    return None


def _refuse_cudnn(query, key, value, bias, options: Options) -> str | None:
    device, size = jax.default_backend(), max(query.shape[-1], value.shape[-1])
    if device != "gpu":
        return f"cuDNN needs an NVIDIA GPU, this is a {device}"
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN needs float16 or bfloat16, not {query.dtype}"
    if size % 8 or size > 128:
        return f"cuDNN needs a head width of at most 128 that 8 divides, not {size}"
    if query.shape[1] % 2 or key.shape[1] % 2:
        return f"cuDNN needs even lengths, not {query.shape[1]} and {key.shape[1]}"
    if bias is not None:
        return "the gradient of a bias in cuDNN is limited to batch 1"
    return _refuse_jax_nn(query, key, value, bias, options)


# What implementation=None runs: right everywhere. A fused kernel has to be measured first.
CHOSEN = "dense"

BACKENDS: dict[str, Backend] = {
    "dense": Backend(_dense, lambda *call: None),
    "xla": Backend(_jax_nn("xla"), _refuse_jax_nn),
    "cudnn": Backend(_jax_nn("cudnn"), _refuse_cudnn),
}
