"""Heads and attention in one pure call: order of contraction, rotary positions, gates, cache."""

from collections.abc import Iterable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from attnlab.attention import attend
from attnlab.attention.api import trace
from attnlab.attention.masks import Edges, causal_window, combine, concatenate
from attnlab.attention.options import TalkingHeads as Mix
from attnlab.heads.old import beside
from attnlab.heads.old.cache import Cache, extend
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Held, Weights
from attnlab.heads.old.orders import orders_of, steps_to
from attnlab.heads.old.project import (
    check_arrays,
    make_memory,
    merge_heads,
    query_alone,
    query_and_store,
)
from attnlab.heads.old.spec import HeadSpec
from attnlab.observe import (
    OF_ORDER,
    Edit,
    Given,
    Look,
    Ran,
    check_names,
    gated,
    values_of_heads,
)


# fmt: off
@overload
def multi_head_attention(
    w: Weights, x: Array, context: Array | None = None, *, spec: HeadSpec,
    value_context: Array | None = None, mask: Array | Edges | None = None,
    padding_mask: Array | None = None, bias: Array | None = None, is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None, logits_soft_cap: float | None = None,
    rotary: Array | tuple[Array, Array] | None = None, head_gate: Array | None = None,
    mix: Mix | None = None, dropout_rate: float = 0.0, dropout_key: Array | None = None,
    memory: Held | None = None, cache: None = None, order: str | None = None,
    return_probs: Literal[False] = False, show: tuple[()] = (), edit: Edit | None = None,
    implementation: str | None = None,
) -> Array: ...
@overload
def multi_head_attention(
    w: Weights, x: Array, context: Array | None = None, *, spec: HeadSpec,
    value_context: Array | None = None, mask: Array | Edges | None = None,
    padding_mask: Array | None = None, bias: Array | None = None, is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None, logits_soft_cap: float | None = None,
    rotary: Array | tuple[Array, Array] | None = None, head_gate: Array | None = None,
    mix: Mix | None = None, dropout_rate: float = 0.0, dropout_key: Array | None = None,
    memory: Held | None = None, cache: Cache | None = None, order: str | None = None,
    return_probs: bool = False, show: Iterable[str] = (), edit: Edit | None = None,
    implementation: str | None = None,
) -> Any: ...
# fmt: on


def multi_head_attention(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    *,
    spec: HeadSpec,
    value_context: Float[Array, "B S W"] | None = None,
    mask: Num[Array, "..."] | Bool[Array, "..."] | Edges | None = None,
    padding_mask: Bool[Array, "B T"] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    rotary: Float[Array, "*B T half"] | tuple[Array, Array] | None = None,
    head_gate: Float[Array, "*B N"] | None = None,
    mix: Mix | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    memory: Held | None = None,
    cache: Cache | None = None,
    order: str | None = None,
    return_probs: bool = False,
    show: Iterable[str] = (),
    edit: Edit | None = None,
    implementation: str | None = None,
) -> Any:
    """sum_i gate_i softmax(scale q_i k_i^T) v_i W_O[i] with q, k, v from the layout of `spec`.

    Args:
      w: the weights of `init_heads(key, spec)`.
      x: what asks; context: what is attended to (default x); value_context: default context.
      rotary: angles of `positions.rotary_angles` for q and k, or a pair (for q, for k).
      head_gate: multiplies each head's output, [N] or [B, N]; 0 removes a head.
      padding_mask: True = a token of x. What is none is seen by no token, is not kept in a cache
        and takes no position there, so that rows of a batch have lengths of their own.
      memory: keys and values to read in place of those of x: `make_memory` of an earlier layer
        (cross-layer attention; Brandon et al. 2024, arXiv 2405.12981). The weights that store them
        then do nothing.
      cache: of `init_cache(spec, ...)`: x are the next tokens, which see the cached ones too.
        Key positions then are the places of the cache. A call that overflows it returns NaN and
        writes nothing.
      order: "factored" (the weights as they are) or the layout that they are multiplied out to
        first, which is the same function (see `contraction_orders`). None takes the one with the
        fewest FLOPs; with a cache or memory, of those that read what it holds.
      show: names of `observe.OF_HEADS` ("q", "probs", "outputs", ...) to return too, as a dict.
        Asking never changes a bit of the output. Values that depend on the order of contraction
        are those of "factored".
      edit: name -> f(value, 0), which takes the value's place.
      Everything else as in `dot_product_attention`.

    Returns: [B, T, O], or a tuple (output, probs [B, N, T, S], cache, shown) of those asked for.

    >>> import jax, jax.numpy as jnp
    >>> from attnlab import init_heads
    >>> spec = HeadSpec("wide", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> multi_head_attention(w, jnp.ones((1, 5, 6)), spec=spec, is_causal=True).shape
    (1, 5, 6)
    """
    show = check_names(show, edit, values_of_heads(spec))
    ran = attend_heads(
        w,
        x,
        context,
        Given(
            mask=mask,
            padding_mask=padding_mask,
            bias=bias,
            rotary=rotary,
            head_gate=head_gate,
            dropout_key=dropout_key,
            memory=memory,
            cache=cache,
            show=(*show, "probs") if return_probs else show,
            edit=edit,
        ),
        spec=spec,
        value_context=value_context,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        mix=mix,
        dropout_rate=dropout_rate,
        order=order,
        implementation=implementation,
    )
    results: list[Any] = [ran.x]
    results += [ran.shown["probs"]] if return_probs else []
    results += [] if cache is None else [ran.cache]
    results += [{name: ran.shown[name] for name in show}] if show else []
    return tuple(results) if len(results) > 1 else ran.x


