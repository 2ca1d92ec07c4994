"""Checks a call of attention before any backend runs, and makes a typed record of it."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from attnlab.attention.dropout import is_key
from attnlab.attention.mask_checks import check_boolean
from attnlab.attention.mask_spec import MaskSpec
from attnlab.attention.masks import Edges
from attnlab.attention.options import DEFAULT_OPTIONS, AttentionCall, AttentionOptions, TalkingHeads
from attnlab.attention.score_mods import validate_score_mods

Kind = Literal["float", "integer", "boolean"]
KINDS = {"float": jnp.floating, "integer": jnp.integer, "boolean": jnp.bool_}


def validate(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    return_residual: bool = False,
    patch: Mapping[str, Callable[[Array], Array]] | None = None,
) -> tuple[AttentionCall, bool]:
    """The checked call with a batch axis, and whether it came with one.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: shapes that do not fit.
    """
    q, k, v, batched = _validated_qkv(query, key, value)
    b, t, n, h = q.shape
    scores = (b, n, t, k.shape[1])
    talking_heads, inner = _validated_talking_heads(options.talking_heads, n)
    mask = _validated_mask(scores, inner, batched, options)
    _check_dropout(options.dropout_rate, options.dropout_key)
    checked = options.replace(
        bias=_broadcastable("bias", options.bias, "float", scores),
        scale=h**-0.5 if options.scale is None else _scalar("scale", options.scale),
        logits_soft_cap=_positive("logits_soft_cap", options.logits_soft_cap),
        score_mods=validate_score_mods(options.score_mods, scores),
        dropout_rate=float(options.dropout_rate),
        talking_heads=talking_heads,
        sink=_broadcastable("sink", options.sink, "float", (b, inner, t, 1)),
    )
    return AttentionCall(q, k, v, mask, checked, return_residual, patch or {}), batched


def _validated_qkv(
    query: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, Array, bool]:
    """The arrays with a batch axis, and whether they came with one."""
    same = key is value
    q, k, v = (
        _array(name, a, "float") for name, a in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"query {q.shape}, key {k.shape} and value {v.shape}"
    batched = q.ndim == 4
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise ValueError(
            f"{shapes} must be [B, T, N, H], [B, S, K, H] and [B, S, Kv, V], or all without B"
        )
    if not batched:
        q, k, v = q[None], k[None], v[None]
    v = k if same else v  # one array stays one
    if 0 in q.shape + k.shape + v.shape:
        raise ValueError(f"{shapes}: no axis may have size 0")
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{shapes} do not fit together: they must be [B, T, N, H], [B, S, K, H], [B, S, Kv, V]"
        )
    heads, of_keys, of_values = q.shape[2], k.shape[2], v.shape[2]
    if heads % of_keys or heads % of_values:
        raise ValueError(
            f"{shapes}: {of_keys} key heads and {of_values} value heads must divide {heads} query "
            "heads"
        )
    return q, k, v, batched


def _validated_mask(
    scores: tuple[int, int, int, int], inner: int, batched: bool, options: AttentionOptions
) -> MaskSpec:
    """What the mask, the causal rule, the window and the lengths mean; `inner` heads meet it."""
    b, n, t, s = scores
    mask, edges = options.mask, None
    if isinstance(mask, Edges):
        mask, edges = None, mask
    if mask is not None and np.ndim(mask) < 2:
        raise ValueError(
            f"mask {np.shape(mask)} must be [T, S], [N, T, S] or [B, N, T, S], each axis 1 or as "
            f"long: [B, N, T, S] = {scores}. Write mask[None] for a mask of keys and "
            "mask[:, None] for one of queries"
        )
    if mask is not None and inner != n and jnp.ndim(mask) > 2 and jnp.shape(mask)[-3] != 1:
        raise ValueError(
            f"mask {jnp.shape(mask)} must be the same for all {inner} heads of talking_heads"
        )
    if mask is not None:
        check_boolean("mask", mask)
    return MaskSpec(
        t,
        s,
        mask=_broadcastable("mask", mask, "boolean", scores),
        is_causal=_flag("is_causal", options.is_causal),
        window=validated_window(options.local_window_size),
        query_lengths=_lengths("query_seq_lengths", options.query_seq_lengths, b, batched),
        key_lengths=_lengths("key_value_seq_lengths", options.key_value_seq_lengths, b, batched),
        edges=None if edges is None else edges.checked(b, t, s),
    )


def _flag(name: str, value: object) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be known when jit traces; make it static, or pass a mask")
    found = np.asarray(value)
    if found.ndim or found.dtype != bool:
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(found)


def _array(name: str, a: ArrayLike, kind: Kind) -> Array:
    article = "an" if kind == "integer" else "a"
    try:
        array = jnp.asarray(a)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {article} {kind} array, not {type(a).__name__}") from None
    if not jnp.issubdtype(array.dtype, KINDS[kind]):
        raise TypeError(f"{name} must be {article} {kind} array, not {array.dtype} {array.shape}")
    return array


def _broadcastable(
    name: str, a: ArrayLike | None, kind: Kind, scores: tuple[int, ...]
) -> Array | None:
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
            + ("; a padding mask of keys is mask[:, None, None], or use masks.padding" * padding)
        )
    return a.reshape(shape)


def _lengths(name: str, a: ArrayLike | None, batch: int, batched: bool) -> Array | None:
    if a is None:
        return None
    a = _array(name, a, "integer")
    if a.shape != (batch,) and (batched or a.shape != ()):
        raise ValueError(f"{name} {a.shape} must be one length per batch row, [B] = ({batch},)")
    return a.reshape(batch).astype(jnp.int32)


def validated_window(window: object) -> tuple[int, int] | None:
    """`local_window_size` as (left, right), or a TypeError or ValueError that says what it may be.

    >>> validated_window(2), validated_window([3, 0])
    ((2, 2), (3, 0))
    """
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


def _validated_talking_heads(
    mixing: TalkingHeads | None, heads: int
) -> tuple[tuple[Array | None, Array | None], int]:
    """Both matrices, and how many heads there are between them."""
    if mixing is None:
        return (None, None), heads
    if not isinstance(mixing, tuple | list) or len(mixing) != 2:
        raise TypeError(
            f"talking_heads must be two matrices [N, M] and [M, N], or None, not {mixing!r:.80}"
        )
    before, after = (None if m is None else _array("talking_heads", m, "float") for m in mixing)
    inner = heads if before is None or before.ndim != 2 else before.shape[1]
    wanted = ((heads, inner), (inner, heads))
    got = tuple(None if m is None else m.shape for m in (before, after))
    if any(g not in (None, w) for g, w in zip(got, wanted, strict=True)) or (
        after is None and inner != heads
    ):
        raise ValueError(
            f"talking_heads {got} must be [N, M] and [M, N] with N = {heads} query heads"
        )
    return (before, after), inner


def _scalar(name: str, a: ArrayLike) -> ArrayLike:
    try:
        fits = jnp.shape(a) == () and jnp.result_type(a) != jnp.bool_
        fits = fits and not jnp.issubdtype(jnp.result_type(a), jnp.complexfloating)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise TypeError(f"{name} must be one real number, not {a!r:.80}")
    return a


def _positive(name: str, a: object) -> float | None:
    if a is None:
        return None
    if not isinstance(a, int | float | np.number) or isinstance(a, bool):
        raise TypeError(f"{name} must be a Python number, not {a!r:.80}")
    number = float(a)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, or None, not {a}")
    return number


def _check_dropout(rate: object, key: Array | None) -> None:
    if not isinstance(rate, int | float | np.number) or isinstance(rate, bool):
        raise TypeError(f"dropout_rate must be a Python number, not {rate!r:.80}")
    if not 0 <= float(rate) < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, not {rate}")
    if not rate:
        return
    if key is None:
        raise ValueError(f"dropout_rate={rate} needs a dropout_key")
    if not is_key(key):
        shape = getattr(key, "shape", type(key).__name__)
        raise TypeError(f"dropout_key must be one key, as of jax.random.key(0), not {shape}")
