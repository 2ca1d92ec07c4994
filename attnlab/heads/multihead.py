"""Heads and attention in one pure call: order of contraction, rotary positions, gates, cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from attnlab.attention.core import Mix, dot_product_attention, explain
from attnlab.attention.masks import Edges, combine
from attnlab.heads.absorb import Absorbed
from attnlab.heads.cache import Cache, extend
from attnlab.heads.cost import call_flops
from attnlab.heads.layouts import LAYOUTS
from attnlab.heads.maps import Held, Weights
from attnlab.heads.project import (
    check_arrays,
    merge_heads,
    project_heads,
    query_alone,
    query_and_store,
)
from attnlab.heads.spec import HeadSpec, absorption
from attnlab.names import find


def multi_head_attention(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    *,
    spec: HeadSpec,
    value_context: Float[Array, "B S W"] | None = None,
    mask: Num[Array, "..."] | Bool[Array, "..."] | Edges | None = None,
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
    implementation: str | None = None,
) -> Any:
    """sum_i gate_i softmax(scale q_i k_i^T) v_i W_O[i] with q, k, v from the layout of `spec`.

    Args:
      w: the weights of `init_heads(key, spec)`.
      x: what asks; context: what is attended to (default x); value_context: default context.
      rotary: angles of `positions.rotary_angles` for q and k, or a pair (for q, for k).
      head_gate: multiplies each head's output, [N] or [B, N]; 0 removes a head.
      memory: keys and values to read in place of those of x: `make_memory` of an earlier layer
        (cross-layer attention; Brandon et al. 2024, arXiv 2405.12981). The weights that store them
        then do nothing.
      cache: of `init_cache(spec, ...)`: x are the next tokens, which see the cached ones too.
        Key positions then are the places of the cache. A call that overflows it returns NaN and
        writes nothing.
      order: "factored" (the weights as they are) or the layout that they are multiplied out to
        first, which is the same function (see `contraction_orders`). None takes the one with the
        fewest FLOPs; with a cache or memory, of those that read what it holds.
      Everything else as in `dot_product_attention`.

    Returns: [B, T, O], or a tuple (output, probs [B, N, T, S], cache) of those asked for.

    >>> import jax, jax.numpy as jnp
    >>> from attnlab import init_heads
    >>> spec = HeadSpec("wide", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> multi_head_attention(w, jnp.ones((1, 5, 6)), spec=spec, is_causal=True).shape
    (1, 5, 6)
    """
    check_arrays(w, x, context, value_context, spec)
    if memory is not None and context is not None:
        raise ValueError("memory stands in place of keys and values of x; leave context out")
    if cache is not None and (context is not None or value_context is not None):
        raise ValueError("a cache is for self-attention; leave context out")
    orders = _orders(spec, x, context, rotary is not None, logits_soft_cap, memory, cache)
    for step in _steps(spec, orders, order):
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
    if cache is not None:
        seen = extend(cache, held, is_causal=is_causal, window=window)
        held = {name: a.astype(x.dtype) for name, a in seen.held.items()}
    k, v = row.read(w, held, spec)
    if seen is not None:
        # Places are not positions: the cache knows who sees whom.
        mask, is_causal, local_window_size = combine(mask, seen.allowed), False, None
    result = dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        scale=spec.score_scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        mix=mix,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_probs=return_probs,
        implementation=implementation,
    )
    heads, *probs = result if return_probs else (result,)
    results: list[Any] = list(probs)
    if head_gate is not None:
        heads = heads * head_gate[..., None, :, None].astype(heads.dtype)
    out = merge_heads(w, heads, spec=spec)
    if seen is not None:
        out = jnp.where(seen.fits, out, jnp.nan)
        results.append(seen.cache)
    return (out, *results) if results else out


def contraction_orders(
    spec: HeadSpec,
    batch: int,
    num_queries: int,
    num_keys: int | None = None,
    *,
    cross: bool = False,
    num_new: int | None = None,
    rotary: bool = False,
    logits_soft_cap: float | None = None,
) -> dict[str, int | str]:
    """order -> FLOPs of one forward call, what multiplying the weights out costs included; or the
    reason why the call cannot take that order. `num_new` of the keys are made in this call
    (default: all), the rest is held in a cache.

    With heads as wide as x, x (W_Q W_K^T) x^T needs half the projections of (x W_Q)(x W_K)^T:

    >>> contraction_orders(HeadSpec("wide", width=256, num_heads=8), batch=16, num_queries=256)
    {'factored': 25769803776, 'bilinear': 21743271936, 'absorbed': 17716740096}
    """
    num_keys = num_queries if num_keys is None else num_keys
    flops = lambda spec: call_flops(
        spec, batch, num_queries, num_keys, cross=cross, num_new=num_new
    )
    present = {
        "rotary": rotary,
        "qk_norm": bool(spec.qk_norm),
        "cap": logits_soft_cap is not None and "k" in spec.biases,
    }
    orders: dict[str, int | str] = {"factored": flops(spec)}
    spent, reason = 0, None
    for step in absorption(dataclasses.replace(spec, qk_norm=None)):
        spent += step.flops
        reason = reason or next((BROKEN[what] for what in step.breaks if present[what]), None)
        if rotary and step.spec.turned is None:
            reason = reason or f"rotary positions cannot turn the keys of {step.spec.layout!r}"
        orders[step.spec.layout] = reason or spent + flops(step.spec)
    return orders


BROKEN = {
    "rotary": "rotary positions stand between W_Q and W_K",
    "qk_norm": "qk_norm stands between W_Q and W_K",
    "cap": "a soft cap sees the key bias, which this order cancels",
}
"""What `Absorbed.breaks` names -> why."""


def explain_heads(
    spec: HeadSpec,
    x: Any,
    context: Any = None,
    *,
    order: str | None = None,
    rotary: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """What `multi_head_attention` would do: the order of contraction and the backend.

    Returns {"order": {order: FLOPs or reason}, "chosen": {"order": name}, "implementation": what
    `explain` says of the q, k and v that this order makes}. `options` are those of `explain`.
    x and context may be `jax.ShapeDtypeStruct`s.

    >>> x = jax.ShapeDtypeStruct((16, 256, 256), "float32")
    >>> explain_heads(HeadSpec("wide", width=256, num_heads=8), x)["chosen"]
    {'order': 'absorbed'}
    """
    orders = _orders(spec, x, context, rotary, options.get("logits_soft_cap"))
    steps = _steps(spec, orders, order)
    reached = steps[-1].spec if steps else spec
    w = {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, shape in reached.shapes.items()}
    q, k, v = jax.eval_shape(lambda w, x, y: project_heads(w, x, y, spec=reached), w, x, context)
    return {
        "order": orders,
        "chosen": {"order": reached.layout if steps else "factored"},
        "implementation": explain(q, k, v, **options),
    }


def _orders(
    spec: HeadSpec,
    x: Any,
    context: Any,
    rotary: bool,
    logits_soft_cap: float | None,
    memory: Held | None = None,
    cache: Cache | None = None,
) -> dict[str, int | str]:
    """`contraction_orders` of a call with these arrays: those that read what is held."""
    held = {n: a for n, a in (cache or memory or {}).items() if n != "length"}
    keys = x if context is None else context
    orders = contraction_orders(
        spec,
        x.shape[0],
        x.shape[1],
        max(a.shape[1] for a in held.values()) if held else keys.shape[1],
        cross=context is not None,
        num_new=None if not held else 0 if memory is not None else x.shape[1],
        rotary=rotary,
        logits_soft_cap=logits_soft_cap,
    )
    if not held:
        return orders
    what = "memory" if cache is None else "cache"
    reached = [spec, *(step.spec for step in absorption(dataclasses.replace(spec, qk_norm=None)))]
    for order, one in zip(orders, reached, strict=True):
        needs = LAYOUTS[one.layout].cache
        if set(needs) != set(held):
            orders[order] = (
                f"the {what} holds {', '.join(held)}, this order of contraction needs "
                f"{', '.join(needs)}; make it with init_cache(spec, ..., order=...) of this order"
            )
    return orders


def check_order(spec: HeadSpec, orders: dict[str, int | str], order: str) -> None:
    """Raises ValueError for an order that is none of `orders` (see `contraction_orders`), or that
    stands there with a reason.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> orders = contraction_orders(spec, 1, 5, rotary=True)
    >>> check_order(spec, orders, "bilinear")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: order 'bilinear' cannot run: rotary positions stand between W_Q and W_K; ...
    """
    cost = find(f"order of layout {spec.layout!r}", order, orders)
    if isinstance(cost, str):
        raise ValueError(f"order {order!r} cannot run: {cost}; use 'factored' or None")


def _steps(spec: HeadSpec, orders: dict[str, int | str], order: str | None) -> list[Absorbed]:
    """The steps to the order that was told, or to the one with the fewest FLOPs."""
    if order is None:
        costs = [(c, i, n) for i, (n, c) in enumerate(orders.items()) if isinstance(c, int)]
        order = min(costs)[2] if costs else "factored"
    check_order(spec, orders, order)
    return absorption(spec)[: list(orders).index(order)]


def _left(window: int | tuple[int, int] | None) -> int | None:
    return window[0] if isinstance(window, tuple) else window
