"""A source whose rows are drawn on the device from a key."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from attnlab.training.sources.source import Batch, Source


def drawn_source(
    data: Any,
    length: int,
    name: str,
    draw: Callable[[Array, int], Batch],
    yardsticks: Callable[[Batch], dict[str, dict[str, float]]],
) -> Source:
    """The source of `data` with rows of `length` that `draw(key, size)` makes.

    `data.heldout_rows` rows of a key that no batch has are held out, as many others are scored as
    training rows. `yardsticks` is asked for those of the rows held out.
    """

    def rows(part: int, count: int) -> Batch:
        # A run folds a step into its key, here a number that no step is.
        key = jax.random.fold_in(jax.random.key(part), 2**31)
        found = jax.jit(lambda key: draw(key, data.heldout_rows))(key)
        found["valid"] = np.ones(data.heldout_rows, bool)
        return jax.tree.map(lambda a: np.asarray(a)[: count or None], found)

    told = f"{data} {length} jax {jax.__version__}"
    return Source(
        name=name,
        digest=hashlib.sha256(told.encode()).hexdigest(),
        sizes=data.sizes(),
        row_tokens=length,
        draw=lambda resident, key, size: draw(key, size),
        heldout=lambda count: rows(0, count),
        train=lambda count: rows(1, count),
        yardsticks=lambda: yardsticks(rows(0, 0)),
    )
