"""Attention heads in one pure call: x -> q, k, v -> heads -> output.

    params = init(jax.random.key(0), layout)
    y = multi_head_attention(params, x, layout, is_causal=True)
    y, cache = decode(params, x, layout, init_cache(layout, batch=1, size=100))

Layers of a model call the same functions. Named values that a tap can record or replace: those of
`HEAD_VALUES` and of the layout and its extras.
"""

from __future__ import annotations  # `help` shows ArrayLike, not all that it stands for

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.attention import AttentionOptions, SoftCap, explaining, masks, trace
from attnlab.attention.api import EXPLAINED
from attnlab.attention.call import check_padding_shape, segment_pair, window_sides
from attnlab.attention.score_mods import check_sequence
from attnlab.heads.cache import Cache, extend
from attnlab.heads.cost import FACTORED, CallSizes, choose, contraction_orders
from attnlab.heads.layout import Entries, HeadCall, Layout, check_params
from attnlab.heads.positions import rotate
from attnlab.heads.weights import Params
from attnlab.names import check_keywords
from attnlab.tap import Tap

HEAD_VALUES = {
    "q": "B T N H",
    "k": "B S K H",
    "v": "B S Kv V",
    "scores": "B N T S",
    "probs": "B N T S",
    "heads": "B T N V",
    "outputs": "B N T O",
}
"""Value -> axes. q and k are those of the scores (normalized, rotated), with a cache all that it
holds. "scores" are before the mask, "probs" before dropout, "heads" after the gate; "outputs" is
what each head adds to the output, without the bias."""

OF_FORM = ("q", "k", "v", "scores", "heads")
"""Values that differ between forms of a layout; their names mean the layout as it is."""

Rotary = Array | tuple[Array, Array]
"""Angles of `positions.rotary_angles` for queries and keys, or a pair (for queries, for keys)."""
Context = Array | tuple[Array, Array]
"""Key/value input, or a pair (key input, value input)."""

Note = dict[str, Any]
"""What `explain_heads` returns."""
NO_CACHE = "cache must be that of init_cache(layout, batch, size)"


class HeadAux(NamedTuple):
    """What `multi_head_attention` returns beside the output."""

    losses: dict[str, Array]
    """Auxiliary losses of extras by name."""
    kv: Entries
    """The cache entries of this call in the form that ran: `kv` of another call that attends to the
    same keys. Some forms keep the input, to which each call applies its own key and value weights:
    for a call with other weights use `project_kv`, or order="factored" in this call."""
    cache: Cache | None
    """The cache with the new tokens, if one was given."""


class _Inputs(NamedTuple):
    """Arrays of a call, apart from params and x; the same for every form of the layout."""

    context: Context | None
    kv: Entries | None
    cache: Cache | None
    rotary: Rotary | None
    padding_mask: Array | None
    head_mask: Array | None
    query_scale: ArrayLike | None
    layer: ArrayLike


