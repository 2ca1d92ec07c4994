"""Forms of a layout: the same function with adjacent matrices multiplied out.

The scores are a product of four matrices, x W_Q W_K^T x^T, and the values of two, W_V W_O.
`Layout.rewritten` multiplies one pair out and so reaches another layout that is the same function:
narrow_tied -> narrow -> standard -> bilinear -> absorbed, and latent -> latent_absorbed. Which form
is cheapest depends on sizes alone. `multi_head_attention` takes the cheapest of each call.
"""

from collections.abc import Collection
from typing import NamedTuple

from attnlab.heads.cost import cache_shapes
from attnlab.heads.layout import Layout, Rewrite
from attnlab.names import lookup

FACTORED = "factored"
"""The order of contraction that uses the weights as they are."""


class CallSizes(NamedTuple):
    """Sizes of a call of heads, by which its form is chosen.

    Attributes:
      batch, num_queries, num_keys: B, T, S.
      cross: keys are of another text than queries.
      num_new: keys that are projected in this call (None: all); a cache holds the rest.
      rotary: rotary positions are applied.
      shift_invariant: no option of the call sees a constant added to all scores of a query.
      entries: names of the cache entries that the call must read (None: any).

    >>> from attnlab.heads import Latent
    >>> step = CallSizes(batch=1, num_queries=1, num_keys=1000, num_new=1)  # of decoding
    >>> orders = contraction_orders(Latent(width=256, num_heads=8), step)
    >>> min(orders, key=orders.get)
    'latent_absorbed'
    """

    batch: int
    num_queries: int
    num_keys: int
    cross: bool = False
    num_new: int | None = None
    rotary: bool = False
    shift_invariant: bool = True
    entries: Collection[str] | None = None


def form(layout: Layout, order: str) -> Layout:
    """The layout that an order of contraction computes with.

    >>> from attnlab.heads import Wide
    >>> form(Wide(width=6, num_heads=2), "bilinear").name
    'bilinear'
    """
    known = {FACTORED: layout} | {step.layout.name: step.layout for step in layout.chain[0]}
    return lookup(known, order, what=f"order of layout {layout.name!r}")


def contraction_orders(layout: Layout, sizes: CallSizes) -> dict[str, int | str]:
    """Order -> forward FLOPs of the call, multiplying the weights out included; or why not.

    Args:
      layout: the heads.
      sizes: of the call.

    With heads as wide as x, x (W_Q W_K^T) x^T needs half the projections of (x W_Q)(x W_K)^T:

    >>> from attnlab.heads import Wide
    >>> sizes = CallSizes(batch=16, num_queries=256, num_keys=256)
    >>> contraction_orders(Wide(width=256, num_heads=8), sizes)
    {'factored': 25769803776, 'bilinear': 21743271936, 'absorbed': 17716740096}
    """
    tokens = sizes.batch, sizes.num_queries, sizes.num_keys
    orders: dict[str, int | str] = {}
    (steps, end), spent = layout.chain, 0
    for step in (Rewrite(layout, dict), *steps):
        name = step.layout.name if orders else FACTORED
        reason = step.blocked(rotary=sizes.rotary, shift_invariant=sizes.shift_invariant)
        if reason:
            return orders | {name: reason}
        spent += step.flops
        cost = step.layout.multiply_adds.flops(*tokens, cross=sizes.cross, num_new=sizes.num_new)
        reason = "" if sizes.entries is None else _cannot_read(step.layout, sizes)
        orders[name] = reason or spent + cost
    return orders | ({end.layout: end.reason} if end.layout else {})


def choose(layout: Layout, sizes: CallSizes, order: str | None) -> tuple[str, tuple[Rewrite, ...]]:
    """The requested order, or the one with the fewest FLOPs, and the steps to it.

    Raises:
      ValueError: an unknown order, or one that this call cannot take, with the reason.
    """
    orders = contraction_orders(layout, sizes)
    if order is None:
        costs = {name: cost for name, cost in orders.items() if isinstance(cost, int)}
        order = min(costs, key=costs.__getitem__, default=FACTORED)
    if isinstance(orders.get(order, ""), str):  # FLOPs may be symbolic, as in jax.export
        reason = lookup(orders, order, what=f"order of layout {layout.name!r}")
        raise ValueError(f"order {order!r} cannot run: {reason}; use 'factored' or None")
    return order, layout.chain[0][: list(orders).index(order)]


def _cannot_read(layout: Layout, sizes: CallSizes) -> str:
    """Why the layout cannot read the entries that the call must read."""
    assert sizes.entries is not None
    needs = cache_shapes(layout, rotary=sizes.rotary)
    if set(needs) == set(sizes.entries):
        return ""
    rotary = ", rotary=True" if sizes.rotary and layout.tie else ""
    return (
        f"the cache holds {', '.join(sorted(sizes.entries))}; this form needs {', '.join(needs)}; "
        f"make the cache with init_cache(layout, ..., order=...) of this order{rotary}"
    )
