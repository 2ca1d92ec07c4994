"""Heads and attention in one pure call: `multi_head_attention`, `decode` and `attend_heads`.

    params = init(jax.random.key(0), layout)
    y = multi_head_attention(params, x, layout, is_causal=True)

Named values that a tap can record or replace: those of `HEAD_VALUES` and of the layout's own.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from attnlab.attention import AttentionOptions
from attnlab.attention.masks import combine, side_by_side, visible_alone
from attnlab.heads.cache import Cache, extend
from attnlab.heads.call import Call
from attnlab.heads.layout import Entries, Layout, Rotate, check_params, score_scale
from attnlab.heads.positions import rotate
from attnlab.heads.rewrites import FACTORED, CallSizes, choose, contraction_orders
from attnlab.heads.weights import Params
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
"""Value -> axes: queries and keys as the scores use them (normalized, rotated), with a cache all
that it holds; values; scores before the mask; probabilities before dropout; what each head returns
after its gate; and what each head adds to the output, without the bias."""

OF_FORM = ("q", "k", "v", "scores", "heads")
"""Values that differ between forms of a layout; their names mean the layout as it is."""

Rotary = Array | tuple[Array, Array]
"""Angles of `positions.rotary_angles` for queries and keys, or a pair (for queries, for keys)."""
Context = Array | tuple[Array, Array]
"""Key/value input, or a pair (key input, value input)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadInputs:
    """What a call of heads receives beside params, x and the options of attention.

    Attributes:
      context: key/value input [B, S, E], or a pair (key input, value input); None is x.
      rotary: angles for queries and keys, or a pair.
      cache: of `init_cache`; x are the next tokens.
      padding_mask: [B, T], True = a token. Padding is attended to by none, is not kept in a cache
        and has no position there, so batch rows have lengths of their own.
      source: a second text [B, S2, D] attended to in the same softmax, without positions.
      source_mask: as `mask`, of the second text.
      shared_kv: cache entries of an earlier layer to attend to in place of those of x (cross-layer
        attention; Brandon et al. 2024, arXiv 2405.12981).
      head_mask: multiplies each head, [N] or [B, N]; 0 removes a head.
      query_scale: multiplies q.
      layer: index of the layer, counted from 0; may be traced.
      order: form of the layout to compute with, see `multi_head_attention`.
    """

    context: Context | None = None
    rotary: Rotary | None = None
    cache: Cache | None = None
    padding_mask: Bool[Array, "B T"] | None = None
    source: Float[Array, "B S2 D"] | None = None
    source_mask: Array | None = None
    shared_kv: Entries | None = None
    head_mask: Float[Array, "*B N"] | None = None
    query_scale: ArrayLike | None = None
    layer: ArrayLike = 0
    order: str | None = None


class HeadOutputs(NamedTuple):
    """What `attend_heads` returns."""

    output: Float[Array, "B T O"]
    cache: Cache | None
    """The cache with the new tokens, if one was given."""
    entries: Entries
    """The cache entries of this call, which a later layer may share."""


NO_INPUTS = HeadInputs()


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
    **options: Unpack[AttentionOptions],
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
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "B T O"], Cache]:
    """Self-attention of the next tokens x, which also attend to all that the cache holds.

    Causal by default; `is_causal=False` lets the new tokens attend to each other both ways. A call
    that overflows the cache returns NaN and writes nothing.

    Returns:
      (output [B, T, O], the cache with the new tokens).

    >>> from attnlab.heads import Standard, init, init_cache
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> y, cache = decode(params, jnp.ones((1, 2, 6)), layout, init_cache(layout, 1, 4))
    >>> y.shape, int(cache["length"])
    ((1, 2, 6), 2)
    """
    options = {"is_causal": True, **options}
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
    **options: Unpack[AttentionOptions],
) -> HeadOutputs:
    """`multi_head_attention` with everything that layers and models need.

    Args:
      params, x, layout: as in `multi_head_attention`.
      inputs: context, rotary angles, cache, padding, shared keys and values, ...
      tap: records or replaces named values.
      report: filled, while JAX traces, with the chosen form and what `explain` says of backends.
      **options: of `attnlab.dot_product_attention`.
    """
    check_inputs(params, x, layout, inputs)
    tap = tap or Tap()
    tap.layer = inputs.layer
    sizes = call_sizes(x, inputs, options)
    wanted = inputs.order
    if wanted is None and any(name in tap.patch for name in OF_FORM):
        wanted = FACTORED
    order, steps = choose(layout, sizes, wanted)
    if report is not None:
        report["order"] = dict(contraction_orders(layout, sizes))
        report["chosen"] = {"order": order}
    aside = tuple(name for name in OF_FORM if name in tap.capture)
    if steps and aside:
        _record_factored(params, x, layout, inputs, tap, aside, options)
        tap_here = Tap(tap.capture - set(aside), tap.patch, tap.layer)
    else:
        tap_here = tap
    for step in steps:
        params, layout = step.params(params), step.layout
    outputs = _attend(params, x, layout, inputs, tap_here, report, options)
    if tap_here is not tap:
        tap.merge(tap_here)
    return outputs


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
        num_source=0 if inputs.source is None else inputs.source.shape[1],
        rotary=inputs.rotary is not None,
        shift_invariant=options.get("logits_soft_cap") is None
        and options.get("sink") is None
        and not options.get("score_mods"),
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
    params, x, inputs = _barrier((params, x, inputs))
    alone = Tap(names, tap.patch, tap.layer)
    _attend(params, x, layout, inputs, alone, None, options)
    tap.merge(alone)