@overload
def multi_head_attention(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    context: Context | None = None,
    *,
    return_aux: Literal[False] = False,
    **keywords: Any,
) -> Float[Array, "B T O"]: ...
@overload
def multi_head_attention(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    context: Context | None = None,
    *,
    return_aux: Literal[True],
    **keywords: Any,
) -> tuple[Float[Array, "B T O"], HeadAux]: ...
def multi_head_attention(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    context: Context | None = None,
    *,
    kv: Entries | None = None,
    cache: Cache | None = None,
    rotary: Rotary | None = None,
    padding_mask: Bool[Array, "B T"] | None = None,
    head_mask: Float[Array, "*B N"] | None = None,
    query_scale: ArrayLike | None = None,
    layer: ArrayLike = 0,
    order: str | None = None,
    tap: Tap | None = None,
    return_aux: bool = False,
    **options: Any,
) -> Array | tuple[Array, HeadAux]:
    """sum_n softmax(scale q_n k_n^T) v_n W_O[n], with q, k and v as the layout computes them.

    Args:
      params: of `init(key, layout)`.
      x: query input.
      layout: the heads.
      context: key/value input [B, S, E], or a pair (key input, value input); None is x.
      kv: keys and values of `project_kv` or of `HeadAux.kv`, to attend to in place of those of a
        context (cross-layer attention; Brandon et al. 2024, arXiv 2405.12981). For a call with
        other key or value weights: of `project_kv`, or of a call with order="factored".
      cache: of `init_cache`; x are the next tokens, see `decode`.
      rotary: angles of `positions.rotary_angles`, or a pair (for queries, for keys).
      padding_mask: [B, T], True = a token of x. Padding counts in no auxiliary loss. Without a
        context keys are of the tokens of x, those of `kv` too: padding is attended to by none, and
        a cache does not keep it.
      head_mask: multiplies each head, [N] or [B, N]; 0 removes a head.
      query_scale: multiplies q.
      layer: index of the layer, for layouts that depend on it; may be traced.
      order: "factored" (the weights as they are) or the name of the form whose weights are
        multiplied out first, which is the same function. None takes the one with the fewest FLOPs.
      tap: records or replaces the values of `HEAD_VALUES`; see `attnlab.capture`. Recording never
        changes a bit of the output.
      return_aux: also return `HeadAux`.
      **options: of `attnlab.dot_product_attention`: mask, bias, is_causal, local_window_size,
        segments, logits_soft_cap, score_mods, dropout_rate, dropout_key, implementation, ...

    Returns:
      The output [B, T, O], or (output, `HeadAux`) with `return_aux`.

    Raises:
      TypeError, ValueError: params, shapes or options that do not fit, saying what to change.

    >>> from attnlab.heads import Wide, init
    >>> layout = Wide(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> multi_head_attention(params, jnp.ones((1, 5, 6)), layout, is_causal=True).shape
    (1, 5, 6)
    """
    inputs = _Inputs(context, kv, cache, rotary, padding_mask, head_mask, query_scale, layer)
    fields = AttentionOptions.__dataclass_fields__
    if not options.keys() <= fields.keys():
        known = (*_Inputs._fields, "order", "tap", "return_aux", *fields)
        check_keywords("multi_head_attention", options, known)
    attention = AttentionOptions(**options)
    _check(params, x, layout, inputs, attention)
    tap = tap or Tap()
    tap.layer = layer

    of_form = {*OF_FORM, *layout.values}
    if patched := sorted(of_form & tap.patch.keys()):
        if order not in (None, FACTORED):
            raise ValueError(
                f"order {order!r} cannot run: a patch of {patched[0]!r} means the value of the "
                "layout as it is; use order='factored' or None"
            )
        order = FACTORED
    sizes = _sizes(x, inputs, attention)
    order, steps = choose(layout, sizes, order)

    here, explained = tap, EXPLAINED.get()
    start = len(explained or ())
    if steps and (recorded := of_form & tap.capture):
        choose(layout, sizes, FACTORED)  # raises where the entries are of another form
        # Aside: the barrier keeps the compiler from merging the two calls, so the output keeps its
        # bits.
        aside = jax.lax.optimization_barrier((dict(params), x, inputs))
        as_it_is = Tap(recorded, tap.patch, layer)
        _attend(aside[0], aside[1], layout, aside[2], as_it_is, attention)
        tap.merge(as_it_is)
        here = Tap(tap.capture - recorded, tap.patch, layer)
    given = layout
    for step in steps:
        params, layout = step.params(params), step.layout
    output, aux = _attend(params, x, layout, inputs, here, attention)
    if here is not tap:
        tap.merge(here)
    if explained is not None:  # of the heads in place of their calls of attention
        orders, chosen = contraction_orders(given, sizes), {"order": order}
        backends = explained[-1] if explained[start:] else {}  # a layout may have no softmax
        explained[start:] = [{"order": orders, "chosen": chosen, "implementation": backends}]
    return (output, aux) if return_aux else output


