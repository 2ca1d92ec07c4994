"""Heads and attention in one pure call: `multi_head_attention`, `decode` and `attend_heads`.

    params = init(jax.random.key(0), layout)
    y = multi_head_attention(params, x, layout, is_causal=True)

Named values that a tap can record or replace: those of `HEAD_VALUES` and of the layout's own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.attention import AttentionOptions, explaining, masks
from attnlab.attention.validate import validated_window
from attnlab.heads.cache import Cache, extend
from attnlab.heads.call import Call
from attnlab.heads.inputs import NO_INPUTS, OF_FORM, Context, HeadInputs, Rotary, check_inputs
from attnlab.heads.layout import Entries, Layout, Rotate
from attnlab.heads.params import weight_shapes
from attnlab.heads.positions import rotate
from attnlab.heads.rewrites import FACTORED, CallSizes, choose, contraction_orders
from attnlab.heads.shapes import score_scale
from attnlab.heads.weights import Params
from attnlab.tap import Tap

HEAD_KEYWORDS = {
    "multi_head_attention": ("context", "rotary", "layer", "order", "tap"),
    "decode": ("rotary", "layer", "padding_mask", "tap"),
    "attend_heads": ("inputs", "tap", "report"),
}
"""Keywords other than those of `AttentionOptions`, for messages."""


class HeadOutputs(NamedTuple):
    """What `attend_heads` returns.

    >>> from attnlab.heads import Standard, init, init_cache
    >>> layout = Standard(width=6, num_heads=2)
    >>> inputs = HeadInputs(cache=init_cache(layout, 1, 9))
    >>> call = lambda x: attend_heads(init(jax.random.key(0), layout), x, layout, inputs)
    >>> outputs = jax.eval_shape(call, jnp.ones((1, 5, 6)))
    >>> outputs.cache["k"].shape, outputs.entries["k"].shape  # all that fit; of this call
    ((1, 9, 2, 3), (1, 5, 2, 3))
    """

    output: Float[Array, "B T O"]
    cache: Cache | None
    """The cache with the new tokens, if one was given."""
    entries: Entries
    """The cache entries of this call, which a later layer may share."""


def multi_head_attention(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    context: Context | None = None,
    *,
    rotary: Rotary | None = None,
    layer: ArrayLike = 0,
    order: str | None = None,
    tap: Tap | None = None,
    **options: Any,
) -> Float[Array, "B T O"]:
    """sum_n softmax(scale q_n k_n^T) v_n W_O[n], with q, k and v as the layout computes them.

    Args:
      params: of `init(key, layout)`.
      x: query input.
      layout: the heads.
      context: key/value input [B, S, E], or a pair (key input, value input); None is x.
      rotary: angles of `positions.rotary_angles`, or a pair (for queries, for keys).
      layer: index of the layer, for layouts that depend on it; may be traced.
      order: "factored" (the weights as they are) or the name of the form whose weights are
        multiplied out first, which is the same function. None takes the one with the fewest FLOPs.
      tap: records or replaces the values of `HEAD_VALUES`; see `attnlab.capture`. Recording never
        changes a bit of the output.
      **options: of `attnlab.dot_product_attention`: mask, bias, is_causal, local_window_size,
        logits_soft_cap, score_mods, dropout_rate, dropout_key, implementation, ...

    Returns:
      [B, T, O].

    Raises:
      TypeError, ValueError: params, shapes or options that do not fit, saying what to change.

    >>> from attnlab.heads import Wide, init
    >>> layout = Wide(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> multi_head_attention(params, jnp.ones((1, 5, 6)), layout, is_causal=True).shape
    (1, 5, 6)
    """
    _checked_options("multi_head_attention", options)
    inputs = HeadInputs(context=context, rotary=rotary, layer=layer, order=order)
    return attend_heads(params, x, layout, inputs, tap=tap, **options).output


def decode(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    cache: Cache,
    *,
    rotary: Rotary | None = None,
    layer: ArrayLike = 0,
    padding_mask: Bool[Array, "B T"] | None = None,
    tap: Tap | None = None,
    **options: Any,
) -> tuple[Float[Array, "B T O"], Cache]:
    """Self-attention of the next tokens x, which also attend to all that the cache holds.

    Causal by default; `is_causal=False` lets the new tokens attend to each other both ways. A call
    that overflows the cache returns NaN and writes nothing.

    Args:
      params, layout, layer, tap, options: as in `multi_head_attention`.
      x: the next tokens [B, T, D].
      cache: of `init_cache`, or of an earlier call.
      rotary: angles at the positions of x, or a pair (for queries, for keys).
      padding_mask: [B, T], True = a token. Padding is neither attended to nor kept in the cache.

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
    _checked_options("decode", options)
    options = {"is_causal": True, **options}
    if not isinstance(cache, Mapping) or "length" not in cache:
        raise ValueError("cache must be that of init_cache(layout, batch, size)")
    inputs = HeadInputs(cache=cache, rotary=rotary, layer=layer, padding_mask=padding_mask)
    outputs = attend_heads(params, x, layout, inputs, tap=tap, **options)
    assert outputs.cache is not None
    return outputs.output, outputs.cache


def attend_heads(
    params: Params,
    x: Float[Array, "B T D"],
    layout: Layout,
    inputs: HeadInputs = NO_INPUTS,
    *,
    tap: Tap | None = None,
    report: dict[str, dict[str, object]] | None = None,
    **options: Any,
) -> HeadOutputs:
    """`multi_head_attention` with everything that layers and models need.

    Args:
      params, x, layout: as in `multi_head_attention`.
      inputs: context, rotary angles, cache, padding, shared keys and values, ...
      tap: records or replaces named values.
      report: filled, while JAX traces, with the chosen form and what `explain` says of backends.
      **options: of `attnlab.dot_product_attention`.

    Returns:
      The output [B, T, O], the cache with the new tokens, and the cache entries of this call.

    Raises:
      TypeError: params, options or inputs of the wrong kind.
      ValueError: shapes that do not fit, an unknown order, or one that this call cannot take; the
        message says what to change.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2)
    >>> params, x = init(jax.random.key(0), layout), jnp.ones((1, 5, 6))
    >>> attend_heads(params, x, layout, HeadInputs(head_mask=jnp.array([0.0, 1.0]))).output.shape
    (1, 5, 6)
    """
    check_inputs(params, x, layout, inputs)
    record = _checked_options("attend_heads", options)
    tap = tap or Tap()
    tap.layer = inputs.layer
    sizes = call_sizes(x, inputs, record)
    wanted = inputs.order
    of_form = (*OF_FORM, *layout.values)
    if patched := [name for name in of_form if name in tap.patch]:
        if wanted not in (None, FACTORED):
            raise ValueError(
                f"order {wanted!r} cannot run: a patch of {patched[0]!r} means the value of the "
                "layout as it is; use order='factored' or None"
            )
        wanted = FACTORED
    order, steps = choose(layout, sizes, wanted)
    if report is not None:
        report["order"] = dict(contraction_orders(layout, sizes))
        report["chosen"] = {"order": order}
    aside = tuple(name for name in of_form if name in tap.capture)
    if steps and aside:
        _record_factored(params, x, layout, inputs, tap, aside, record)
        tap_here = Tap(tap.capture - set(aside), tap.patch, tap.layer)
    else:
        tap_here = tap
    for step in steps:
        params, layout = step.params(params), step.layout
    outputs = _attend(params, x, layout, inputs, tap_here, report, record)
    if tap_here is not tap:
        tap.merge(tap_here)
    return outputs


def _checked_options(function: str, options: dict[str, Any]) -> AttentionOptions:
    record = AttentionOptions.from_keywords(function, options, *HEAD_KEYWORDS[function])
    if record.scale is not None:
        raise ValueError(
            "scale is a field of the layout: use dataclasses.replace(layout, scale="
            f"{record.scale!r})"
        )
    return record


def call_sizes(x: Array, inputs: HeadInputs, options: AttentionOptions) -> CallSizes:
    """The sizes by which the form of a call is chosen."""
    held = inputs.cache if inputs.cache is not None else inputs.shared_kv
    entries = {n: a for n, a in (held or {}).items() if n != "length"}
    context = inputs.context[0] if isinstance(inputs.context, tuple) else inputs.context
    keys = x if context is None else context
    return CallSizes(
        batch=x.shape[0],
        num_queries=x.shape[1],
        num_keys=max(a.shape[1] for a in entries.values()) if entries else keys.shape[1],
        cross=context is not None,
        num_new=None if not entries else 0 if inputs.shared_kv is not None else x.shape[1],
        rotary=inputs.rotary is not None,
        shift_invariant=options.logits_soft_cap is None
        and options.sink is None
        and not options.score_mods,
        entries=frozenset(entries) if entries else None,
    )


def _record_factored(
    params: Params,
    x: Array,
    layout: Layout,
    inputs: HeadInputs,
    tap: Tap,
    names: tuple[str, ...],
    options: AttentionOptions,
) -> None:
    """Records these values of the layout as it is, aside: the barrier keeps the compiler from
    merging this call with the other one, so the output keeps its bits."""
    params, x, inputs = jax.lax.optimization_barrier((dict(params), x, inputs))
    alone = Tap(names, tap.patch, tap.layer)
    _attend(params, x, layout, inputs, alone, None, options)
    tap.merge(alone)


def _attend(
    params: Params,
    x: Array,
    layout: Layout,
    inputs: HeadInputs,
    tap: Tap,
    report: dict[str, dict[str, object]] | None,
    options: AttentionOptions,
) -> HeadOutputs:
    """The call in the form that was chosen."""
    rotate_q, rotate_k = rotations(inputs.rotary)
    ready = layout.prepare(params, x)
    q = layout.project_q(params, ready, rotate_q)
    if inputs.query_scale is not None:
        q = q * jnp.asarray(inputs.query_scale, q.dtype)
    entries = inputs.shared_kv
    if entries is None:
        entries = project_context(params, x, ready, layout, inputs.context, rotate_k)
    options = options.replace(scale=score_scale(layout))
    made, cache, fits = entries, None, None
    if inputs.cache is not None:
        entries, cache, fits, options = _with_cache(entries, x, inputs, options)
    elif inputs.padding_mask is not None:
        options = _with_mask(options, inputs.padding_mask[:, None, None, :])
    k, v = layout.keys_values(params, entries)
    real = inputs.padding_mask if inputs.token_mask is None else inputs.token_mask
    call = Call(options, tap, inputs.layer, real)
    if report is None:
        heads = _heads(params, x, layout, (q, k, v), call)
    else:
        with explaining() as explained:
            heads = _heads(params, x, layout, (q, k, v), call)
        report["implementation"] = dict(explained[-1])
    output = _output(params, layout, _masked(heads, inputs.head_mask, tap), tap)
    if fits is not None:
        output = jnp.where(fits[..., None, None], output, jnp.nan)
    return HeadOutputs(output, cache, made)


def _heads(
    params: Params, x: Array, layout: Layout, qkv: tuple[Array, Array, Array], call: Call
) -> Array:
    """What heads return, after extras."""
    inner = call
    for extra in layout.extras:
        inner = extra.before_attention(params, inner)
    q, k, v = (call.tap(name, a) for name, a in zip("qkv", qkv, strict=True))
    heads = layout.attend(params, q, k, v, inner).astype(v.dtype)
    for extra in layout.extras:
        heads = extra.after_attention(params, x, heads, call).astype(v.dtype)
    return heads


def _masked(heads: Array, head_mask: Array | None, tap: Tap) -> Array:
    heads = tap.replace("heads", heads)
    if head_mask is not None:
        heads = heads * head_mask[..., None, :, None].astype(heads.dtype)
    return tap.record("heads", heads)


def _output(params: Params, layout: Layout, heads: Array, tap: Tap) -> Array:
    """The output; for a tap also what each head adds to it, [B, N, T, O]."""
    output = layout.project_out(params, heads)
    if not tap.wants("outputs"):
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
    entries: Entries, x: Array, inputs: HeadInputs, options: AttentionOptions
) -> tuple[Entries, Cache, Array, AttentionOptions]:
    """The entries with those of the cache, the longer cache, whether they fit, and the options:
    indices of a cache are not positions, so a mask replaces the causal rule and the window."""
    assert inputs.cache is not None
    extended = extend(
        inputs.cache,
        entries,
        inputs.padding_mask,
        is_causal=options.is_causal,
        window=validated_window(options.local_window_size),
    )
    options = _with_mask(options, extended.allowed)
    options = options.replace(is_causal=False, local_window_size=None)
    held = {name: a.astype(x.dtype) for name, a in extended.entries.items()}
    return held, extended.cache, extended.fits, options