def _barrier(values: tuple[Params, Array, HeadInputs]) -> tuple[Params, Array, HeadInputs]:
    params, x, inputs = values
    params, x, context = jax.lax.optimization_barrier((dict(params), x, inputs.context))
    return params, x, dataclasses.replace(inputs, context=context)


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
    if inputs.cache is not None and inputs.rotary is not None and layout.rotary_axis is None:
        raise ValueError(
            f"rotary positions cannot rotate inputs that are cached, as those of {layout.name!r} "
            "are; use 'bilinear'"
        )
    rotate_q, rotate_k = rotations(inputs.rotary)
    ready = layout.prepare(params, x)
    q = layout.project_q(params, ready, rotate_q)
    if inputs.query_scale is not None:
        q = q * jnp.asarray(inputs.query_scale, q.dtype)
    entries = inputs.shared_kv
    if entries is None:
        entries = project_context(params, x, ready, layout, inputs.context, rotate_k)
    options = {**options, "scale": score_scale(layout)}
    made, cache, fits = entries, None, None
    if inputs.cache is not None:
        entries, cache, fits, options = _with_cache(entries, x, inputs, options)
    elif inputs.padding_mask is not None:
        mask = combine(options.get("mask"), inputs.padding_mask[:, None, None, :])
        options = {**options, "mask": mask}
    if inputs.source is not None and inputs.source.shape[1]:
        entries, options = _with_source(params, x, layout, inputs, entries, options)
    k, v = layout.keys_values(params, entries)
    backends = None if report is None else report.setdefault("implementation", {})
    call = Call(options, tap, inputs.layer, report=backends)  # type: ignore[arg-type]
    heads = _heads(params, x, layout, (q, k, v), call)
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
    heads = layout.attend(params, q, k, v, inner)
    for extra in layout.extras:
        heads = extra.after_attention(params, x, heads, call)
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
    indices of a cache are not positions, so the mask says who attends to whom."""
    assert inputs.cache is not None
    window = options.get("local_window_size")
    extended = extend(
        inputs.cache,
        entries,
        inputs.padding_mask,
        is_causal=options.get("is_causal", False),
        window=window[0] if isinstance(window, tuple) else window,
    )
    options = {**options, "mask": combine(options.get("mask"), extended.allowed)}
    options["is_causal"], options["local_window_size"] = False, None
    held = {name: a.astype(x.dtype) for name, a in extended.entries.items()}
    return held, extended.cache, extended.fits, options


def _with_source(
    params: Params,
    x: Array,
    layout: Layout,
    inputs: HeadInputs,
    entries: Entries,
    options: AttentionOptions,
) -> tuple[Entries, AttentionOptions]:
    """The entries with those of a second text behind them, and the options for both: every query
    attends to all of the second text."""
    source = inputs.source
    assert source is not None
    own = next(iter(entries.values())).shape[1]
    rotary = inputs.rotary[1] if isinstance(inputs.rotary, tuple) else inputs.rotary
    still = None
    if rotary is not None:
        still = jnp.zeros((source.shape[1], rotary.shape[-1]), rotary.dtype)
    more = make_entries(params, source, layout, rotary=still)
    joined = {n: jnp.concatenate([a, more[n].astype(a.dtype)], axis=1) for n, a in entries.items()}
    both = own, source.shape[1]
    window = options.get("local_window_size")
    mask = visible_alone(x.shape[1], own, options.get("is_causal", False), window)
    mask = combine(options.get("mask"), mask)
    mask = side_by_side(mask, inputs.source_mask, x.shape[1], both)
    options = {**options, "mask": mask, "is_causal": False, "local_window_size": None}
    bias = options.get("bias")
    if bias is not None:
        bias = jnp.asarray(bias)
        options["bias"] = jnp.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, both[1])])
    return joined, options


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


def head_values(layout: Layout) -> dict[str, str]:
    """Names of the values that heads of this layout have -> their axes."""
    values = HEAD_VALUES | dict(layout.values)
    for extra in layout.extras:
        values |= extra.values(layout)
    return values


def check_inputs(params: Params, x: Array, layout: Layout, inputs: HeadInputs) -> None:
    """Raises TypeError or ValueError naming the array, its shape and what is needed."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is a {type(layout).__name__}; the order is (params, x, layout), with a layout "
            "such as attnlab.heads.Standard(width=64, num_heads=4)"
        )
    check_params(params, layout)
    y, z = inputs.context if isinstance(inputs.context, tuple) else (inputs.context,) * 2
    keys = x if y is None else y
    values = keys if z is None else z
    names = ("x", "context", "value context")
    for name, a, width in zip(names, (x, keys, values), layout.input_widths, strict=True):
        _check_input(name, a, width, x)
    if inputs.source is not None:
        _check_input("source", inputs.source, layout.input_widths[1], x)
    if values.shape[1] != keys.shape[1]:
        raise ValueError(f"value context {values.shape} must be as long as context {keys.shape}")
    if inputs.shared_kv is not None and inputs.context is not None:
        raise ValueError("shared_kv replaces the keys and values of x; leave context out")
    if inputs.cache is not None and inputs.context is not None:
        raise ValueError("a cache is for self-attention; leave context out")
    if inputs.padding_mask is not None and inputs.context is not None:
        raise ValueError("padding_mask is of x; hide padding of the context by mask")


