"""A call of attention: its options, what it returns, and its checks, made before any backend."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool

from attnlab.attention.dropout import is_key
from attnlab.attention.masks import Edges, MaskSpec, check_boolean
from attnlab.attention.score_mods import ScoreMod, validate_score_mods
from attnlab.attention.segments import equal_length, find_segments

Implementation: TypeAlias = Literal["dense", "blockwise", "xla", "cudnn", "edges"] | str
"""A key of `BACKENDS`."""

TalkingHeads: TypeAlias = tuple[ArrayLike | None, ArrayLike | None]
"""[N, M] applied to the scores and [M, N] applied to the probabilities; either may be None."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The options of `dot_product_attention`, which says what each means.

    Arrays may be anything that `jnp.asarray` takes; `attend` checks them.

    >>> options = AttentionOptions(is_causal=True, scale=0.5)
    >>> options.is_causal, options.scale, options.bias
    (True, 0.5, None)
    """

    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: int | tuple[int, int] | None = None
    segments: Any = None
    logits_soft_cap: float | None = None
    score_mods: Sequence[ScoreMod] = ()
    dropout_rate: float = 0.0
    dropout_key: Array | None = None
    talking_heads: Any = None
    sink: Any = None
    implementation: Implementation | None = None


class AttentionOutput(NamedTuple):
    """Result of `attend`.

    >>> from attnlab.attention import attend
    >>> x = jnp.zeros((1, 3, 2, 4))
    >>> _, logsumexp = attend(x, x, x, AttentionOptions(is_causal=True), return_residual=True)
    >>> jnp.exp(logsumexp[0, :, 0]).round().tolist()  # scores are 0: the number of keys
    [1.0, 2.0, 3.0]
    """

    output: Array
    """[B, T, N, V] in the dtype of the values"""
    logsumexp: Array | None = None
    """log sum exp of the scores [B, T, N], if requested"""


class AttentionCall(NamedTuple):
    """A checked call of attention with a batch axis: what every backend takes.

    >>> q, kv = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 5, 2, 8))
    >>> call = check_call(q, kv, kv, AttentionOptions(sink=0.0))
    >>> call.scores_shape, call.key.shape  # K = 2 key heads for N = 4 query heads
    ((1, 4, 3, 5), (1, 5, 2, 8))
    >>> call.options.sink.shape
    (1, 1, 1, 1)
    """

    query: Array
    """[B, T, N, H]"""
    key: Array
    """[B, S, K, H]"""
    value: Array
    """[B, S, Kv, V]"""
    scores_shape: tuple[int, int, int, int]
    """B, N, T, S"""
    mask: MaskSpec
    """all that hides keys; the mask, causal rule, window, lengths and segments of `options` are
    not read"""
    options: AttentionOptions
    """bias and sink with four axes, a number as scale, score_mods with arrays, a pair of
    talking_heads"""
    return_residual: bool = False
    patch: Mapping[str, Callable[[Array], Array]] = {}
    """"scores", "probs" -> the function that replaces them"""


Kind = Literal["a float", "an integer", "a boolean"]
KINDS = {"a float": jnp.floating, "an integer": jnp.integer, "a boolean": jnp.bool_}
SCORES = "the scores [B, N, T, S]"
DEFAULT_OPTIONS = AttentionOptions()


def check_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: AttentionOptions = DEFAULT_OPTIONS,
    return_residual: bool = False,
    patch: Mapping[str, Callable[[Array], Array]] | None = None,
) -> AttentionCall:
    """The checked call, with a batch axis.

    Raises:
      TypeError: an argument of the wrong kind.
      ValueError: shapes or numbers that do not fit.
    """
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
    v = k if key is value else v  # one array stays one
    (b, t, n, h), (_, s, of_keys, _), of_values = q.shape, k.shape, v.shape[2]
    if 0 in q.shape + k.shape + v.shape:
        raise ValueError(f"{shapes}: no axis may have size 0")
    if b != k.shape[0] or k.shape[:2] != v.shape[:2] or h != k.shape[3]:
        raise ValueError(f"{shapes} do not fit together: they must be {axes}")
    if n % of_keys or n % of_values:
        raise ValueError(f"{shapes}: K {of_keys} and Kv {of_values} must divide {n} query heads")
    mixing: tuple[Array | None, ...] = (None, None)
    inner = n
    if options.talking_heads is not None:
        mixing, inner = _talking_heads(options.talking_heads, n)
    bias, sink, mods = options.bias, options.sink, options.score_mods
    if bias is not None:
        bias = check_array("bias", bias, "a float", SCORES, (b, n, t, s))
    if sink is not None:
        sink = check_array("sink", sink, "a float", "[B, N, T, 1]", (b, inner, t, 1))
    if mods != ():
        mods = validate_score_mods(mods, n)
    mask = _mask_spec(options, (b, n, t, s), inner)
    _check_numbers(options)
    cap = options.logits_soft_cap
    options = dataclasses.replace(
        options,
        bias=bias,
        sink=sink,
        score_mods=mods,
        talking_heads=mixing,
        scale=h**-0.5 if options.scale is None else options.scale,
        logits_soft_cap=None if cap is None else float(cap),
        dropout_rate=float(options.dropout_rate),
    )
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
    cut = isinstance(a, np.ndarray) and array.dtype != a.dtype  # int64 where JAX has int32
    if cut and kind == "an integer" and (a.astype(array.dtype) != a).any():
        raise ValueError(f"{name} has numbers up to {a.max()}, which {array.dtype} does not hold")
    if not axes:
        return array
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if len(full) != len(shape) or any(
        size != wanted and (exact or size != 1) for size, wanted in zip(full, shape, strict=True)
    ):
        verb, rule = ("be", "") if exact else ("broadcast to", ": each axis is 1 or as long")
        raise ValueError(f"{name} {array.shape} must {verb} {axes} = {shape}{rule}")
    return array.reshape(full)


def _mask_spec(
    options: AttentionOptions, scores: tuple[int, int, int, int], inner: int
) -> MaskSpec:
    """Which keys each query attends to; `inner` heads meet the mask."""
    (b, n, t, s), mask, edges = scores, options.mask, None
    if isinstance(mask, Edges):
        edges = mask.checked(b, t, s)
        mask = None
    elif mask is not None:
        check_boolean("mask", mask)
        shape = np.shape(mask)
        if len(shape) < 2 or (b != 1 and shape == (b, s) and t not in (1, b)):
            raise ValueError(
                f"mask {shape} must be [T, S], [N, T, S] or [B, N, T, S] and broadcast to {scores};"
                " write mask[None] for keys [S], mask[:, None, None] or masks.padding for padding"
            )
        if inner != n and len(shape) > 2 and shape[-3] != 1:
            raise ValueError(f"mask {shape} must be one for all {inner} heads of talking_heads")
        mask = check_array("mask", mask, "a boolean", SCORES, scores)
    query_lengths, key_lengths = (
        None if (given := getattr(options, name)) is None else _lengths(name, given, b, size)
        for name, size in (("query_seq_lengths", t), ("key_value_seq_lengths", s))
    )
    is_causal, window = options.is_causal, options.local_window_size
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(
            f"is_causal must be True or False, which jit keeps static, not {is_causal!r:.80}; "
            "or pass a mask"
        )
    window = None if window is None else window_sides(window)
    spec = MaskSpec(t, s, mask, bool(is_causal), window, query_lengths, key_lengths, edges)
    if options.segments is None:
        return spec
    pair = segment_pair(options.segments)
    queries, keys = (
        check_array("segments", a, "an integer", axes, (b, size), exact=True)
        for a, axes, size in zip(pair, ("[B, T]", "[B, S]"), (t, s), strict=True)
    )
    first, end = spec.ranges() or (0, s)
    found = find_segments(queries, keys, first, end)
    return spec._replace(segments=found._replace(length=equal_length(*pair)))


def _lengths(name: str, lengths: Any, batch: int, size: int) -> Array:
    """Lengths [B] of an axis, at most `size`: int32 does not hold all that NumPy does, and uint8
    does not hold every `size`."""
    xp = jnp if isinstance(lengths, jax.Array) else np
    array = xp.asarray(lengths)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(np.int32) if array.dtype.itemsize < 4 else array
        lengths = xp.minimum(array, size)
    checked = check_array(name, lengths, "an integer", "[B]", (batch,), exact=True)
    return checked.astype(jnp.int32)


def segment_pair(segments: Any) -> tuple[Any, Any]:
    """`segments` of queries and of keys.

    >>> segment_pair("ids"), segment_pair(("of queries", "of keys"))
    (('ids', 'ids'), ('of queries', 'of keys'))
    """
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    if len(pair) != 2:
        raise ValueError(f"segments: an array or a pair (queries, keys), not {len(pair)} arrays")
    return pair


def window_sides(window: object) -> tuple[int, int]:
    """`local_window_size` as (left, right).

    >>> window_sides(2), window_sides([3, 0])
    ((2, 2), (3, 0))
    """
    pair = window if isinstance(window, tuple | list) else (window, window)
    if len(pair) != 2 or not all(type(w) is int or isinstance(w, np.integer) for w in pair):
        raise TypeError(f"local_window_size must be an int or (left, right), not {window!r}")
    if min(pair) < 0:
        raise ValueError(f"local_window_size must be at least 0 on both sides, not {window}")
    return int(pair[0]), int(pair[1])


def _talking_heads(mixing: Any, heads: int) -> tuple[tuple[Array | None, ...], int]:
    """Both matrices, and how many heads there are between them."""
    if not isinstance(mixing, tuple | list) or len(mixing) != 2:
        raise TypeError(
            f"talking_heads must be two matrices [N, M] and [M, N], or None, not {mixing!r:.80}"
        )
    before, after = mixing
    inner = heads if before is None or after is None else (heads, *np.shape(before))[-1]
    shapes = {"[N, M]": (heads, inner), "[M, N]": (inner, heads)}
    return tuple(
        None if m is None else check_array("talking_heads", m, "a float", axes, shape, exact=True)
        for m, (axes, shape) in zip(mixing, shapes.items(), strict=True)
    ), inner


def _check_numbers(options: AttentionOptions) -> None:
    """Raises TypeError or ValueError for scale, logits_soft_cap and dropout."""
    scale, cap = options.scale, options.logits_soft_cap
    rate, key = options.dropout_rate, options.dropout_key
    if scale is not None:
        dtype = getattr(scale, "dtype", type(scale))
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if np.ndim(scale) or not is_real:
            raise TypeError(f"scale must be one real number, not {scale!r:.80}")
    if cap is not None and not (isinstance(cap, Real) and cap is not True and 0 < cap < math.inf):
        raise ValueError(f"logits_soft_cap: finite Python number above 0 or None, not {cap!r:.80}")
    if not (isinstance(rate, Real) and 0 <= rate < 1):
        raise ValueError(f"dropout_rate: a Python number from 0 to below 1, not {rate!r:.80}")
    if rate and not is_key(key):
        raise ValueError(
            f"dropout_rate {rate} needs a dropout_key such as jax.random.key(0), not {key!r:.80}"
        )


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
    if not jnp.issubdtype(array.dtype, jnp.integer):
        check_boolean(name, array)
    elif not isinstance(array, jax.core.Tracer) and not np.isin(np.asarray(array), (0, 1)).all():
        raise ValueError(f"{name} must hold 0 (padding) and 1 (a token) only")
    return jnp.asarray(array, bool)


def check_padding_shape(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a padding mask that does not have one element for each token."""
    if np.shape(mask) != shape:
        raise ValueError(f"{name} {np.shape(mask)} must be [batch, length] = {shape}")