def _with_mask(options: AttentionOptions, allowed: Array | None) -> AttentionOptions:
    """The options with one more boolean mask."""
    mask = options.mask
    if isinstance(mask, masks.Edges):
        raise TypeError(
            "masks.Edges do not combine with a cache or padding_mask; pass a boolean mask"
        )
    mask = None if mask is None else jnp.asarray(mask)
    return options.replace(mask=masks.combine(mask, allowed))


def rotations(rotary: Rotary | None) -> tuple[Rotate, Rotate]:
    """Functions that rotate queries and keys by their angles; the identity without angles."""
    for_q, for_k = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    return rotation(for_q), rotation(for_k)


def rotation(angles: Array | None) -> Rotate:
    """Rotates [B, T, ..., H] by the angles of its positions; None rotates nothing."""
    if angles is None:
        return lambda a: a

    def rotated(a: Array) -> Array:
        return rotate(a.reshape(*a.shape[:2], -1, a.shape[-1]), angles).reshape(a.shape)

    return rotated


def project_context(
    params: Params,
    x: Array,
    ready: Array,
    layout: Layout,
    context: Context | None,
    rotate_k: Rotate,
) -> Entries:
    """Cache entries of the key/value input; `ready` is x, prepared. One input stays one array."""
    y, z = context if isinstance(context, tuple) else (context, context)
    keys = ready if y is None or y is x else layout.prepare(params, y)
    values = keys if z is None or z is y else ready if z is x else layout.prepare(params, z)
    return layout.project_kv(params, keys, values, rotate_k)