def _check_input(name: str, a: Array, width: int, x: Array) -> None:
    if not hasattr(a, "shape") or not jnp.issubdtype(a.dtype, jnp.floating):
        kind = f"{a.dtype} {a.shape}" if hasattr(a, "shape") else type(a).__name__
        raise TypeError(f"{name} must be a float array [batch, length, {width}], not {kind}")
    if len(a.shape) != 3:
        raise ValueError(f"{name} {a.shape} must be [batch, length, {width}]")
    if a.shape[2] != width:
        raise ValueError(f"{name} {a.shape} must end in width {width}, that of the layout")
    if a.shape[0] != x.shape[0]:
        raise ValueError(f"{name} {a.shape} and x {x.shape} must have one batch size")


def explain_heads(
    layout: Layout,
    x: ArrayLike | jax.ShapeDtypeStruct,
    inputs: HeadInputs = NO_INPUTS,
    *,
    capture: Iterable[str] = (),
    **options: Unpack[AttentionOptions],
) -> dict[str, dict[str, object]]:
    """What `attend_heads` does in this call: the form of the layout and the backend.

    The call is traced, not run; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      {"order": {order: FLOPs or why not}, "chosen": {"order": name}, "implementation": {backend:
      what `attnlab.explain` says}}.

    >>> from attnlab.heads import Wide
    >>> x = jax.ShapeDtypeStruct((16, 256, 256), "float32")
    >>> explain_heads(Wide(width=256, num_heads=8), x)["chosen"]
    {'order': 'absorbed'}
    """
    from attnlab.heads.layout import weight_shapes

    report: dict[str, dict[str, object]] = {}
    shapes = weight_shapes(layout)
    dtype = getattr(x, "dtype", jnp.float32)
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    arrays = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    traced = {n: a for n, a in arrays.items() if n not in ("layer", "order")}

    def call(params: Params, x: Array, traced: dict[str, Array]) -> None:
        given = dataclasses.replace(inputs, **traced)  # type: ignore[arg-type]
        attend_heads(params, x, layout, given, tap=Tap(capture), report=report, **options)

    jax.eval_shape(call, params, x, traced)
    return report
