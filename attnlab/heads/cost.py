"""Parameters, FLOPs and cache bytes of one set of heads, and the form that costs least in a call.

FLOPs are those of matrix products in the forward pass, 2 for a multiply-add: every weight that is
applied, the scores, and the product with the values over all keys (a causal mask saves none here).
They equal the multiply-adds of the traced program, which the tests count.

A form is the same function with adjacent matrices multiplied out. The scores are a product of four
matrices, x W_Q W_K^T x^T, and the values of two, W_V W_O. `Layout.rewritten` multiplies one pair
out and so reaches another layout: narrow_tied -> narrow -> standard -> bilinear -> absorbed, and
latent -> latent_absorbed. Which form is cheapest depends on sizes alone. `multi_head_attention`
takes the cheapest of each call.
"""

import functools
import math
from collections.abc import Collection
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import Entries, Layout, Rewrite
from attnlab.heads.weights import Params
from attnlab.names import lookup

FACTORED = "factored"
"""The order of contraction that uses the weights as they are."""


def num_parameters(layout: Layout) -> int:
    """Parameters of one set of heads, biases included.

    >>> from attnlab.heads import Standard
    >>> num_parameters(Standard(width=512, num_heads=8)) == 4 * 512**2
    True
    """
    _check_layout("num_parameters", layout)
    return sum(map(math.prod, layout.shapes.values()))


def flops_per_token(layout: Layout, num_keys: int) -> int:
    """Forward FLOPs per token of self-attention over `num_keys` tokens.

    Args:
      layout: the heads.
      num_keys: T, tokens of the text; each attends to all T keys.

    >>> from attnlab.heads import Wide
    >>> flops_per_token(Wide(width=512, num_heads=8), 512)
    25165824
    """
    _check_layout("flops_per_token", layout)
    return call_flops(layout, 1, num_keys, num_keys) // num_keys


def call_flops(
    layout: Layout,
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    cross: bool = False,
    num_new: int | None = None,
) -> int:
    """Forward FLOPs of one call.

    A projection that makes queries and keys counts once for tokens that are both: the compiler
    makes one product of the two.

    Args:
      layout: the heads.
      batch, num_queries, num_keys: B, T, S.
      cross: keys are of another text than queries.
      num_new: so many of the keys are projected in this call (default: all); a cache holds the
        rest.

    >>> from attnlab.heads import Standard
    >>> layout = Standard(width=512, num_heads=8)
    >>> call_flops(layout, 1, 1, 100, num_new=1) == 2 * (4 * 512**2 + 8 * 100 * (64 + 64))
    True
    """
    of, new = layout.multiply_adds, num_keys if num_new is None else num_new
    more_keys = sum(extra.num_keys for extra in layout.extras)
    total = num_queries * (of["prepare"] + of["project_q"] + of["attend"] + of["project_out"])
    total += new * of["project_kv"] + num_keys * of["keys_values"]
    total += new * of["prepare"] if cross else -min(num_queries, new) * of["q and kv"]
    total += num_queries * (num_keys + more_keys) * of["score"]
    return 2 * batch * total


def cache_shapes(layout: Layout, *, rotary: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a cache keeps of a token.

    The shapes are without the axes [B, size] of the cache. With `rotary`, keys are rotated and
    differ from the values they are tied to.

    Args:
      layout: the heads.
      rotary: rotary positions are applied.

    >>> from attnlab.heads import Standard
    >>> cache_shapes(Standard(width=512, num_heads=8, num_kv_heads=1))
    {'k': (1, 64), 'v': (1, 64)}
    """
    return dict(_cache_shapes(layout, rotary))


@functools.cache
def _cache_shapes(layout: Layout, rotary: bool) -> dict[str, tuple[int, ...]]:
    """By tracing `project_kv`."""

    def trace(params: Params, y: Array, z: Array) -> Entries:
        y = layout.prepare(params, y)
        z = y if len(set(layout.input_widths)) == 1 else layout.prepare(params, z)
        return layout.project_kv(params, y, z, lambda a: a + 0 if rotary else a)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {name: array(shape) for name, shape in layout.shapes.items()}
    _, *widths = layout.input_widths
    entries = jax.eval_shape(trace, params, *(array((1, 1, width)) for width in widths))
    return {name: a.shape[2:] for name, a in entries.items()}


def cache_bytes_per_token(
    layout: Layout, bytes_per_number: int = 4, *, rotary: bool = False
) -> int:
    """What a cache keeps of a token, in bytes.

    Args:
      layout: the heads.
      bytes_per_number: 4 for float32, 2 for bfloat16.
      rotary: as in `cache_shapes`.

    >>> from attnlab.heads import Standard
    >>> cache_bytes_per_token(Standard(width=512, num_heads=8, num_kv_heads=1))
    512
    """
    shapes = cache_shapes(layout, rotary=rotary).values()
    return sum(map(math.prod, shapes)) * bytes_per_number


def _check_layout(function: str, layout: object) -> None:
    """Raises TypeError for the config of a model, which a function of the same name takes."""
    if not isinstance(layout, Layout):
        name = type(layout).__name__
        raise TypeError(f"heads.{function} takes a head layout, not {name}: see attnlab.{function}")


# Forms --------------------------------------------------------------------------------------------


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
    return lookup(MappingProxyType(known), order, what=f"order of layout {layout.name!r}")


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
        cost = call_flops(step.layout, *tokens, cross=sizes.cross, num_new=sizes.num_new)
        reason = "" if sizes.entries is None else _cannot_read(name, step.layout, sizes)
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
        reason = lookup(MappingProxyType(orders), order, what=f"order of layout {layout.name!r}")
        others = ", ".join(n for n, cost in orders.items() if not isinstance(cost, str)) or "none"
        raise ValueError(f"order {order!r} cannot run: {reason}; orders that can: {others}")
    return order, layout.chain[0][: list(orders).index(order)]


def _cannot_read(order: str, layout: Layout, sizes: CallSizes) -> str:
    """Why the layout of this order cannot read the entries that the call must read."""
    assert sizes.entries is not None
    needs, held = cache_shapes(layout, rotary=sizes.rotary).keys(), set(sizes.entries)
    # `kv` of a pair of inputs has more: what makes values. Other forms know it as "y" alone.
    # A cache is extended by what it holds.
    more = sizes.num_new == 0 and needs < held
    if needs == held or (more and (order == FACTORED or held - needs == {"y"})):
        return ""
    rotary = ", rotary=True" if sizes.rotary and layout.tie else ""
    return (
        f"the cache holds {', '.join(sorted(held))}; this form needs {', '.join(needs)}; "
        f"make the cache with init_cache(layout, ..., order={order!r}{rotary})"
    )