def decode(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    cache: Cache,
    *,
    is_causal: bool = True,
    **keywords: Any,
) -> tuple[Float[Array, "B T O"], Cache]:
    """Self-attention of the next tokens x, which also attend to all that the cache holds.

    A call that overflows the cache returns NaN and writes nothing.

    Args:
      params, layout: as in `multi_head_attention`.
      x: the next tokens [B, T, D].
      cache: of `init_cache`, or of an earlier call.
      is_causal: False lets the new tokens attend to each other both ways.
      **keywords: of `multi_head_attention`, such as the angles `rotary` at the positions of x, and
        `padding_mask`: padding is neither attended to nor kept in the cache. Keys of a `mask` or
        `bias` [..., T, S] are the S entries of the cache.

    Returns:
      (output [B, T, O], the cache with the new tokens).

    Raises:
      TypeError: params or options of the wrong kind.
      ValueError: the cache is of another layout or batch size, or smaller than T; shapes or options
        that do not fit.

    >>> from attnlab.heads import Standard, init, init_cache
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> y, cache = decode(params, jnp.ones((1, 2, 6)), layout, init_cache(layout, 1, 4))
    >>> y.shape, int(cache["length"])
    ((1, 2, 6), 2)
    """
    if cache is None:
        raise ValueError(NO_CACHE)
    output, aux = multi_head_attention(
        params, x, layout, cache=cache, is_causal=is_causal, return_aux=True, **keywords
    )
    assert aux.cache is not None
    return output, aux.cache


# The stages ---------------------------------------------------------------------------------------


def _attend(
    params: Params, x: Array, layout: Layout, inputs: _Inputs, tap: Tap, options: AttentionOptions
) -> tuple[Array, HeadAux]:
    """x -> q, k, v -> heads -> output, with the weights as they are."""
    for_q, for_k = _pair(inputs.rotary)
    ready, y, z = _prepared(params, layout, x, *_pair(inputs.context, x))
    q = layout.project_q(params, ready, functools.partial(rotated, for_q))
    if inputs.query_scale is not None:
        q = q * jnp.asarray(inputs.query_scale, q.dtype)
    kv, cache, fits = inputs.kv, None, None
    if kv is None:
        kv = layout.project_kv(params, y, z, functools.partial(rotated, for_k))
    entries, options = kv, dataclasses.replace(options, scale=layout.score_scale)
    if inputs.cache is not None:
        entries, cache, fits, options = _with_cache(kv, x, inputs, options)
    elif inputs.padding_mask is not None and inputs.context is None:
        options = _without_padding(options, inputs.padding_mask)
    k, v = layout.keys_values(params, entries)

    real = inputs.padding_mask
    if options.segments is not None:
        real = masks.combine(real, jnp.asarray(segment_pair(options.segments)[0]) != 0)
    call = HeadCall(x, options, tap, inputs.layer, real)
    inner = call
    for extra in layout.extras:
        inner = extra.before_attention(params, inner)
    q, k, v = tap("q", q), tap("k", k), tap("v", v)
    sizes = layout.head_sizes
    if (*q.shape[2:], k.shape[2], *v.shape[2:]) != tuple(sizes.values()):
        stated = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        raise ValueError(
            f"layout {layout.name!r} computes q {q.shape}, k {k.shape} and v {v.shape}; {stated}: "
            "define them, or kv is of another layout"
        )
    heads = layout.attend(params, q, k, v, inner).astype(v.dtype)
    losses: dict[str, Array] = {}
    for extra in layout.extras:
        heads, more = extra.after_attention(params, heads, call)
        if set(more) != set(extra.losses):
            raise ValueError(
                f"extra {extra.name!r} declares the losses {extra.losses} and returns {tuple(more)}"
            )
        heads, losses = heads.astype(v.dtype), losses | more

    if inputs.head_mask is None:
        heads = tap("heads", heads)
    else:
        kept = jnp.asarray(inputs.head_mask)[..., None, :, None].astype(heads.dtype)
        heads = tap.record("heads", tap.replace("heads", heads) * kept)
    output = _output(params, layout, heads, tap)
    if fits is not None:
        output = jnp.where(fits[..., None, None], output, jnp.nan)
    return output, HeadAux(losses, kv, cache)


