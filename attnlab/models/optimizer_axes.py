"""The axes of each parameter that form a matrix, for optimizers of matrices such as Muon."""

from collections.abc import Callable

from attnlab.models.config import ModelConfig
from attnlab.models.head_weights import Leaf, map_leaves
from attnlab.sharing import PyTree

MatrixAxes = tuple[int, int]
"""(number of axes that one output sums over, number of axes of the outputs), from the end."""


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
        return (len(weight.reads), len(weight.makes)) if weight.reads else (0, size)
    if leaf.path[1:2] == ("ffn",):
        return 1, 1  # experts number separate matrices
    return size - 1, 1
