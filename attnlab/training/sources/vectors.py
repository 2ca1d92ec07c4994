"""Rows of vectors in the place of words, with vectors for an answer: drawn on the device."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.training.sources.drawn import drawn_source
from attnlab.training.sources.source import Batch, Sizes, Source


def draw_farthest(key: Array, size: int, *, dimensions: int, points: int) -> Batch:
    """Points on a sphere, and for each of them the one that is farthest from it (Amsel, Yehudai and
    Bruna, ICLR 2025, arXiv 2407.16153).

    features [size, points, dimensions], evenly on the unit sphere; answers, of the same shape: of
    point i the point j with the least x_i . x_j; every point is `asked` for.
    """
    x = jax.random.normal(key, (size, points, dimensions))
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    farthest = jnp.argmin(jnp.einsum("bid,bjd->bij", x, x), axis=-1)
    answers = jnp.take_along_axis(x, farthest[..., None], axis=1)
    return {"features": x, "answers": answers, "asked": jnp.ones((size, points), bool)}


def draw_maxima(key: Array, size: int, *, directions: Any, tokens: int) -> Batch:
    """D-retrieval (Yu et al., ICLR 2026, arXiv 2510.06662): y = sum_i max_t a_i . x_t.

    `directions` are a_i [D, d]. features [size, tokens + 1, d + 2]: `tokens` vectors x_t of
    standard normal numbers, then the one that asks, zeros in their place; the last two features are
    1, 0 of what is read and 0, 1 of what asks, so that a norm of x_t leaves its length to be seen.
    answers [size, tokens + 1, 1] is y where alone it is `asked` for.

    >>> row = draw_maxima(jax.random.key(0), 1, directions=jnp.eye(2), tokens=3)
    >>> x = row["features"][0]
    >>> float(row["answers"][0, -1, 0] - x[:3, 0].max() - x[:3, 1].max()), x[3].tolist()
    (0.0, [0.0, 0.0, 0.0, 1.0])
    """
    x = jax.random.normal(key, (size, tokens, directions.shape[1]))
    y = jnp.sum(jnp.max(jnp.einsum("btd,id->bti", x, directions), axis=1), axis=-1)
    asks = jnp.arange(tokens + 1) == tokens
    features = jnp.pad(x, [(0, 0), (0, 1), (0, 2)])
    features = features.at[..., -2].set(~asks).at[..., -1].set(asks)
    answers = jnp.zeros((size, tokens + 1, 1)).at[:, -1, 0].set(y)
    asked = jnp.broadcast_to(asks, (size, tokens + 1))
    return {"features": features, "answers": answers, "asked": asked}


def _check(**counts: tuple[int, int]) -> None:
    for field, (value, least) in counts.items():
        if value < least:
            raise ValueError(f"data.{field} must be at least {least}, not {value}")


def _row(length: int, features: int, answers: int) -> Batch:
    shaped = lambda size: jax.ShapeDtypeStruct((1, length, size), np.float32)
    asked = jax.ShapeDtypeStruct((1, length), bool)
    return {"features": shaped(features), "answers": shaped(answers), "asked": asked}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Farthest:
    """`draw_farthest`: which point is farthest from this one? `train.length` is the number of
    points. An answer has length 1 and mean 0, so the mean leaves all of its variance unexplained.
    """

    dimensions: int = 16
    heldout_rows: int = 1024

    def __post_init__(self):
        _check(dimensions=(self.dimensions, 2), heldout_rows=(self.heldout_rows, 1))

    def sizes(self) -> Sizes:
        """As many features as answers."""
        return Sizes(self.dimensions, self.dimensions)

    def shapes(self, length: int) -> Batch:
        """Features and answers; raises ValueError for fewer than 3 points."""
        if length < 3:
            raise ValueError(f"of {length} points no other is farthest; raise train.length to 3")
        return _row(length, self.dimensions, self.dimensions)

    def load(self, length: int, folder: Path | None = None) -> Source:
        """Rows of `length` points."""
        self.shapes(length)

        def yardsticks(rows: Batch) -> dict[str, dict[str, float]]:
            x, y = rows["features"], rows["answers"]
            error = lambda guess: 100 * float(np.mean(np.sum((guess - y) ** 2, axis=-1)))
            # The point itself, as far the other way as is best.
            scale = np.sum(x * y) / np.sum(x * x)
            known = {"the mean": error(0 * x), "minus the point": error(scale * x)}
            return {"unexplained": known}

        return drawn_source(
            self,
            length,
            f"{length} points on a sphere in {self.dimensions} dimensions",
            lambda key, size: draw_farthest(key, size, dimensions=self.dimensions, points=length),
            yardsticks,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Maxima:
    """`draw_maxima`: the sum of the largest values along `directions` directions, which are drawn
    once, orthonormal, for all seeds. Answers are shifted and scaled to mean 0 and variance 1, so
    that the mean leaves 100 % of the variance unexplained. `train.length` is the number of vectors
    and one, which asks.
    """

    dimensions: int = 4
    directions: int = 4
    heldout_rows: int = 1024

    def __post_init__(self):
        _check(
            dimensions=(self.dimensions, 1),
            directions=(self.directions, 1),
            heldout_rows=(self.heldout_rows, 1),
        )
        if self.directions > self.dimensions:
            raise ValueError(
                f"{self.directions} orthonormal data.directions need as many data.dimensions, not "
                f"{self.dimensions}"
            )

    def sizes(self) -> Sizes:
        """The features of a vector, two that say which asks, and one answer."""
        return Sizes(self.dimensions + 2, 1)

    def shapes(self, length: int) -> Batch:
        """Features and answers; raises ValueError for fewer than 2 vectors beside the question."""
        if length < 3:
            raise ValueError(f"train.length {length} leaves no 2 vectors to choose from; raise it")
        return _row(length, self.dimensions + 2, 1)

    def load(self, length: int, folder: Path | None = None) -> Source:
        """Rows of `length` - 1 vectors and the question."""
        self.shapes(length)
        square = np.random.default_rng(0).normal(size=(self.dimensions, self.dimensions))
        directions = jnp.asarray(np.linalg.qr(square)[0][: self.directions], jnp.float32)
        plain = lambda key, size: draw_maxima(key, size, directions=directions, tokens=length - 1)
        many = jax.jit(lambda: plain(jax.random.key(2), MANY)["answers"][:, -1, 0])()
        mean, deviation = float(np.mean(many)), float(np.std(many))

        def draw(key: Array, size: int) -> Batch:
            found = plain(key, size)
            scaled = (found["answers"] - mean) / deviation
            return found | {"answers": jnp.where(found["asked"][..., None], scaled, 0)}

        return drawn_source(
            self,
            length,
            f"the largest of {length - 1} numbers along {self.directions} directions",
            draw,
            lambda rows: {
                "unexplained": {"the mean": 100 * float(np.mean(rows["answers"][:, -1] ** 2))}
            },
        )


MANY = 8192
"""Rows that the mean and the variance of the answers are taken from."""
