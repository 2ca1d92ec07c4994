"""q, k, v -> output: one function, several backends, one set of rules that all of them keep.

`dot_product_attention` has the names and axes of `jax.nn.dot_product_attention` and drops in
where that stood. It settles what a mask means before any backend runs, so no backend can differ.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from attnlab.attention import masks
from attnlab.attention.blockwise import blockwise, refuse_blockwise
from attnlab.attention.dense import Mix, Options, dense, probabilities
from attnlab.attention.edges import edges, refuse_edges
from attnlab.attention.fused import cudnn, refuse_cudnn, refuse_jax_nn, xla
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward

__all__ = ["BACKENDS", "Backend", "Mix", "Options", "dot_product_attention", "explain"]


class Backend(NamedTuple):
    """One way to compute attention. `refuse` says why it cannot do a call, or returns None."""

    run: Callable[..., dict[str, Array]]
    """(q, k, v, bias, visible, options) -> {"out", and "residual" where asked}"""
    refuse: Callable[..., str | None]
    """(q, k, v, bias, visible, options) -> reason or None; looks at shapes and dtypes alone"""


BACKENDS: dict[str, Backend] = {
    "dense": Backend(dense, lambda *call: None),
    "blockwise": Backend(blockwise, refuse_blockwise),
    "xla": Backend(xla, refuse_jax_nn),
    "cudnn": Backend(cudnn, refuse_cudnn),
    "edges": Backend(edges, refuse_edges),
}


class Call(NamedTuple):
    """A call that was checked: what every backend takes, in its order."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    visible: Visible
    options: Options


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | masks.Edges | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    logits_soft_cap: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    mix: Any = None,
    return_probs: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """softmax(scale q k^T + bias) v, per head (Vaswani et al. 2017, section 3.2.1).

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, Kv, V]; B may be left out. V may
        differ from H. K and Kv each divide N: query head n uses key head n // (N/K).
      bias: added to the scores, broadcastable to [B, N, T, S].
      mask: boolean, True = may attend, broadcastable to [B, N, T, S]; or `masks.Edges`.
      scale: multiplies q k^T; None is 1/sqrt(H).
      is_causal: query t sees keys 0..t (top-left aligned where T != S, as in jax.nn).
      query_seq_lengths, key_value_seq_lengths: valid positions per batch row [B]; each works alone.
      local_window_size: (left, right): query t sees keys t-left..t+right; w means (w, w).
      logits_soft_cap: c tanh(scores / c), after scale and bias, before the mask.
      dropout_rate, dropout_key: dropout on the probabilities. One key drops the same ones in
        every backend.
      mix: two [N, M] and [M, N] matrices that mix heads before and after the softmax, either of
        them None (talking heads, Shazeer et al. 2020, arXiv 2003.02436).
      return_probs: also return the probabilities [B, N, T, S], before dropout. They are computed
        aside: asking for them never changes a bit of the output, nor the backend.
      return_residual: also return log sum exp of the scores [B, T, N], -inf for empty rows.
      implementation: a row of `BACKENDS`; None chooses (see `explain`). `dense` alone has second
        and forward-mode derivatives.

    Returns: [B, T, N, V] in the value's dtype, or a tuple (output, probs, residual) of those asked
      for. The softmax and the sums run in float32 at least. A row with nothing to attend to gives
      zeros and zero gradient. Keys and values at positions that no query of their batch row may
      see reach neither outputs nor gradients, whatever they hold (NaN, inf).

    Raises: before anything runs, one TypeError for a wrong kind (a mask that is not boolean) or
      ValueError for shapes that do not fit, a missing dropout key, or a backend that cannot do
      what is asked. It names the argument, its shape and the way out.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 3, 2, 4)
    """
    call, batched = _checked(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        mix=mix,
        return_residual=return_residual,
    )
    _known(implementation)
    name = implementation or _choose(call)
    reason = BACKENDS[name].refuse(*call)
    if reason:
        raise ValueError(
            f"implementation={name!r} cannot run query {call.query.shape}, key {call.key.shape}, "
            f"value {call.value.shape}: {reason}; use implementation='dense' or None"
        )
    sees, used = call.visible.sees_and_used()
    # A zero times NaN is NaN, in the gradient too: what is hidden must not be multiplied at all.
    if used is not None:
        shown = used[:, :, None, None]
        call = call._replace(
            key=jnp.where(shown, call.key, 0), value=jnp.where(shown, call.value, 0)
        )
    if sees is not None:
        sees = sees.swapaxes(1, 2)[..., None]
        call = call._replace(query=jnp.where(sees, call.query, 0))
    call = call._replace(
        query=save_for_backward(call.query),
        key=save_for_backward(call.key),
        value=save_for_backward(call.value),
    )
    seen = BACKENDS[name].run(*call)
    if sees is not None:
        # Kernels of other libraries give a uniform mean in an empty row; ours gives zeros.
        seen["out"] = jnp.where(sees, seen["out"], 0)
    if return_probs:
        seen["probs"] = probabilities(call.query, call.key, *call[3:])
    seen["out"] = save_for_backward(seen["out"])
    results = tuple(
        seen[n] if batched else seen[n][0] for n in ("out", "probs", "residual") if n in seen
    )
    return results if len(results) > 1 else results[0]


