"""Dataset `recall`: generated sequences of keys and values; each value must be found by its key."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes, DeviceBatch
from attnlab.data.generated import generated_dataset
from attnlab.fields import Spec, bounded


def generate_recall(
    key: Array, size: int, *, vocab_size: int, pairs: int, length: int, near: float = 0.01
) -> DeviceBatch:
    """Multi-query associative recall (Arora et al. 2023, section 3, arXiv 2312.04927).

    A row states `pairs` keys, each followed by its value, then queries every key once more; the
    target there is its value. tokens [size, length]; values [size, length], the value where a key
    is queried, else -1.

    Keys are different tokens of 0 to vocab_size/2 - 1, values different ones of the rest. The
    queries are at even positions after the pairs, position i = 1, 2, ... (from the pairs) with
    weight i^(near - 1): many soon, few late, as in the paper. All other positions hold tokens of
    the second half, so that a key appears only where it is stated or queried.

    >>> rows = generate_recall(jax.random.key(0), 1, vocab_size=8, pairs=2, length=8)
    >>> rows["tokens"].tolist(), rows["values"].tolist()
    ([[0, 6, 2, 7, 0, 6, 2, 6]], [[-1, -1, -1, -1, 6, -1, 7, -1]])
    """
    keys_key, values_key, positions_key, other_key = jax.random.split(key, 4)
    half, positions = vocab_size // 2, length // 2 - pairs

    def choose(key: Array, count: int) -> Array:
        """[size, pairs] of range(count), no number twice in a row."""
        return jax.lax.top_k(jax.random.uniform(key, (size, count)), pairs)[1]

    stated, answers = choose(keys_key, half), half + choose(values_key, vocab_size - half)
    # The largest of log weight + Gumbel noise are a draw without replacement by these weights.
    weights = (near - 1) * jnp.log(jnp.arange(1.0, positions + 1))
    noise = jax.random.gumbel(positions_key, (size, positions))
    queried = 2 * (pairs + jax.lax.top_k(weights + noise, pairs)[1])
    rows = jnp.arange(size)[:, None]
    tokens = jax.random.randint(other_key, (size, length), half, vocab_size, jnp.int32)
    stated_pairs = jnp.stack([stated, answers], axis=-1).reshape(size, -1)
    tokens = tokens.at[:, : 2 * pairs].set(stated_pairs)
    values = jnp.full((size, length), -1, jnp.int32).at[rows, queried].set(answers)
    return {"tokens": tokens.at[rows, queried].set(stated), "values": values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Spec, prefix="data."):
    """`generate_recall`: which value followed this key?

    Guessing among the stated values is right once in `pairs` times.

    Attributes:
      vocab_size: tokens; keys are of the first half, values of the second.
      pairs: keys and values of a row.
      heldout_rows: rows that are held out, of a key that no batch has; as many others are scored as
        training rows.

    Raises:
      ValueError: fewer than 2 tokens for each pair, no pair or no held-out row.

    >>> {name: a.shape for name, a in Recall(vocab_size=8, pairs=2).shapes(10).items()}
    {'tokens': (1, 10), 'values': (1, 10)}
    """

    vocab_size: int = 8192
    pairs: int = bounded(8, least=1)
    heldout_rows: int = bounded(1024, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size < 2 * self.pairs:
            raise ValueError(
                f"data.vocab_size {self.vocab_size} must be at least twice data.pairs {self.pairs}"
            )

    def sizes(self) -> DataSizes:
        """Keys and values."""
        return DataSizes(self.vocab_size)

    def shapes(self, length: int) -> BatchShapes:
        """Tokens and values; raises ValueError where pairs and queries do not fit."""
        if length < 4 * self.pairs or length % 2:
            raise ValueError(
                f"{self.pairs} pairs and their questions need an even train.length of at least "
                f"{4 * self.pairs}, not {length}"
            )
        row = jax.ShapeDtypeStruct((1, length), np.int32)
        return {"tokens": row, "values": row}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Rows of `length` tokens; `folder` is not used.

        Raises:
          ValueError: `length` is odd, or below 4 tokens for each pair.
        """
        self.shapes(length)

        def generate(key: Array, size: int) -> DeviceBatch:
            return generate_recall(
                key, size, vocab_size=self.vocab_size, pairs=self.pairs, length=length
            )

        name = f"{self.pairs} pairs in {length} tokens of {self.vocab_size}"
        return generated_dataset(self, length, name, generate, self._baselines)

    def _baselines(self, rows: Batch) -> Baselines:
        values = self.vocab_size - self.vocab_size // 2
        known = {"one of the values said": 100 / self.pairs, "any value": 100 / values}
        return {"accuracy": known}
