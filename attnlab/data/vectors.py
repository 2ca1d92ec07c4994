"""Dataset `farthest`: generated vectors as inputs and as targets."""

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
        vectors = jax.ShapeDtypeStruct((1, length, self.dimensions), np.float32)
        scored = jax.ShapeDtypeStruct((1, length), bool)
        return {"features": vectors, "answers": vectors, "scored": scored}

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
