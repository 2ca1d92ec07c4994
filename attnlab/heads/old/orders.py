"""Orders of contraction: which of the rows that are one function a call of heads goes through."""

from typing import Any

from attnlab.heads.old.absorb import Absorbed
from attnlab.heads.old.cost import cache_shapes, call_flops
from attnlab.heads.old.spec import HeadSpec, absorption, bare
from attnlab.names import find
from attnlab.observe import OF_ORDER, Given


def contraction_orders(
    spec: HeadSpec,
    batch: int,
    num_queries: int,
    num_keys: int | None = None,
    *,
    cross: bool = False,
    num_new: int | None = None,
    num_source: int = 0,
    rotary: bool = False,
    logits_soft_cap: float | None = None,
) -> dict[str, int | str]:
    """order -> FLOPs of one forward call, what multiplying the weights out costs included; or the
    reason why the call cannot take that order. `num_new` of the keys are made in this call
    (default: all), the rest is held in a cache; `num_source` of a second text stand beside them.

    With heads as wide as x, x (W_Q W_K^T) x^T needs half the projections of (x W_Q)(x W_K)^T:

    >>> contraction_orders(HeadSpec("wide", width=256, num_heads=8), batch=16, num_queries=256)
    {'factored': 25769803776, 'bilinear': 21743271936, 'absorbed': 17716740096}
    """
    num_keys = num_queries if num_keys is None else num_keys
    options: dict[str, Any] = dict(cross=cross, num_new=num_new, num_source=num_source)
    flops = lambda spec: call_flops(spec, batch, num_queries, num_keys, **options)
    present = {
        "rotary": rotary,
        "qk_norm": bool(spec.qk_norm),
        "cap": bool(logits_soft_cap is not None or spec.sink) and spec.tied["k"] in spec.biases,
        "gate": spec.gate == "element",
        "extra": bool(spec.extra_keys),
    }
    orders: dict[str, int | str] = {"factored": flops(spec)}
    spent, reason = 0, None
    for step in absorption(bare(spec)):
        spent += step.flops
        reason = reason or next((BROKEN[what] for what in step.breaks if present[what]), None)
        if rotary and step.spec.turned is None:
            reason = reason or f"rotary positions cannot turn the keys of {step.spec.layout!r}"
        orders[step.spec.layout] = reason or spent + flops(step.spec)
    return orders


BROKEN = {
    "rotary": "rotary positions stand between W_Q and W_K",
    "qk_norm": "qk_norm stands between W_Q and W_K",
    "cap": "a soft cap or a sink sees the key bias, which this order cancels",
    "extra": "extra_keys are in the basis that W_Q and W_K share",
    "gate": "a gate per element stands between W_V and W_O",
}
"""What `Absorbed.breaks` names -> why."""


def orders_of(
    spec: HeadSpec, x: Any, context: Any, given: Given, logits_soft_cap: float | None
) -> dict[str, int | str]:
    """`contraction_orders` of a call with these arrays: those that read what is held, and have
    what is edited."""
    held = {n: a for n, a in (given.cache or given.memory or {}).items() if n != "length"}
    keys = x if context is None else context
    orders = contraction_orders(
        spec,
        x.shape[0],
        x.shape[1],
        max(a.shape[1] for a in held.values()) if held else keys.shape[1],
        cross=context is not None,
        num_new=None if not held else 0 if given.memory is not None else x.shape[1],
        num_source=0 if given.source is None else given.source.shape[1],
        rotary=given.rotary is not None,
        logits_soft_cap=logits_soft_cap,
    )
    what = "memory" if given.cache is None else "cache"
    reached = [spec, *(step.spec for step in absorption(bare(spec)))]
    for order, one in zip(orders, reached, strict=True):
        needs = cache_shapes(one, given.rotary is not None)
        if held and set(needs) != set(held):
            orders[order] = (
                f"the {what} holds {', '.join(held)}, this order of contraction needs "
                f"{', '.join(needs)}; make it with init_cache(spec, ..., order=...) of this order"
                + ", rotary=True"
                * (one.ties != "" and given.rotary is not None)
            )
    if apart := [n for n in OF_ORDER if n in (given.edit or {})]:
        reason = f"its {' and '.join(apart)} are not those to edit"
        orders |= {n: reason for n in orders if n != "factored"}
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


def steps_to(spec: HeadSpec, orders: dict[str, int | str], order: str | None) -> list[Absorbed]:
    """The steps to the order that was told, or to the one with the fewest FLOPs."""
    if order is None:
        costs = [(c, i, n) for i, (n, c) in enumerate(orders.items()) if isinstance(c, int)]
        order = min(costs)[2] if costs else "factored"
    check_order(spec, orders, order)
    return absorption(spec)[: list(orders).index(order)]
