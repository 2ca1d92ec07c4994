"""The `Weight` of each parameter of a model's heads, by its path in the tree of params, and its
axes: of the matrix for an optimizer, and the one that tensor parallelism shards.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array

from attnlab.heads import Layout, Weight
from attnlab.models.config import ModelConfig
from attnlab.sharing import PyTree

MatrixAxes = tuple[int, int]
"""(number of axes that one output sums over, number of axes of the outputs), from the end. All axes
before them number separate matrices. (0, n) is a vector."""
HIDDEN_AXES = {"up": -1, "gate": -1, "up_bias": -1, "gate_bias": -1, "down": -2}
"""Weight of an FFN -> its axis of hidden units, from the end."""
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
    weights = {layout: layout.all_weights for layout in set(layouts.values())}
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


def matrix_axes(config: ModelConfig) -> Callable[[PyTree], PyTree]:
    """params -> the tree of `MatrixAxes` of every parameter.

    Axes before those of a matrix number separate matrices: parameter groups, experts, and heads
    that read a slice of x each. (0, n) is a vector of any shape, such as a bias. The axes of heads
    follow from `Weight`: q [G, D, N, H] is G matrices of D x NH, o [G, N, V, O] is G matrices of
    NV x O.

    >>> import jax
    >>> from attnlab.heads import Narrow
    >>> axes = matrix_axes(ModelConfig(heads=Narrow(num_heads=4)))
    >>> axes({"layers": {"attention": {"q": jax.numpy.zeros((2, 4, 16, 16))}}})
    {'layers': {'attention': {'q': (1, 1)}}}
    """
    return map_leaves(_axes, config)


def _axes(leaf: Leaf) -> MatrixAxes:
    size, weight = leaf.num_axes, leaf.weight
    if size < 2 or leaf.path[-1].endswith(("bias", "scale")):
        return 0, size
    if weight is not None:
        return (len(weight.in_axes), len(weight.out_axes)) if weight.in_axes else (0, size)
    if leaf.path[1:2] == ("ffn",):
        return 1, 1  # experts number separate matrices
    return size - 1, 1


def shard_axes(config: ModelConfig) -> Callable[[PyTree], PyTree]:
    """params -> the tree of sharded axes, from the end: heads, or hidden units; 0 is none.

    Each device computes its own heads and hidden units. Outputs are summed over devices after the
    output projection and after the FFN (Shoeybi et al. 2019, arXiv 1909.08053,
    section 3).

    >>> import jax
    >>> axes = shard_axes(ModelConfig(width=32))
    >>> axes({"layers": {"attention": {"q": jax.numpy.zeros((2, 32, 4, 8))}}})
    {'layers': {'attention': {'q': -2}}}
    """
    return map_leaves(_axis, config)


def _axis(leaf: Leaf) -> int:
    if leaf.path[1:2] == ("ffn",):
        return HIDDEN_AXES.get(leaf.path[-1], 0)
    return leaf.head_axis or 0
