"""Checks a call of attention once, before any backend runs, and makes a typed record of it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool

from attnlab.attention.dropout import is_key
from attnlab.attention.masks import Edges, MaskSpec, check_boolean
from attnlab.attention.options import AttentionCall, AttentionOptions
from attnlab.attention.score_mods import validate_score_mods
from attnlab.attention.segments import equal_length, find_segments

Kind = Literal["a float", "an integer", "a boolean"]
KINDS = {"a float": jnp.floating, "an integer": jnp.integer, "a boolean": jnp.bool_}
SCORES = "the scores [B, N, T, S]"
Patch = Mapping[str, Callable[[Array], Array]]


def check_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: AttentionOptions,
    return_residual: bool = False,
    patch: Patch | None = None,
) -> AttentionCall:
    """The checked call, with a batch axis.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: shapes that do not fit.
    """
    same = key is value
    q, k, v = (
        check_array(name, a, "a float")
        for name, a in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"query {q.shape}, key {k.shape} and value {v.shape}"
    axes = "[B, T, N, H], [B, S, K, H] and [B, S, Kv, V]"
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise ValueError(f"{shapes} must be {axes}, or all without B")
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    v = k if same else v  # one array stays one
    (b, t, n, h), (_, s, of_keys, _), of_values = q.shape, k.shape, v.shape[2]
    if 0 in q.shape + k.shape + v.shape:
        raise ValueError(f"{shapes}: no axis may have size 0")
    if b != k.shape[0] or k.shape[:2] != v.shape[:2] or h != k.shape[3]:
        raise ValueError(f"{shapes} do not fit together: they must be {axes}")
    if n % of_keys or n % of_values:
        raise ValueError(
            f"{shapes}: {of_keys} key heads and {of_values} value heads must divide {n} query heads"
        )
    mixing: tuple[Array | None, Array | None] = (None, None)
    inner = n
    if options.talking_heads is not None:
        mixing, inner = _talking_heads(options.talking_heads, n)
    axes_of = {"bias": (SCORES, (b, n, t, s)), "sink": ("[B, N, T, 1]", (b, inner, t, 1))}
    arrays = {
        name: check_array(name, getattr(options, name), "a float", *axes)
        for name, axes in axes_of.items()
        if getattr(options, name) is not None
    }
    mask, mods = _mask_spec(options, (b, n, t, s), inner), options.score_mods
    if not isinstance(mods, tuple) or mods:
        mods = validate_score_mods(mods, n)
    options = options.replace(
        **arrays, **_checked_numbers(options, h), talking_heads=mixing,
        score_mods=mods,
    )  # fmt: skip
    return AttentionCall(q, k, v, (b, n, t, s), mask, options, return_residual, patch or {})


def check_array(
    name: str, a: Any, kind: Kind, axes: str = "", shape: tuple[int, ...] = (), exact: bool = False
) -> Array:
    """The array, if it is of this kind and broadcasts to these axes; it has as many then.

    >>> check_array("bias", np.ones((5, 7)), "a float", "[N, T, S]", (6, 5, 7)).shape
    (1, 5, 7)
    >>> check_array("bias", np.ones((5, 2)), "a float", "[N, T, S]", (6, 5, 7))
    Traceback (most recent call last):
    ValueError: bias (5, 2) must broadcast to [N, T, S] = (6, 5, 7): each axis is 1 or as long
    """
    try:
        array = jnp.asarray(a)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {kind} array, not {type(a).__name__}") from None
    if not jnp.issubdtype(array.dtype, KINDS[kind]):
        raise TypeError(f"{name} must be {kind} array, not {array.dtype} {array.shape}")
    if not axes:
        return array
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if len(full) != len(shape) or any(
        size != wanted and (exact or size != 1) for size, wanted in zip(full, shape, strict=True)
    ):
        allowed = f"{axes} = {shape}"
        allowed = f"be {allowed}" if exact else f"broadcast to {allowed}: each axis is 1 or as long"
        raise ValueError(f"{name} {array.shape} must {allowed}")
    return array.reshape(full)


def _mask_spec(
    options: AttentionOptions, scores: tuple[int, int, int, int], inner: int
) -> MaskSpec:
    """What the mask, the causal rule, the window and the lengths mean; `inner` heads meet it."""
    (b, _, t, s), mask, edges = scores, None, None
    if isinstance(options.mask, Edges):
        edges = options.mask.checked(b, t, s)
    elif options.mask is not None:
        mask = _mask_array(options.mask, scores, inner)
    lengths = {}
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if (given := getattr(options, name)) is not None:
            lengths[name] = check_array(name, given, "an integer", "[B]", (b,), exact=True)
            lengths[name] = lengths[name].astype(jnp.int32)
    is_causal, window = options.is_causal, options.local_window_size
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(
            f"is_causal must be True or False, which jit keeps static, not {is_causal!r:.80}; "
            "or pass a mask"
        )
    spec = MaskSpec(
        t,
        s,
        mask,
        bool(is_causal),
        None if window is None else window_sides(window),
        lengths.get("query_seq_lengths"),
        lengths.get("key_value_seq_lengths"),
        edges,
    )
    return spec if options.segments is None else _with_segments(spec, options.segments, b)


def _with_segments(spec: MaskSpec, segments: Any, batch: int) -> MaskSpec:
    """The rules, and that a query attends to the keys of its own segment."""
    t, s = spec.num_queries, spec.num_keys
    if not isinstance(segments, tuple) and t != s:
        raise ValueError(
            f"segments {np.shape(segments)}: {t} queries and {s} keys need a pair, (of queries "
            f"[B, T] = {(batch, t)}, of keys [B, S] = {(batch, s)})"
        )
    pair = segment_pair(segments)
    queries, keys = (
        check_array("segments", a, "an integer", axes, (batch, size), exact=True)
        for a, axes, size in zip(pair, ("[B, T]", "[B, S]"), (t, s), strict=True)
    )
    first, end = spec.ranges() or (np.zeros((1, t), np.int32), np.full((1, t), s, np.int32))
    found = find_segments(queries, keys, first, end)
    return spec._replace(segments=found._replace(length=equal_length(*pair)))


def segment_pair(segments: Any) -> tuple[Any, Any]:
    """`segments` of queries and of keys.

    >>> segment_pair("ids"), segment_pair(("of queries", "of keys"))
    (('ids', 'ids'), ('of queries', 'of keys'))
    """
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    if len(pair) != 2:
        raise ValueError(
            f"segments must be an array [B, T] or a pair (of queries, of keys), not {len(pair)} "
            "arrays"
        )
    return pair


def _mask_array(mask: Any, scores: tuple[int, int, int, int], inner: int) -> Array:
    (b, n, t, s), shape = scores, np.shape(mask)
    if len(shape) < 2 or (shape == (b, s) and t not in (1, b)):
        raise ValueError(
            f"mask {shape} must be [T, S], [N, T, S] or [B, N, T, S] and broadcast to {scores}; "
            "write mask[None] for one of keys, mask[:, None] for one of queries, and "
            "mask[:, None, None] or masks.padding for padding of keys [B, S]"
        )
    if inner != n and len(shape) > 2 and shape[-3] != 1:
        raise ValueError(f"mask {shape} must be the same for all {inner} heads of talking_heads")
    check_boolean("mask", mask)
    return check_array("mask", mask, "a boolean", SCORES, scores)


def window_sides(window: object) -> tuple[int, int]:
    """`local_window_size` as (left, right), or a TypeError or ValueError that says what it may be.

    >>> window_sides(2), window_sides([3, 0])
    ((2, 2), (3, 0))
    """
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(
        isinstance(w, int | np.integer) and not isinstance(w, bool) for w in pair
    ):
        raise TypeError(f"local_window_size must be an int or (left, right), not {window!r}")
    if min(pair) < 0:
        raise ValueError(f"local_window_size must be at least 0 on both sides, not {window}")
    return int(pair[0]), int(pair[1])


def _talking_heads(mixing: Any, heads: int) -> tuple[tuple[Array | None, Array | None], int]:
    """Both matrices, and how many heads there are between them."""
    if not isinstance(mixing, tuple | list) or len(mixing) != 2:
        raise TypeError(
            f"talking_heads must be two matrices [N, M] and [M, N], or None, not {mixing!r:.80}"
        )
    before, after = (
        None if m is None else check_array("talking_heads", m, "a float") for m in mixing
    )
    inner = heads if before is None or before.ndim != 2 else before.shape[1]
    shapes = tuple(None if m is None else m.shape for m in (before, after))
    if shapes[0] not in (None, (heads, inner)) or (
        shapes[1] != (inner, heads) and (shapes[1] is not None or inner != heads)
    ):
        raise ValueError(
            f"talking_heads {shapes} must be [N, M] and [M, N] with N = {heads} query heads"
        )
    return (before, after), inner


def _checked_numbers(options: AttentionOptions, head_dim: int) -> dict[str, Any]:
    """scale, logits_soft_cap and dropout_rate."""
    scale, cap, rate = options.scale, options.logits_soft_cap, options.dropout_rate
    for name, number in (("logits_soft_cap", 1 if cap is None else cap), ("dropout_rate", rate)):
        if not isinstance(number, int | float | np.number) or isinstance(number, bool):
            raise TypeError(f"{name} must be a Python number, not {number!r:.80}")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"logits_soft_cap must be above 0 and finite, or None, not {cap}")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, not {rate}")
    if rate and options.dropout_key is None:
        raise ValueError(f"dropout_rate={rate} needs a dropout_key")
    if rate and not is_key(options.dropout_key):
        key = options.dropout_key
        shape = getattr(key, "shape", type(key).__name__)
        raise TypeError(f"dropout_key must be one key, as of jax.random.key(0), not {shape}")
    if scale is not None:
        dtype = scale.dtype if hasattr(scale, "dtype") else np.asarray(scale).dtype
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if np.ndim(scale) or not is_real:
            raise TypeError(f"scale must be one real number, not {scale!r:.80}")
    return {
        "scale": head_dim**-0.5 if scale is None else scale,
        "logits_soft_cap": None if cap is None else float(cap),
        "dropout_rate": float(rate),
    }


def checked_padding_mask(
    name: str, mask: ArrayLike | None, tokens: ArrayLike | None
) -> Bool[Array, "B T"] | None:
    """A padding mask (True = a token) as booleans; tokenizers return zeros and ones.

    Args:
      name: for errors.
      mask: [B, T].
      tokens: what it belongs to, [B, T, ...].

    Raises:
      ValueError: another shape, or whole numbers apart from 0 and 1.
      TypeError: floats, which other libraries add to the scores (0 = a token there).

    >>> checked_padding_mask("padding_mask", [[1, 1, 0]], jnp.array([[5, 3, 0]])).tolist()
    [[True, True, False]]
    """
    if mask is None:
        return None
    assert tokens is not None
    array = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    check_padding_shape(name, array, np.shape(tokens)[:2])
    if jnp.issubdtype(array.dtype, jnp.integer):
        if not isinstance(array, jax.core.Tracer) and not np.isin(np.asarray(array), (0, 1)).all():
            raise ValueError(f"{name} must hold 0 (padding) and 1 (a token) only")
    elif array.dtype != jnp.bool_:
        raise TypeError(
            f"{name} must be boolean (True = a token), not {array.dtype}; write mask > 0.5 for one "
            "of zeros and ones, mask == 0 for one that is added to the scores"
        )
    return jnp.asarray(array, bool)


def check_padding_shape(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a padding mask that does not have one element for each token."""
    if np.shape(mask) != shape:
        raise ValueError(
            f"{name} {np.shape(mask)} must be [batch, length] = {shape}, True where there is a "
            "token"
        )
