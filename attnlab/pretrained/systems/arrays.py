"""Functions shared by the readers of `from_variables`."""

import re
from typing import Any, TypeAlias

from attnlab.heads import Layout
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.tensors import Arrays
from attnlab.pretrained.weights import Entry

Built: TypeAlias = tuple[Layout | ModelConfig, list[Entry]]
"""A layout or a config, and the name table."""


def take(config: JSON, *needed: str, **defaults: Any) -> list[Any]:
    """The values of these words. Raises ValueError for one that is missing or unknown."""
    for name in needed:
        if name not in config:
            raise ValueError(f"config needs {name!r}; it has {sorted(config)}")
    for name in config:
        if name not in (*needed, *defaults):
            raise ValueError(f"config: {name!r} is unknown; known: {[*needed, *defaults]}")
    return [config[name] for name in needed] + [config.get(n, d) for n, d in defaults.items()]


def require(tensors: Arrays, *names: str) -> None:
    """Raises ValueError for a variable that is missing."""
    for name in names:
        if name not in tensors:
            raise ValueError(f"the variable {name!r} is missing")


def depth(tensors: Arrays, pattern: str) -> int:
    """Number of layers: 1 + the largest number that the group of `pattern` matches, 0 for none.

    >>> import numpy as np
    >>> depth({"layers.1.up": np.ones(1)}, r"layers\\.(\\d+)\\.")
    2
    """
    found = [re.match(pattern, name) for name in tensors]
    return 1 + max((int(one[1]) for one in found if one), default=-1)