def project_kv(
    params: Params, context: Context, layout: Layout, rotary: Array | None = None
) -> Entries:
    """Keys and values of a context: `kv` of `multi_head_attention`, or what a cache keeps.

    Args:
      params: of `init(key, layout)`.
      context: key/value input [B, S, E], or a pair (key input, value input).
      layout: the heads.
      rotary: angles of the keys; None rotates nothing.

    Returns:
      Name -> [B, S, ...]; `layout.keys_values(params, entries)` makes k and v of them.

    Raises:
      TypeError, ValueError: params, inputs or angles that do not fit.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2, num_kv_heads=1)
    >>> params = init(jax.random.key(0), layout)
    >>> {n: a.shape for n, a in project_kv(params, jnp.ones((1, 5, 6)), layout).items()}
    {'k': (1, 5, 1, 3), 'v': (1, 5, 1, 3)}
    """
    check_params(params, layout)
    keys, values = _pair(context)
    _check_inputs({"context": keys, "value context": values}, layout.input_widths[1:])
    if rotary is not None:
        _check_rotary(rotary, layout, [keys])
    y, z = _prepared(params, layout, keys, values)
    return layout.project_kv(params, y, z, functools.partial(rotated, rotary))


def _pair(value: Any, default: Any = None) -> tuple[Any, Any]:
    """A pair, or the value twice; the default where it is None."""
    value = default if value is None else value
    if isinstance(value, tuple) and len(value) != 2:
        raise ValueError(f"context and rotary are an array or a pair each, not {len(value)} arrays")
    return value if isinstance(value, tuple) else (value, value)


def _prepared(params: Params, layout: Layout, *inputs: Array) -> list[Array]:
    """Each input after `prepare`; one array stays one."""
    ready: dict[int, Array] = {}
    for a in inputs:
        if id(a) not in ready:
            ready[id(a)] = layout.prepare(params, a)
    return [ready[id(a)] for a in inputs]


def rotated(angles: Array | None, a: Array) -> Array:
    """[B, T, ..., H] rotated by the angles of its positions; None rotates nothing."""
    if angles is None:
        return a
    return rotate(a.reshape(*a.shape[:2], -1, a.shape[-1]), angles).reshape(a.shape)


def _output(params: Params, layout: Layout, heads: Array, tap: Tap) -> Array:
    """The output; for a tap also what each head adds to it, [B, N, T, O]."""
    output = layout.project_out(params, heads)
    if "outputs" not in tap.capture and "outputs" not in tap.patch:
        return output
    if "outputs" not in tap.patch:  # aside: `output` keeps its bits
        params, heads = jax.lax.optimization_barrier((dict(params), heads))
    # Linear in the heads but for a bias, which is the output of heads that are zero.
    bias = layout.project_out(params, jnp.zeros_like(heads))

    def of_head(kept: Array) -> Array:
        return layout.project_out(params, heads * kept[:, None]) - bias

    each = jax.vmap(of_head, out_axes=1)(jnp.eye(heads.shape[2], dtype=heads.dtype))
    outputs = tap("outputs", each)
    return jnp.sum(outputs, axis=1) + bias if "outputs" in tap.patch else output


def _with_cache(
    new: Entries, x: Array, inputs: _Inputs, options: AttentionOptions
) -> tuple[Entries, Cache, Array, AttentionOptions]:
    """The entries with those of the cache, the longer cache, whether they fit, and the options:
    indices of a cache are not positions, so a mask replaces the causal rule and the window."""
    assert inputs.cache is not None
    window = options.local_window_size
    window = None if window is None else window_sides(window)
    cache, allowed, fits = extend(
        inputs.cache, new, inputs.padding_mask, is_causal=options.is_causal, window=window
    )
    options = _with_mask(options, allowed)
    options = dataclasses.replace(options, is_causal=False, local_window_size=None)
    return {name: cache[name].astype(x.dtype) for name in new}, cache, fits, options


