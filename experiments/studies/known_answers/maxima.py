"""Dataset `maxima` of `heads_or_depth.py`: generated vectors, and a sum of maxima."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.data.dataset import Baselines, Batch, DataSizes, DeviceBatch
from attnlab.data.synthetic import Generated
from attnlab.fields import bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maxima(Generated):
    """D-retrieval (Yu et al., ICLR 2026, arXiv 2510.06662): y = sum_i max_t a_i . x_t.

    a_i are `directions` directions, drawn once, orthonormal, for all seeds; x_t vectors of standard
    normal numbers, at the end a query of zeros, which alone is scored: `train.length` is their
    number plus 1. Two more features are 1, 0 of x_t and 0, 1 of the query, so that the length of
    x_t can be recovered after a norm. Answers are shifted and scaled to mean 0 and variance 1, so
    that the mean leaves 100 % of the variance unexplained.

    Attributes:
      dimensions: numbers of a vector, d; a token has two more features.
      directions: D, at most `dimensions`.
      heldout_rows: rows that are held out; as many others are scored as training rows.

    Raises:
      ValueError: a number below 1, or more directions than dimensions.
    """

    dimensions: int = bounded(4, least=1)
    directions: int = bounded(4, least=1)
    heldout_rows: int = bounded(1024, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions > self.dimensions:
            raise ValueError(
                f"{self.directions} orthonormal data.directions need as many data.dimensions, not "
                f"{self.dimensions}"
            )

    def sizes(self) -> DataSizes:
        """The features of a vector, two that mark the query, and one answer."""
        return DataSizes(self.dimensions + 2, 1)

    def name(self, length: int) -> str:
        """The sizes."""
        return f"the largest of {length - 1} numbers along {self.directions} directions"

    def generator(self, length: int) -> Callable[[Array, int], DeviceBatch]:
        """(key, size) -> features [size, length, d + 2], answers [size, length, 1], scored. Raises
        ValueError for fewer than 2 vectors."""
        if length < 3:
            raise ValueError(
                f"train.length {length} leaves fewer than 2 vectors to choose from; raise it"
            )
        square = np.random.default_rng(0).normal(size=(self.dimensions, self.dimensions))
        directions = jnp.asarray(np.linalg.qr(square)[0][: self.directions], jnp.float32)
        is_query = jnp.arange(length) == length - 1

        def vectors(key: Array, size: int) -> tuple[Array, Array]:
            x = jax.random.normal(key, (size, length - 1, self.dimensions))
            largest = jnp.max(jnp.einsum("btd,id->bti", x, directions), axis=1)
            return x, jnp.sum(largest, axis=-1)

        sample = jax.jit(lambda: vectors(jax.random.key(2), MOMENT_ROWS)[1])()
        mean, deviation = float(np.mean(sample)), float(np.std(sample))

        def generate(key: Array, size: int) -> DeviceBatch:
            x, y = vectors(key, size)
            features = jnp.pad(x, [(0, 0), (0, 1), (0, 2)])
            features = features.at[..., -2].set(~is_query).at[..., -1].set(is_query)
            answers = jnp.zeros((size, length, 1)).at[:, -1, 0].set((y - mean) / deviation)
            scored = jnp.broadcast_to(is_query, (size, length))
            return {"features": features, "answers": answers, "scored": scored}

        return generate

    def baselines(self, rows: Batch) -> Baselines:
        """The error of the mean."""
        return {"unexplained": {"the mean": 100 * float(np.mean(rows["answers"][:, -1] ** 2))}}


MOMENT_ROWS = 8192
"""Rows that the mean and the variance of the answers are estimated from."""
