"""The axis of each parameter that tensor parallelism shards over devices."""

from collections.abc import Callable

from attnlab.models.config import ModelConfig
from attnlab.models.head_weights import Leaf, map_leaves
from attnlab.sharing import PyTree

HIDDEN_AXES = {"up": -1, "gate": -1, "up_bias": -1, "gate_bias": -1, "down": -2}
"""Weight of an FFN -> its axis of hidden units, from the end."""


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