def _without_padding(options: AttentionOptions, padding_mask: Array) -> AttentionOptions:
    """The options with keys of tokens alone."""
    if options.segments is None:
        return _with_mask(options, padding_mask[:, None, None, :])
    queries, keys = segment_pair(options.segments)
    return dataclasses.replace(options, segments=(queries, jnp.where(padding_mask, keys, 0)))


def _with_mask(options: AttentionOptions, allowed: Array) -> AttentionOptions:
    """The options with one more boolean mask."""
    mask = options.mask
    if not (mask is None or isinstance(mask, masks.Edges)):
        mask = jnp.asarray(mask)
    return dataclasses.replace(options, mask=masks.combine(mask, allowed))


def _sizes(x: Array, inputs: _Inputs, options: AttentionOptions) -> CallSizes:
    """The sizes by which the form of a call is chosen."""
    held = inputs.cache if inputs.cache is not None else inputs.kv
    entries = {n: a for n, a in (held or {}).items() if n != "length"}
    return CallSizes(
        batch=x.shape[0],
        num_queries=x.shape[1],
        num_keys=max(a.shape[1] for a in tuple(entries.values()) or _pair(inputs.context, x)),
        cross=inputs.context is not None,
        num_new=None if not entries else 0 if inputs.kv is not None else x.shape[1],
        rotary=inputs.rotary is not None,
        shift_invariant=options.logits_soft_cap is None
        and options.sink is None
        and not options.score_mods,
        entries=None if held is None else tuple(entries),
    )


# Explanations -------------------------------------------------------------------------------------


def explain_heads(layout: Layout, x: ArrayLike | jax.ShapeDtypeStruct, **keywords: Any) -> Note:
    """How `multi_head_attention` computes a call: the form of the layout and the backend.

    The call is traced, not run; arrays may be `jax.ShapeDtypeStruct`s.

    Args:
      layout: the heads.
      x: query input [B, T, D].
      **keywords: of `multi_head_attention`.

    Returns:
      {"order": {order: FLOPs or why not}, "chosen": {"order": name}, "implementation": {backend:
      what `attnlab.explain` says}}.

    Raises:
      TypeError, ValueError: what the call would raise, except for a backend that cannot run.

    >>> from attnlab.heads import Wide
    >>> x = jax.ShapeDtypeStruct((16, 256, 256), "float32")
    >>> explain_heads(Wide(width=256, num_heads=8), x)["chosen"]
    {'order': 'absorbed'}
    """
    dtype = getattr(x, "dtype", jnp.float32)
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in layout.shapes.items()}
    with explaining() as notes:
        trace(multi_head_attention, params=params, x=x, layout=layout, **keywords)
    return notes[-1]


def head_values(layout: Layout) -> dict[str, str]:
    """Names of the values that heads of this layout have -> their axes.

    >>> from attnlab.heads import Differential
    >>> head_values(Differential(width=8, num_heads=2))["v"]
    'B S Kv V'
    """
    values = HEAD_VALUES | dict(layout.values)
    for extra in layout.extras:
        values |= extra.values(layout)
    return values


# Checks -------------------------------------------------------------------------------------------