def attend_heads(
    w: Weights,
    x: Array,
    context: Array | None,
    given: Given,
    *,
    spec: HeadSpec,
    value_context: Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    mix: Mix | None = None,
    dropout_rate: float = 0.0,
    order: str | None = None,
    implementation: str | None = None,
) -> Ran:
    """`multi_head_attention` of a record, for what stands around heads."""
    check_arrays(w, x, context, value_context, spec)
    if given.source is not None:
        check_arrays(w, x, given.source, None, spec)
    source = given.source if given.source is None or given.source.shape[1] else None
    look = Look(given.show, gated(given.edit, given.head_gate), given.layer)
    mask, rotary, memory, cache = given.mask, given.rotary, given.memory, given.cache
    if memory is not None and context is not None:
        raise ValueError("memory stands in place of keys and values of x; leave context out")
    if cache is not None and (context is not None or value_context is not None):
        raise ValueError("a cache is for self-attention; leave context out")
    if given.padding_mask is not None and context is not None:
        raise ValueError("padding_mask is of x; hide padding of the context by mask")
    orders = orders_of(spec, x, context, given, logits_soft_cap)
    steps = steps_to(spec, orders, order)
    if given.told is not None:
        chosen = {"order": steps[-1].spec.layout if steps else "factored"}
        given.told.update(order=orders, chosen=chosen)
    if steps and (apart := [n for n in OF_ORDER if n in look.show]):
        if isinstance(orders["factored"], str):
            raise ValueError(f"{', '.join(apart)} cannot be shown: {orders['factored']}")
        same_w, same_x, same_context = jax.lax.optimization_barrier((w, x, context))
        aside = attend_heads(
            same_w,
            same_x,
            same_context,
            given._replace(show=tuple(apart), told=None),
            spec=spec,
            value_context=value_context,
            is_causal=is_causal,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            mix=mix,
            dropout_rate=dropout_rate,
            order="factored",
        )
        look.seen |= aside.shown
        look.show -= set(apart)
    for step in steps:
        w, spec = step.weights(w), step.spec
    row, seen, window = LAYOUTS[spec.layout], None, _left(local_window_size)
    if cache is not None and rotary is not None and row.turned is None:
        raise ValueError(
            f"rotary positions cannot turn inputs that are cached, as those of {spec.layout!r} "
            "are; use 'bilinear'"
        )
    angles = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    if memory is None:
        q, held = query_and_store(w, x, context, value_context, spec=spec, rotary=angles)
    else:
        q, held = query_alone(w, x, spec=spec, rotary=angles[0]), memory
    if given.scale is not None:
        q = q * jnp.asarray(given.scale, q.dtype)
    if cache is not None:
        seen = extend(cache, held, given.padding_mask, is_causal=is_causal, window=window)
        held = {name: a.astype(x.dtype) for name, a in seen.held.items()}
    own = next(iter(held.values())).shape[1]
    if source is not None:
        held = _with_source(w, held, source, spec, angles[1])
    k, v = row.read(w, held, spec)
    if seen is not None:
        # Places are not positions: the cache knows who sees whom.
        mask, is_causal, local_window_size = combine(mask, seen.allowed), False, None
    elif given.padding_mask is not None:
        mask = combine(mask, given.padding_mask[:, None, None, :])
    bias = given.bias
    if source is not None:
        mask = combine(mask, causal_window(x.shape[1], own, is_causal, local_window_size))
        sizes = own, k.shape[1] - own
        mask = concatenate(mask, given.context_mask, x.shape[1], sizes)
        is_causal, local_window_size = False, None
        if bias is not None:
            bias = jnp.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, sizes[1])])
    q, sink = look("q", q), beside.sink(w, spec)
    extra = beside.extra_scores(w, q, spec, logits_soft_cap)
    if extra is not None:
        if mix is not None:
            raise ValueError("mix needs the scores of all heads at once; leave extra_keys out")
        sink = beside.beside_extra(extra, sink)
    told = None if given.told is None else given.told.setdefault("implementation", {})
    tap = look.tap("scores", "probs")
    heads, residual = attend(
        q,
        look("k", k),
        look("v", v),
        bias=bias,
        mask=mask,
        scale=spec.score_scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        talking_heads=mix,
        sink=sink,
        return_residual=extra is not None,
        dropout_rate=dropout_rate,
        dropout_key=given.dropout_key,
        implementation=implementation,
        report=told,
        tap=tap,
    )
    look.seen |= tap.captured
    if extra is not None:
        drop = dropout_rate, given.dropout_key
        assert residual is not None
        more = beside.of_extra(w, extra, residual, k.shape[1], *drop)
        heads = heads + more.astype(heads.dtype)
    out = _merged(look, w, look("heads", beside.gate(look, w, x, heads, spec)), spec)
    if seen is not None:
        out = jnp.where(seen.fits[..., None, None], out, jnp.nan)
        cache = seen.cache
    return Ran(out, cache, memory, look.seen)


