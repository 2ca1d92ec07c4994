"""A call of attention that was checked: shapes and kinds, what a mask means, what is asked for.

Whatever is wrong is said here, before any backend runs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.attention.dense import Options
from attnlab.attention.masks import Edges
from attnlab.attention.visible import Visible


class Call(NamedTuple):
    """A call that was checked: what every backend takes, in its order."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    visible: Visible
    options: Options


def checked(
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
    sink=None,
    edit={},  # noqa: B006
) -> tuple[Call, bool]:
    """The call with its batch axis, and whether it came with one; or the error."""
    same = key is value
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
    value = key if same else value  # one array stays one
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
    neighbours, mask = (mask, None) if isinstance(mask, Edges) else (None, mask)
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
        edit=edit,
        sink=_broadcastable("sink", sink, jnp.floating, (q[0], inner, q[1], 1)),
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
    """With leading axes of size 1, so that [T, S] and [N, T, S] broadcast to [B, N, T, S]; a sink
    has S = 1."""
    if a is None:
        return None
    a = _array(name, a, kind)
    shape = (1,) * (4 - a.ndim) + a.shape
    if len(shape) != 4 or any(x not in (1, y) for x, y in zip(shape, scores, strict=True)):
        padding = name == "mask" and a.shape == (scores[0], scores[3])
        raise ValueError(
            f"{name} {a.shape} must broadcast to the scores [B, N, T, S] = {scores}: "
            "each axis is 1 or as long"
            + ("; which keys are no filling is mask[:, None, None], or masks.padding" * padding)
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
