"""Which axis of each weight is cut between the devices that compute one layer together."""

from collections.abc import Callable
from typing import Any

import jax

from attnlab.model.alike import head_axes
from attnlab.model.config import ModelConfig

HIDDEN = {"up": -1, "gate": -1, "up_bias": -1, "gate_bias": -1, "down": -2}
"""The axis of the hidden units in the weights of an FFN, from the end."""


def split_axes(config: ModelConfig) -> Callable[[Any], Any]:
    """params -> the tree of axes, from the end: that of the heads (or of the keys they share), that
    of an FFN's hidden units; 0 = none, the weight is whole everywhere.

    Each device then computes its own heads and hidden units, and their outputs are summed over the
    devices, once behind the heads and once behind the FFN (Shoeybi et al. 2019, arXiv 1909.08053,
    section 3). For `training.shard.cuts`, which leaves whole what the devices do not divide.

    >>> weights = {"layers": {"attention": {"q": jax.numpy.zeros((2, 32, 4, 8))}}}
    >>> split_axes(ModelConfig(width=32, num_heads=4))(weights)
    {'layers': {'attention': {'q': -2}}}
    """

    def axes(params: Any) -> Any:
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        leaves = []
        for path, (name, _, head) in zip(paths, head_axes(config, params), strict=True):
            names = {str(getattr(key, "key", key)) for key in path}
            hidden = HIDDEN.get(name, 0) if "ffn" in names and "delta" not in names else 0
            leaves.append(head or hidden)
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    return axes