def _with_source(
    w: Weights, held: Held, source: Array, spec: HeadSpec, angles: Array | None
) -> Held:
    """What is held, and behind it the same of a second text, which no position turns."""
    still = None if angles is None else jnp.zeros((source.shape[1], angles.shape[-1]), angles.dtype)
    more = make_memory(w, source, spec=spec, rotary=still)
    return {n: jnp.concatenate([a, more[n].astype(a.dtype)], axis=1) for n, a in held.items()}


def _merged(look: Look, w: Weights, heads: Array, spec: HeadSpec) -> Array:
    """`merge_heads`; where somebody looks, also what each head alone writes [B, N, T, O]."""
    out = merge_heads(w, heads, spec=spec)
    if not look.wants("outputs"):
        return out
    if "outputs" not in look.edit:  # aside: `out` stays the same bits
        w, heads = jax.lax.optimization_barrier((w, heads))
    # What merges heads is linear but for a bias, which is what no heads at all give.
    bias = merge_heads(w, jnp.zeros_like(heads), spec=spec)
    one = lambda kept: merge_heads(w, heads * kept[:, None], spec=spec) - bias
    outputs = jax.vmap(one, out_axes=1)(jnp.eye(heads.shape[2], dtype=heads.dtype))
    outputs = look("outputs", outputs)
    return jnp.sum(outputs, axis=1) + bias if "outputs" in look.edit else out


def explain_heads(
    spec: HeadSpec, x: Any, context: Any = None, *, rotary: Any = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """What `multi_head_attention` does in this call: the order of contraction and the backend.

    The arguments are those of that call, which is traced; arrays may be `jax.ShapeDtypeStruct`s,
    and rotary True for some angles. Returns {"order": {order: FLOPs or reason}, "chosen": {"order":
    name}, "implementation": what `explain` says of the q, k and v that this order makes}. Raises
    what that call would raise, except for a backend that was asked for and cannot run.

    >>> x = jax.ShapeDtypeStruct((16, 256, 256), "float32")
    >>> explain_heads(HeadSpec("wide", width=256, num_heads=8), x)["chosen"]
    {'order': 'absorbed'}
    """
    told: dict[str, Any] = {}
    options.pop("return_probs", None)  # nothing depends on what is shown
    w = {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, shape in spec.shapes.items()}
    if isinstance(rotary, bool):
        texts = (x, x if context is None else context)
        angles = lambda a: jax.ShapeDtypeStruct((a.shape[1], (spec.turned or 0) // 2), x.dtype)
        rotary = tuple(map(angles, texts)) if rotary else None
    record = {name: options.pop(name) for name in Given._fields if name in options}
    record["show"] = check_names(record.get("show", ()), record.get("edit"), values_of_heads(spec))
    record = {n: a for n, a in record.items() if a is not None}

    def call(w, x, context, record, options):
        attend_heads(w, x, context, Given(**record, told=told), spec=spec, **options)

    trace(call, w=w, x=x, context=context, record=record | {"rotary": rotary}, options=options)
    return told


def _left(window: int | tuple[int, int] | None) -> int | None:
    return window[0] if isinstance(window, tuple) else window
