"""Finds the `Weight` of each parameter of a model's heads by its path in the tree of params."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array

from attnlab.heads import Layout, Weight, all_weights
from attnlab.models.config import ModelConfig
from attnlab.sharing import PyTree

HEAD_SUBLAYERS = ("attention", "kv", "cross")
"""Sublayers that hold weights of heads."""


class Leaf(NamedTuple):
    """One array of the parameters.

    Attributes:
      path: names from the root, such as ("layers", "attention", "q").
      array: with a leading axis of parameter groups, if it belongs to a stack of layers.
      layout, weight: of the heads that it is a weight of; None for other parameters, such as norms
        beside the heads, mixing coefficients and low-rank deltas.
    """

    path: tuple[str, ...]
    array: Array
    layout: Layout | None = None
    weight: Weight | None = None

    @property
    def num_axes(self) -> int:
        """Axes of the weight itself, without that of parameter groups."""
        return self.array.ndim - is_stack(self.path[0])

    @property
    def head_axis(self) -> int | None:
        """The axis that numbers heads, counted from the end.

        None if there is none, if all heads share one, and for matrices that mix heads.
        """
        if self.layout is None or self.weight is None:
            return None
        axes = self.weight.axes
        found = [i - len(axes) for i, axis in enumerate(axes) if axis in self.layout.head_axes]
        return found[0] if len(found) == 1 and self.array.shape[found[0]] > 1 else None


def leaves(config: ModelConfig, params: PyTree) -> list[Leaf]:
    """The arrays of params in the order of `jax.tree.leaves`, each with its `Weight`.

    >>> params = {"layers": {"attention": {"q": jax.numpy.zeros((2, 32, 4, 8))}}}
    >>> [(leaf.path, leaf.head_axis) for leaf in leaves(ModelConfig(width=32), params)]
    [(('layers', 'attention', 'q'), -2)]
    """
    layouts = head_layouts(config)
    weights = {layout: all_weights(layout) for layout in set(layouts.values())}
    made = []
    for keys, array in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = tuple(str(getattr(key, "key", key)) for key in keys)
        layout = layouts.get(path[:2]) if len(path) == 3 else None
        weight = None if layout is None else weights[layout].get(path[-1])
        made.append(Leaf(path, array, *((layout, weight) if weight else (None, None))))
    return made


def map_leaves(
    function: Callable[[Leaf], object], config: ModelConfig
) -> Callable[[PyTree], PyTree]:
    """params -> the tree of what `function` returns for each array."""

    def of(params: PyTree) -> PyTree:
        made = [function(leaf) for leaf in leaves(config, params)]
        return jax.tree.unflatten(jax.tree.structure(params), made)

    return of


def head_layouts(config: ModelConfig) -> dict[tuple[str, ...], Layout]:
    """(stack, sublayer) -> its heads.

    >>> sorted(head_layouts(ModelConfig(kind="encoder_decoder")))[:2]
    [('encoder_layers', 'attention'), ('encoder_layers', 'cross')]
    """
    layouts = {name: c.layout for name, c in config.stacks.items()}
    if config.encoder is not None:
        layouts["encoder_layers"] = config.encoder_layout
    return {(stack, name): heads for stack, heads in layouts.items() for name in HEAD_SUBLAYERS}


def is_stack(name: str) -> bool:
    """Whether parameters of this name are stacked, [G, ...]: those of layers.

    >>> [is_stack(name) for name in ("layers_0", "encoder_layers", "embedding")]
    [True, True, False]
    """
    return name in ("layers", "encoder_layers") or name.startswith("layers_")
