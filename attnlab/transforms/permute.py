"""The same function with its heads in another order."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from attnlab.fields import as_count
from attnlab.heads import Alt, Layout, Params
from attnlab.heads.layout import check_params

ArrayT = TypeVar("ArrayT", Array, NDArray[np.float64])


def check_head_order(layout: Layout) -> None:
    """Raises ValueError where an extra does not treat all heads alike."""
    for extra in layout.extras:
        if extra.depends_on_head_order:
            raise ValueError(f"{extra.name} depends on the order of the heads; use a head mask")


def take_heads(
    w: Mapping[str, ArrayT], layout: Layout, order: Sequence[int], kv_order: Sequence[int]
) -> dict[str, ArrayT]:
    """Weights whose head n is head order[n] of `w`, and key/value head k its head kv_order[k]."""
    heads, kv_heads = np.array(order, int), np.array(kv_order, int)
    size, pair = layout.num_heads // layout.size("num_kv_heads"), "queries_per_key"
    if layout.num_score_maps != layout.num_heads and pair not in layout.head_axes:
        raise ValueError(f"{layout}: the order of its softmax distributions is not known")
    # Softmax distributions are ordered [key head, first or second, query head of this key head].
    per_head = layout.num_score_maps // layout.num_heads
    queries = heads.reshape(len(kv_heads), 1, -1) - size * kv_heads[:, None, None]
    firsts = size * (per_head * kv_heads[:, None] + np.arange(per_head))
    maps = firsts[..., None] + queries
    by_axis = {"num_heads": heads, "num_score_maps": maps.ravel(), "num_kv_heads": kv_heads}
    for extra in ("num_key_heads", "num_value_heads"):  # of extra keys: [key/value head, key]
        if per := layout.size(extra) // layout.size("num_kv_heads"):  # 0: all heads share one
            by_axis[extra] = (per * kv_heads[:, None] + np.arange(per)).ravel()
    weights, made = layout.all_weights, {}
    for name, a in w.items():
        axes = weights[name].axes
        if pair in axes:  # the last of the three axes of softmax distributions
            end = axes.index(pair) + 1
            front, back = a.shape[: end - 3], a.shape[end:]
            a = a.reshape(*front, layout.num_score_maps, *back).take(maps.ravel(), len(front))
            made[name] = a.reshape(*front, *maps.shape, *back)
            continue
        for i, axis in enumerate(axes):
            if axis in by_axis:
                a = a.take(by_axis[axis], i)
        made[name] = a
    return made


def permute_heads(params: Params, layout: Layout, order: Sequence[int]) -> dict[str, Array]:
    """The same function with its heads in another order: new head n is old head order[n].

    Args:
      params, layout: the heads. Matrices of talking heads move by rows and columns.
      order: each of 0..N-1 once. Heads that share keys and values must stay together.

    Raises:
      ValueError: `order` is no such list; or the position of a head matters: it reads its own slice
        of x (`narrow`, `narrow_tied`), is a slice of the output (`output_projection=False`), or
        counts for an extra (`MixtureOfHeads`).

    >>> import jax
    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> bool((permute_heads(params, layout, [1, 0])["q"][:, 0] == params["q"][:, 1]).all())
    True
    """
    check_params(params, layout)
    order, heads = [as_count("order", n) for n in order], layout.num_heads
    if sorted(order) != list(range(heads)):
        raise ValueError(f"order must hold each of 0..{heads - 1} once, not {order}")
    check_head_order(layout)
    sliced = any("slice_width" in weight.in_axes for weight in layout.all_weights.values())
    if (sliced and not isinstance(layout, Alt)) or not layout.output_projection:
        owned = "its slice of x" if layout.output_projection else "its slice of the output"
        raise ValueError(f"head n of {layout} is tied to {owned}; convert it first")
    size = heads // layout.size("num_kv_heads")
    if any(order[n] // size != order[n - n % size] // size for n in range(heads)):
        raise ValueError(
            f"order {order} splits heads that share keys and values; keep each {size} together"
        )
    return take_heads(params, layout, order, [n // size for n in order[::size]])
