"""Datasets `farthest` and `maxima`: generated vectors as inputs and as targets."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes, DeviceBatch
from attnlab.data.generated import generated_dataset
from attnlab.fields import Spec, bounded


def generate_farthest(key: Array, size: int, *, dimensions: int, points: int) -> DeviceBatch:
    """Points on a sphere, and for each of them the one that is farthest from it (Amsel, Yehudai and
    Bruna, ICLR 2025, arXiv 2407.16153).

    features [size, points, dimensions], uniform on the unit sphere; answers, of the same shape: of
    point i the point j with the least x_i . x_j; scored [size, points] is True everywhere.
    """
    x = jax.random.normal(key, (size, points, dimensions))
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    farthest = jnp.argmin(jnp.einsum("bid,bjd->bij", x, x), axis=-1)
    answers = jnp.take_along_axis(x, farthest[..., None], axis=1)
    return {"features": x, "answers": answers, "scored": jnp.ones((size, points), bool)}


def generate_maxima(key: Array, size: int, *, directions: Array, tokens: int) -> DeviceBatch:
    """D-retrieval (Yu et al., ICLR 2026, arXiv 2510.06662): y = sum_i max_t a_i . x_t.

    `directions` are a_i [D, d]. features [size, tokens + 1, d + 2]: `tokens` vectors x_t of
    standard normal numbers, then a query of zeros; the last two features are 1, 0 of x_t and 0, 1
    of the query, so that the length of x_t can be recovered after a norm. answers
    [size, tokens + 1, 1] is y at the query, which alone is scored [size, tokens + 1].

    >>> row = generate_maxima(jax.random.key(0), 1, directions=jnp.eye(2), tokens=3)
    >>> x = row["features"][0]
    >>> float(row["answers"][0, -1, 0] - x[:3, 0].max() - x[:3, 1].max()), x[3].tolist()
    (0.0, [0.0, 0.0, 0.0, 1.0])
    """
    x = jax.random.normal(key, (size, tokens, directions.shape[1]))
    y = jnp.sum(jnp.max(jnp.einsum("btd,id->bti", x, directions), axis=1), axis=-1)
    is_query = jnp.arange(tokens + 1) == tokens
    features = jnp.pad(x, [(0, 0), (0, 1), (0, 2)])
    features = features.at[..., -2].set(~is_query).at[..., -1].set(is_query)
    answers = jnp.zeros((size, tokens + 1, 1)).at[:, -1, 0].set(y)
    scored = jnp.broadcast_to(is_query, (size, tokens + 1))
    return {"features": features, "answers": answers, "scored": scored}


def _shapes(length: int, features: int, answers: int) -> BatchShapes:
    return {
        "features": jax.ShapeDtypeStruct((1, length, features), np.float32),
        "answers": jax.ShapeDtypeStruct((1, length, answers), np.float32),
        "scored": jax.ShapeDtypeStruct((1, length), bool),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Farthest(Spec, prefix="data."):
    """`generate_farthest`: which point is farthest from this one? `train.length` is the number of
    points. An answer has length 1 and mean 0, so the mean leaves all of its variance unexplained.

    Attributes:
      dimensions: of the space; the points lie on its unit sphere.
      heldout_rows: rows that are held out; as many others are scored as training rows.

    Raises:
      ValueError: fewer than 2 dimensions, or no held-out row.

    >>> {name: a.shape for name, a in Farthest(dimensions=3).shapes(5).items()}
    {'features': (1, 5, 3), 'answers': (1, 5, 3), 'scored': (1, 5)}
    """

    dimensions: int = bounded(16, least=2)
    heldout_rows: int = bounded(1024, least=1)

    def sizes(self) -> DataSizes:
        """As many features as answers."""
        return DataSizes(self.dimensions, self.dimensions)

    def shapes(self, length: int) -> BatchShapes:
        """Features and answers; raises ValueError for fewer than 3 points."""
        if length < 3:
            raise ValueError(
                f"{length} points have no farthest one; set train.length to at least 3"
            )
        return _shapes(length, self.dimensions, self.dimensions)

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Rows of `length` points; `folder` is not used.

        Raises:
          ValueError: fewer than 3 points.
        """
        self.shapes(length)

        def generate(key: Array, size: int) -> DeviceBatch:
            return generate_farthest(key, size, dimensions=self.dimensions, points=length)

        name = f"{length} points on a sphere in {self.dimensions} dimensions"
        return generated_dataset(self, length, name, generate, _farthest_baselines)


def _farthest_baselines(rows: Batch) -> Baselines:
    x, y = rows["features"], rows["answers"]
    # Minus the point itself, scaled so that the error is least.
    scale = np.sum(x * y) / np.sum(x * x)
    guesses = {"the mean": 0 * x, "minus the point": scale * x}
    return {
        "unexplained": {
            name: 100 * float(np.mean(np.sum((guess - y) ** 2, axis=-1)))
            for name, guess in guesses.items()
        }
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maxima(Spec, prefix="data."):
    """`generate_maxima`: the sum of the largest values along `directions` directions, which are
    drawn once, orthonormal, for all seeds. Answers are shifted and scaled to mean 0 and variance 1,
    so that the mean leaves 100 % of the variance unexplained. `train.length` is the number of
    vectors plus 1 for the query.

    Attributes:
      dimensions: numbers of a vector, d; a token has two more features.
      directions: D, at most `dimensions`.
      heldout_rows: rows that are held out; as many others are scored as training rows.

    Raises:
      ValueError: a number below 1, or more directions than dimensions.

    >>> {name: a.shape for name, a in Maxima(dimensions=3, directions=2).shapes(5).items()}
    {'features': (1, 5, 5), 'answers': (1, 5, 1), 'scored': (1, 5)}
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

    def shapes(self, length: int) -> BatchShapes:
        """Features and answers; raises ValueError for fewer than 2 vectors beside the query."""
        if length < 3:
            raise ValueError(
                f"train.length {length} leaves fewer than 2 vectors to choose from; raise it"
            )
        return _shapes(length, self.dimensions + 2, 1)

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Rows of `length` - 1 vectors and the query; `folder` is not used.

        Raises:
          ValueError: fewer than 2 vectors beside the query.
        """
        self.shapes(length)
        square = np.random.default_rng(0).normal(size=(self.dimensions, self.dimensions))
        directions = jnp.asarray(np.linalg.qr(square)[0][: self.directions], jnp.float32)

        def raw(key: Array, size: int) -> DeviceBatch:
            return generate_maxima(key, size, directions=directions, tokens=length - 1)

        sample = jax.jit(lambda: raw(jax.random.key(2), MOMENT_ROWS)["answers"][:, -1, 0])()
        mean, deviation = float(np.mean(sample)), float(np.std(sample))

        def generate(key: Array, size: int) -> DeviceBatch:
            rows = raw(key, size)
            scaled = (rows["answers"] - mean) / deviation
            return rows | {"answers": jnp.where(rows["scored"][..., None], scaled, 0)}

        name = f"the largest of {length - 1} numbers along {self.directions} directions"
        return generated_dataset(self, length, name, generate, _maxima_baselines)


MOMENT_ROWS = 8192
"""Rows that the mean and the variance of the answers are estimated from."""


def _maxima_baselines(rows: Batch) -> Baselines:
    return {"unexplained": {"the mean": 100 * float(np.mean(rows["answers"][:, -1] ** 2))}}
