"""The row `recall`: sequences drawn on the device, in which what was said must be found again."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.training.sources.drawn import drawn_source
from attnlab.training.sources.source import Batch, Sizes, Source


def draw_recall(
    key: Array, size: int, *, vocab_size: int, pairs: int, length: int, near: float = 0.01
) -> Batch:
    """Multi-query associative recall (Arora et al. 2023, section 3, arXiv 2312.04927).

    A row says `pairs` keys with a value behind each, then asks: every key stands once more, and
    what is to be predicted there is its value. tokens [size, length]; values [size, length], the
    value where a key is asked for, else -1.

    Keys are different tokens of 0 to vocab_size/2 - 1, values different ones of the rest. The
    questions stand at even places behind the pairs, place i = 1, 2, ... (from the pairs) with
    weight i^(near - 1): many soon, few late, as in the paper. All other places hold tokens of the
    second half, so that a key stands only where it is said or asked for.

    >>> rows = draw_recall(jax.random.key(0), 1, vocab_size=8, pairs=2, length=8)
    >>> rows["tokens"].tolist(), rows["values"].tolist()
    ([[0, 6, 2, 7, 0, 6, 2, 6]], [[-1, -1, -1, -1, 6, -1, 7, -1]])
    """
    keys_key, values_key, places_key, other_key = jax.random.split(key, 4)
    half, places = vocab_size // 2, length // 2 - pairs

    def choose(key: Array, count: int) -> Array:
        """[size, pairs] of range(count), no number twice in a row."""
        return jax.lax.top_k(jax.random.uniform(key, (size, count)), pairs)[1]

    said, told = choose(keys_key, half), half + choose(values_key, vocab_size - half)
    # The largest of log weight + Gumbel noise are a draw without replacement by these weights.
    weights = (near - 1) * jnp.log(jnp.arange(1.0, places + 1))
    noise = jax.random.gumbel(places_key, (size, places))
    asked = 2 * (pairs + jax.lax.top_k(weights + noise, pairs)[1])
    rows = jnp.arange(size)[:, None]
    tokens = jax.random.randint(other_key, (size, length), half, vocab_size, jnp.int32)
    tokens = tokens.at[:, : 2 * pairs].set(jnp.stack([said, told], axis=-1).reshape(size, -1))
    values = jnp.full((size, length), -1, jnp.int32).at[rows, asked].set(told)
    return {"tokens": tokens.at[rows, asked].set(said), "values": values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """`draw_recall`: which value stood behind this key?

    `heldout_rows` rows of a key that no batch has are held out, as many others are scored as
    training rows. Whoever guesses among the values that were said is right once in `pairs` times.
    """

    vocab_size: int = 8192
    pairs: int = 8
    heldout_rows: int = 1024

    def __post_init__(self):
        if self.vocab_size < 2 * self.pairs or self.pairs < 1 or self.heldout_rows < 1:
            raise ValueError(
                f"data.vocab_size {self.vocab_size} must be at least twice data.pairs "
                f"{self.pairs}, and both and data.heldout_rows {self.heldout_rows} at least 1"
            )

    def sizes(self) -> Sizes:
        """Keys and values."""
        return Sizes(self.vocab_size)

    def shapes(self, length: int) -> Batch:
        """Tokens and values; raises ValueError where pairs and questions do not fit."""
        if length < 4 * self.pairs or length % 2:
            raise ValueError(
                f"{self.pairs} pairs and their questions need an even train.length of at least "
                f"{4 * self.pairs}, not {length}"
            )
        row = jax.ShapeDtypeStruct((1, length), np.int32)
        return {"tokens": row, "values": row}

    def load(self, length: int, folder: Path | None = None) -> Source:
        """Rows of `length` tokens."""
        self.shapes(length)

        def draw(key: Array, size: int) -> Batch:
            return draw_recall(
                key, size, vocab_size=self.vocab_size, pairs=self.pairs, length=length
            )

        known = {
            "one of the values said": 100 / self.pairs,
            "any value": 100 / (self.vocab_size - self.vocab_size // 2),
        }
        name = f"{self.pairs} pairs in {length} tokens of {self.vocab_size}"
        return drawn_source(self, length, name, draw, lambda rows: {"accuracy": known})