def _check(
    params: Params, x: Array, layout: Layout, inputs: _Inputs, options: AttentionOptions
) -> None:
    """Raises TypeError or ValueError naming the array, its shape and what is needed."""
    check_params(params, layout)
    if options.scale is not None:
        raise ValueError(
            f"scale is a field of the layout: dataclasses.replace(layout, scale={options.scale!r})"
        )
    if inputs.context is not None and (inputs.kv is not None or inputs.cache is not None):
        raise ValueError("kv and cache hold the keys and values; leave context out")
    if options.score_mods:
        check_sequence(options.score_mods)
    read = {"x": x}
    if inputs.kv is None:
        keys, values = _pair(inputs.context, x)
        read |= {"context": keys, "value context": values}
    _check_inputs(read, layout.input_widths)
    if inputs.cache is not None:
        _check_cache(inputs.cache, options)
    if inputs.padding_mask is not None:
        check_padding_shape("padding_mask", inputs.padding_mask, x.shape[:2])
        if inputs.kv and {a.shape[1] for a in inputs.kv.values()} != {x.shape[1]}:
            raise ValueError(
                f"padding_mask {inputs.padding_mask.shape} hides keys of the tokens of x; kv is of "
                "other tokens: hide those by mask, such as masks.padding(lengths, S)"
            )
        if getattr(inputs.padding_mask, "dtype", None) != np.bool_:
            raise TypeError("padding_mask must be a boolean array, True where there is a token")
    if inputs.head_mask is not None:
        shape, one = np.shape(inputs.head_mask), (layout.num_heads,)
        each = (x.shape[0], *one)
        if shape not in (one, (1, *one), each):
            raise ValueError(
                f"head_mask {shape} must be [heads] = {one} or [batch, heads] = {each}"
            )
    if inputs.rotary is not None:
        _check_rotary(inputs.rotary, layout, list(read.values()))


def _check_inputs(inputs: Mapping[str, Array], widths: Sequence[int]) -> None:
    """Raises TypeError or ValueError for inputs that are not [B, length, width], with one B."""
    first, one = next(iter(inputs.items()))
    for (name, a), width in zip(inputs.items(), widths, strict=False):
        if not jnp.issubdtype(getattr(a, "dtype", int), jnp.floating):
            kind = f"{a.dtype} {a.shape}" if hasattr(a, "shape") else type(a).__name__
            raise TypeError(f"{name} must be a float array [batch, length, {width}], not {kind}")
        if len(a.shape) != 3 or a.shape[2] != width or a.shape[0] != one.shape[0] or 0 in a.shape:
            raise ValueError(
                f"{name} {a.shape} must be [batch, length, {width}] with the batch size of {first} "
                f"{one.shape} and no axis of size 0"
            )
    keys, values = inputs.get("context"), inputs.get("value context")
    if keys is not None and values is not None and values.shape[1] != keys.shape[1]:
        raise ValueError(f"value context {values.shape} must be as long as context {keys.shape}")


def _check_cache(cache: Mapping[str, Array], options: AttentionOptions) -> None:
    if not isinstance(cache, Mapping) or "length" not in cache:
        raise ValueError(NO_CACHE)
    if options.segments is not None:
        raise ValueError("a cache holds one text a row: leave segments out")
    if not isinstance(options.is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be True or False, not {options.is_causal!r:.80}")
    if others := [mod for mod in options.score_mods if not isinstance(mod, SoftCap)]:
        raise ValueError(
            f"{type(others[0]).__name__} of score_mods reads indices, which are no positions in a "
            "cache; pass bias [B, N, T, S] at the positions of the S entries, or SoftCap alone"
        )


def _check_rotary(rotary: Rotary, layout: Layout, rotated: Sequence[Array]) -> None:
    """`rotated`: the inputs of queries and keys; of queries alone where keys were made before."""
    size = layout.rotary_size
    if size is None:
        raise ValueError(
            f"rotary cannot be applied to the keys of layout {layout.name!r}; use layout 'bilinear'"
        )
    for angles, a in zip(_pair(rotary), rotated, strict=False):
        shape, (batch, length) = np.shape(angles), a.shape[:2]
        fits = len(shape) >= 2 and shape[-2] in (1, length) and 2 * shape[-1] <= size
        if not fits or shape[:-2] not in ((), (1,), (batch,)):
            raise ValueError(
                f"rotary {shape} must be angles [length, n] or [batch, length, n] of the {length} "
                f"tokens with n of at most {size // 2}, as of rotary_angles, or a pair (for "
                "queries, for keys)"
            )