def explain(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any
) -> dict[str, str]:
    """Backend -> "chosen", "could run" or the reason why it could not.

    Takes the arguments of `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`s. Raises
    what that call would raise, except for a backend that was asked for and cannot run.

    >>> q, v = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4))
    >>> explain(q, q, v)["xla"]
    'it needs as many key heads (2) as value heads (1)'
    """
    names = inspect.signature(dot_product_attention).parameters
    if unknown := sorted(set(options) - set(names)):
        raise TypeError(f"explain: unknown keywords {unknown}; known: {', '.join(names)}")
    options.pop("return_probs", None)  # no backend may depend on it
    name = options.pop("implementation", None)
    _known(name)
    given = dict(query=query, key=key, value=value, bias=bias, mask=mask) | options
    kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    arrays = {
        n: a for n, a in given.items() if any(isinstance(x, kinds) for x in jax.tree.leaves(a))
    }
    answer: dict[str, str] = {}

    def look(arrays):
        call, _ = _checked(**(given | arrays))
        chosen = name or _choose(call)
        for n, backend in BACKENDS.items():
            answer[n] = backend.refuse(*call) or ("chosen" if n == chosen else "could run")

    jax.eval_shape(look, arrays)
    return answer


def _choose(call: Call) -> str:
    """The row of `BACKENDS` that implementation=None runs.

    By device, dtypes, sizes and features. Measured on a CPU; not measured on a GPU or TPU.
    """
    (b, t, n, _), s, platform = call.query.shape, call.key.shape[1], jax.default_backend()
    size = 4 * b * n * t * s
    order = ["edges"] + (["cudnn"] if platform == "gpu" else [])
    if size > (CACHE if platform == "cpu" else 2**30):
        order.append("blockwise")
    return next((n for n in order if BACKENDS[n].refuse(*call) is None), "dense")


# From these many bytes of scores on, a CPU is faster in blocks.
CACHE = 16 * 2**20


def _known(name: Any) -> None:
    if name is not None and name not in tuple(BACKENDS):
        raise ValueError(f"unknown implementation {name!r}; known: {', '.join(BACKENDS)}, None")


def _checked(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap=None,
    dropout_rate=0.0,
    dropout_key=None,
    mix=None,
    return_residual=False,
) -> tuple[Call, bool]:
    """The call with its batch axis, and whether it came with one; or the error."""
    query, key, value = (
        _array(n, a, jnp.floating) for n, a in dict(query=query, key=key, value=value).items()
    )
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    batched = query.ndim == 4
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        raise ValueError(
            f"{shapes} must be [B, T, N, H], [B, S, K, H] and [B, S, Kv, V], or all without B"
        )
    if not batched:
        query, key, value = query[None], key[None], value[None]
    q, k, v = query.shape, key.shape, value.shape
    if 0 in q + k + v:
        raise ValueError(f"{shapes}: no axis may have size 0")
    if q[0] != k[0] or k[:2] != v[:2] or q[3] != k[3]:
        raise ValueError(
            f"{shapes} do not fit together: they must be [B, T, N, H], [B, S, K, H], [B, S, Kv, V]"
        )
    if q[2] % k[2] or q[2] % v[2]:
        raise ValueError(
            f"{shapes}: {k[2]} key heads and {v[2]} value heads must divide {q[2]} query heads"
        )
    scores = (q[0], q[2], q[1], k[1])
    before, after, inner = _checked_mix(mix, q[2])
    neighbours, mask = (mask, None) if isinstance(mask, masks.Edges) else (None, mask)
    if inner != q[2] and mask is not None and jnp.ndim(mask) > 2 and jnp.shape(mask)[-3] != 1:
        raise ValueError(f"mask {jnp.shape(mask)} must be the same for all of mix's {inner} heads")
    if mask is not None and jnp.result_type(mask) != jnp.bool_:
        raise TypeError(
            f"mask must be boolean (True = may attend), not {jnp.result_type(mask)}; "
            "pass numbers that are added to the scores as bias"
        )
    _check_dropout(dropout_rate, dropout_key)
    visible = Visible(
        q[1],
        k[1],
        mask=_broadcastable("mask", mask, jnp.bool_, scores),
        is_causal=bool(is_causal),
        window=_checked_window(local_window_size),
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, q[0], batched),
        key_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, q[0], batched),
        edges=neighbours and neighbours.checked(q[0], q[1], k[1]),
    )
    options = Options(
        scale=q[3] ** -0.5 if scale is None else _scalar("scale", scale),
        logits_soft_cap=_positive("logits_soft_cap", logits_soft_cap),
        dropout_rate=float(dropout_rate),
        dropout_key=dropout_key,
        mix=(before, after),
        return_residual=return_residual,
    )
    bias = _broadcastable("bias", bias, jnp.floating, scores)
    return Call(query, key, value, bias, visible, options), batched


