"""Which axes of each weight are a matrix: for what looks at whole matrices, such as Muon."""

from collections.abc import Callable
from typing import Any

import jax

from attnlab.model.config import ModelConfig

VECTORS = ("bias", "scale", "norm")
"""Ends of the names of what is added or multiplied in."""


def weight_axes(config: ModelConfig) -> Callable[[Any], Any]:
    """params -> the tree of (axes that a matrix sums over, axes that it makes), from the end.

    The axes before them number matrices that are apart: the slots of a part, and the heads of a
    layout whose heads read their own chunk. (0, n) is a vector. Maps of heads are what their row of
    `LAYOUTS` says: q [G, D, N, H] is G matrices of D x N H, o [G, N, V, O] is G of N V x O.

    >>> from attnlab import ModelConfig
    >>> config = ModelConfig(layout="narrow")
    >>> weights = {"layers": {"attention": {"q": jax.numpy.zeros((2, 4, 16, 16))}}}
    >>> weight_axes(config)(weights)
    {'layers': {'attention': {'q': (1, 1)}}}
    """
    kinds = {name: c.heads.maps for name, c in config.stacks.items()}

    def of(path: Any, a: Any) -> tuple[int, int]:
        names = [str(getattr(key, "key", key)) for key in path]
        size = a.ndim - ("layers" in names[0])  # the first axis there numbers slots
        name, maps = names[-1], kinds.get(names[0]) or next(iter(kinds.values()))
        if size < 2 or name.endswith(VECTORS):
            return 0, size
        if name in maps and "ffn" not in names and "delta" not in names:
            one = maps[name]
            apart = one.axes != one.reads + one.makes
            return (len(one.reads), size - len(one.reads) - apart) if one.reads else (0, size)
        return size - 1, 1

    return lambda params: jax.tree_util.tree_map_with_path(of, params)
