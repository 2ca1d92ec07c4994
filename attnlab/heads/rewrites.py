"""Forms of a layout: the same function with adjacent matrices multiplied out.

The scores are a product of four matrices, x W_Q W_K^T x^T, and the values of two, W_V W_O.
`Layout.rewritten` multiplies one pair out and so reaches another layout that is the same function:
narrow_tied -> narrow -> standard -> bilinear -> absorbed, and latent -> latent_absorbed. Which form
is cheapest depends on sizes alone. `multi_head_attention` takes the cheapest of each call.
"""

import dataclasses

from attnlab.heads.cost import cache_shapes, call_flops
from attnlab.heads.layout import Blocked, Layout, Rewrite
from attnlab.names import lookup

FACTORED = "factored"
"""The order of contraction that uses the weights as they are."""


def chain(
    layout: Layout, *, rotary: bool = False, shift_invariant: bool = True
) -> tuple[list[Rewrite], Blocked]:
    """The steps to every form of the layout, and why there is no further one.

    Args:
      layout: the heads.
      rotary, shift_invariant: as in `Layout.rewritten`.

    Returns:
      (steps in order, the reason why the chain ends).

    >>> from attnlab.heads import NarrowTied
    >>> [step.layout.name for step in chain(NarrowTied(width=6, num_heads=2))[0]]
    ['narrow', 'standard', 'bilinear', 'absorbed']
    """
    steps: list[Rewrite] = []
    while True:
        step = layout.rewritten(rotary=rotary, shift_invariant=shift_invariant)
        if isinstance(step, Blocked):
            return steps, step
        steps.append(step)
        layout = step.layout


def form(layout: Layout, order: str) -> Layout:
    """The layout that an order of contraction computes with.

    >>> from attnlab.heads import Wide
    >>> form(Wide(width=6, num_heads=2), "bilinear").name
    'bilinear'
    """
    steps, _ = chain(layout)
    known = {FACTORED: layout} | {step.layout.name: step.layout for step in steps}
    return lookup(known, order, what=f"order of layout {layout.name!r}")


@dataclasses.dataclass(frozen=True)
class CallSizes:
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
    entries: frozenset[str] | None = None

    def flops(self, layout: Layout) -> int:
        """Forward FLOPs of the call."""
        return call_flops(
            layout,
            self.batch,
            self.num_queries,
            self.num_keys,
            cross=self.cross,
            num_new=self.num_new,
        )

    def cannot_read(self, layout: Layout) -> str | None:
        """Why the layout cannot read the entries that the call must read."""
        if self.entries is None:
            return None
        needs = cache_shapes(layout, rotary=self.rotary)
        if set(needs) == self.entries:
            return None
        rotary = ", rotary=True" if self.rotary and getattr(layout, "tie", None) else ""
        return (
            f"the cache holds {', '.join(sorted(self.entries))}; this form needs "
            f"{', '.join(needs)}; make the cache with init_cache(layout, ..., order=...) of this "
            f"order{rotary}"
        )


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
    steps, blocked = chain(layout, rotary=sizes.rotary, shift_invariant=sizes.shift_invariant)
    orders: dict[str, int | str] = {FACTORED: sizes.cannot_read(layout) or sizes.flops(layout)}
    spent = 0
    for step in steps:
        spent += step.flops
        reason = sizes.cannot_read(step.layout)
        orders[step.layout.name] = reason or spent + sizes.flops(step.layout)
    if blocked.layout:
        orders[blocked.layout] = blocked.reason
    return orders


def choose(layout: Layout, sizes: CallSizes, order: str | None) -> tuple[str, list[Rewrite]]:
    """The requested order, or the one with the fewest FLOPs, and the steps to it.

    Raises:
      ValueError: an unknown order, or one that this call cannot take, with the reason.
    """
    orders = contraction_orders(layout, sizes)
    if order is None:
        costs = [(cost, i) for i, cost in enumerate(orders.values()) if isinstance(cost, int)]
        order = list(orders)[min(costs)[1]] if costs else FACTORED
    cost = lookup(orders, order, what=f"order of layout {layout.name!r}")
    if isinstance(cost, str):
        raise ValueError(f"order {order!r} cannot run: {cost}; use 'factored' or None")
    steps, _ = chain(layout, rotary=sizes.rotary, shift_invariant=sizes.shift_invariant)
    return order, steps[: list(orders).index(order)]