def make_entries(
    params: Params, context: Float[Array, "B S E"], layout: Layout, *, rotary: Array | None = None
) -> Entries:
    """Cache entries of one text: `HeadInputs.shared_kv` of another call.

    Args:
      params: of `init(key, layout)`.
      context: key/value input.
      layout: the heads.
      rotary: angles of the keys; None rotates nothing.

    Returns:
      Name -> [B, S, ...].

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2, num_kv_heads=1)
    >>> params = init(jax.random.key(0), layout)
    >>> {n: a.shape for n, a in make_entries(params, jnp.ones((1, 5, 6)), layout).items()}
    {'k': (1, 5, 1, 3), 'v': (1, 5, 1, 3)}
    """
    ready = layout.prepare(params, context)
    return layout.project_kv(params, ready, ready, rotation(rotary))


def project_heads(
    params: Params, x: Float[Array, "B T D"], layout: Layout, context: Context | None = None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S Kv V"]]:
    """x -> q, and the context (default x) -> k and v.

    Query head n uses key head n // (N/K) and value head n // (N/Kv). Weights are cast to the dtype
    of the input, so x decides the precision of the products.

    Args:
      params: of `init(key, layout)`.
      x: query input.
      layout: the heads.
      context: key/value input, or a pair (key input, value input); None is x.

    Returns:
      (q, k, v), without rotary embedding.

    Raises:
      TypeError, ValueError: params or shapes that do not fit.

    >>> from attnlab.heads import Narrow, init
    >>> layout = Narrow(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> [a.shape for a in project_heads(params, jnp.ones((1, 5, 6)), layout)]
    [(1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3)]
    """
    check_inputs(params, x, layout, HeadInputs(context=context))
    ready, (rotate_q, rotate_k) = layout.prepare(params, x), rotations(None)
    entries = project_context(params, x, ready, layout, context, rotate_k)
    return layout.project_q(params, ready, rotate_q), *layout.keys_values(params, entries)


def explain_heads(
    layout: Layout,
    x: ArrayLike | jax.ShapeDtypeStruct,
    inputs: HeadInputs = NO_INPUTS,
    **options: Any,
) -> dict[str, dict[str, object]]:
    """What `attend_heads` does in this call: the form of the layout and the backend.

    The call is traced, not run; arrays may be `jax.ShapeDtypeStruct`s.

    Args:
      layout: the heads.
      x: query input [B, T, D].
      inputs: as in `attend_heads`.
      **options: of `attnlab.dot_product_attention`.

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
    report: dict[str, dict[str, object]] = {}
    dtype = getattr(x, "dtype", jnp.float32)
    params = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in weight_shapes(layout).items()}

    def call(params: Params, x: Array, inputs: HeadInputs) -> None:
        attend_heads(params, x, layout, inputs, report=report, **options)

    jax.eval_shape(call, params, x, inputs)
    return report
