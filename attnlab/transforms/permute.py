"""The same function with its heads in another order."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from attnlab.heads import Alt, Layout, Params
from attnlab.transforms.dtypes import in_float64
from attnlab.transforms.forms import axes
from attnlab.transforms.measure import Floats, Weights

PER_HEAD = ("num_heads", "num_score_maps")


def take_heads(w: Weights, layout: Layout, order: Sequence[int]) -> dict[str, Floats]:
    """Weights whose head n is head order[n] of `w`; heads that share keys stay together."""
    groups = layout.size("num_kv_heads") if hasattr(layout, "num_kv_heads") else layout.num_heads
    size = layout.num_heads // groups
    key_heads = [n // size for n in order[::size]]
    made = {}
    for name, names in axes(layout).items():
        a = w[name]
        for i, axis in enumerate(names):
            if axis in PER_HEAD:
                a = np.take(a, order, i)
            elif axis == "num_kv_heads":
                a = np.take(a, key_heads, i)
        made[name] = a
    return made


def permute_heads(params: Params, layout: Layout, order: Sequence[int]) -> dict[str, Array]:
    """The same function with its heads in another order: new head n is old head order[n].

    Args:
      params, layout: the heads.
      order: each of 0..N-1 once. Heads that share keys and values must stay together.

    Raises:
      ValueError: where the place of a head means something: its slice of x (`narrow`,
        `narrow_tied`), or of the output (`output_projection=False`).

    >>> import jax
    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=6, num_heads=2)
    >>> params = init(jax.random.key(0), layout)
    >>> bool((permute_heads(params, layout, [1, 0])["q"][:, 0] == params["q"][:, 1]).all())
    True
    """
    heads = layout.num_heads
    if sorted(order) != list(range(heads)):
        raise ValueError(f"order must hold each of 0..{heads - 1} once, not {list(order)}")
    names = axes(layout)
    reads_slices = any("slice_width" in a for a in names.values()) and not isinstance(layout, Alt)
    if reads_slices or not layout.output_projection:
        part = "its slice of x" if layout.output_projection else "its slice of the output"
        raise ValueError(f"head n of {layout} is tied to {part}; convert it first")
    if any("num_kv_heads" in a for a in names.values()):
        size = heads // layout.size("num_kv_heads")
        if any(order[n] // size != order[n - n % size] // size for n in range(heads)):
            raise ValueError(
                f"order {list(order)} splits heads that share keys and values; keep each {size} "
                "neighbours together, or convert to num_kv_heads=num_heads first"
            )
    w, restore = in_float64(params, layout)
    return restore(take_heads(w, layout, order))