def _array(name: str, a: Any, kind: Any) -> Array:
    wanted = {jnp.floating: "a float", jnp.integer: "an integer", jnp.bool_: "a boolean"}[kind]
    try:
        array = jnp.asarray(a)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {wanted} array, not {type(a).__name__}") from None
    if not jnp.issubdtype(array.dtype, kind):
        raise TypeError(f"{name} must be {wanted} array, not {array.dtype} {array.shape}")
    return array


def _broadcastable(name: str, a: Any, kind: Any, scores: tuple[int, ...]) -> Array | None:
    """With leading axes of size 1, so that [T, S] and [N, T, S] broadcast to [B, N, T, S]."""
    if a is None:
        return None
    a = _array(name, a, kind)
    shape = (1,) * (4 - a.ndim) + a.shape
    if len(shape) != 4 or any(x not in (1, y) for x, y in zip(shape, scores, strict=True)):
        raise ValueError(
            f"{name} {a.shape} must broadcast to the scores [B, N, T, S] = {scores}: "
            "each axis is 1 or as long"
        )
    return a.reshape(shape)


def _lengths(name: str, a: Any, batch: int, batched: bool) -> Array | None:
    if a is None:
        return None
    a = _array(name, a, jnp.integer)
    if a.shape != (batch,) and (batched or a.shape != ()):
        raise ValueError(f"{name} {a.shape} must be one length per batch row, [B] = ({batch},)")
    return a.reshape(batch).astype(jnp.int32)


def _checked_window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = (window, window) if isinstance(window, int | np.integer) else window
    if not (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(w, int | np.integer) and not isinstance(w, bool) for w in pair)
    ):
        raise TypeError(f"local_window_size must be an int or (left, right), not {window!r}")
    if min(pair) < 0:
        raise ValueError(f"local_window_size must be at least 0 on both sides, not {window}")
    return int(pair[0]), int(pair[1])


def _checked_mix(mix: Any, heads: int) -> tuple[Array | None, Array | None, int]:
    """Both matrices and how many heads lie between them."""
    if mix is None:
        return None, None, heads
    if not isinstance(mix, tuple | list) or len(mix) != 2:
        raise TypeError(f"mix must be two matrices [N, M] and [M, N], or None, not {mix!r:.80}")
    before, after = (None if m is None else _array("mix", m, jnp.floating) for m in mix)
    inner = heads if before is None or before.ndim != 2 else before.shape[1]
    wanted = ((heads, inner), (inner, heads))
    got = tuple(None if m is None else m.shape for m in (before, after))
    if any(g not in (None, w) for g, w in zip(got, wanted, strict=True)) or (
        after is None and inner != heads
    ):
        raise ValueError(f"mix {got} must be [N, M] and [M, N] with N = {heads} query heads")
    return before, after, inner


def _scalar(name: str, a: Any) -> Any:
    try:
        fits = jnp.shape(a) == () and jnp.result_type(a) != jnp.bool_
        fits = fits and not jnp.issubdtype(jnp.result_type(a), jnp.complexfloating)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise TypeError(f"{name} must be one real number, not {a!r:.80}")
    return a


def _positive(name: str, a: Any) -> float | None:
    if a is None:
        return None
    if not isinstance(a, int | float | np.number) or isinstance(a, bool):
        raise TypeError(f"{name} must be a Python number, not {a!r:.80}")
    if not 0 < a < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, or None, not {a}")
    return float(a)


def _check_dropout(rate: Any, key: Any) -> None:
    if not isinstance(rate, int | float | np.number) or isinstance(rate, bool):
        raise TypeError(f"dropout_rate must be a Python number, not {rate!r:.80}")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, not {rate}")
    if not rate:
        return
    if key is None:
        raise ValueError(f"dropout_rate={rate} needs a dropout_key")
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = hasattr(key, "dtype") and key.dtype == jnp.uint32 and key.ndim == 1
    if not raw and not (typed and key.shape == ()):
        shape = getattr(key, "shape", type(key).__name__)
        raise TypeError(f"dropout_key must be one key, as of jax.random.key(0), not {shape}")
