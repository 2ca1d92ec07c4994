"""Which rows of a batch are read, and the datasets of windows of tokens and of shuffled rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from attnlab.data.dataset import Batch, Dataset

WORDS = {"train": "training", "heldout": "held-out", "validation": "validation"}
"""Part of a dataset -> its name for people."""


@runtime_checkable
class Stream(Protocol):
    """Tokens one after the other."""

    def __len__(self) -> int: ...

    def read(self, starts: np.ndarray, size: int) -> np.ndarray:
        """[W, size]: the tokens from each start on; zeros after the last token."""


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """A `Stream` in memory."""

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, starts: np.ndarray, size: int) -> np.ndarray:
        """[W, size]: the tokens from each start on; zeros after the last token."""
        index = starts[:, None] + np.arange(size)
        return np.where(index < len(self), self.tokens[np.minimum(index, len(self) - 1)], 0)


def windows(stream: Stream, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` evenly spaced windows [W, length + 1], which overlap in a short text; or with count 0
    the whole text once.

    The second array [W, length] is True where a target counts. In the whole text every token but
    the first is a target exactly once; the last window is filled up with zeros that do not count.

    >>> ten = TokenArray(np.arange(10))
    >>> windows(ten, 3, 2)[0].tolist(), windows(ten, 3, 0)[0].tolist()
    ([[0, 1, 2, 3], [6, 7, 8, 9]], [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]])
    """
    total = len(stream)
    starts = np.arange(0, total - 1, length)
    if count:
        starts = np.linspace(0, total - length - 1, count).astype(np.int64)
    valid = starts[:, None] + np.arange(1, length + 1) < total
    return stream.read(starts, length + 1), valid


def sample(
    stream: Stream, length: int, size: int, *, seed: int, step: int, shard: slice = slice(None)
) -> np.ndarray:
    """The rows `shard` of the batch of `step`: windows [of `size`, length + 1], drawn uniformly."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(stream) - length, size=size)
    return stream.read(starts[shard], length + 1)


def dataset_of_windows(
    parts: Mapping[str, Stream],
    length: int,
    where: str,
    token_bytes: Callable[[str, int, np.ndarray], Batch],
    segments: Callable[[np.ndarray], np.ndarray] | None = None,
    **fields: Any,
) -> Dataset:
    """Random windows of a text to train on, evenly spaced ones to score.

    Args:
      parts: "train", "heldout" and perhaps "validation" -> tokens.
      length: targets of a window.
      where: the text, for an error.
      token_bytes: (part, count, tokens of its windows) -> {"bytes": for how many bytes each target
        stands}, or nothing where each is one.
      segments: tokens [W, length + 1] -> the number of each token's document within its window.
      fields: further fields of the `Dataset`.

    Raises:
      ValueError: a part is shorter than one window.
    """
    for name, part in parts.items():
        if len(part) <= length:
            few = f"the {WORDS[name]} part has {len(part)} tokens; a window needs {length} + 1"
            raise ValueError(f"{where}: {few}; give a longer text or a smaller length")

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        rows = sample(parts["train"], length, size, seed=seed, step=step, shard=shard)
        return {"tokens": rows} | ({"segments": segments(rows)} if segments else {})

    def scored(name: str, count: int) -> Batch:
        tokens, valid = windows(parts[name], length, count)
        rows = {"tokens": tokens, "valid": valid, **token_bytes(name, count, tokens)}
        if segments:
            rows["segments"] = segments(tokens) * np.insert(valid, 0, True, axis=1)
        return rows

    fields |= {name: functools.partial(scored, name) for name in parts}
    return Dataset(row_tokens=length, batches=batch, **fields)


Rows: TypeAlias = tuple[int, Callable[[np.ndarray], Batch]]
"""A number of rows, and (their indices -> the rows)."""


def rows_of(arrays: Batch) -> Rows:
    """The rows of arrays in memory."""
    return len(next(iter(arrays.values()))), functools.partial(select_rows, arrays)


def dataset_of_rows(parts: Mapping[str, Rows], **fields: Any) -> Dataset:
    """Rows that are shuffled anew in every epoch to train on; those that are scored keep their
    order.

    Args:
      parts: "train", "heldout" and perhaps "validation" -> rows.
      fields: further fields of the `Dataset`.

    >>> from attnlab.data import DataSizes
    >>> few = rows_of({"tokens": np.arange(12, dtype=np.int32).reshape(4, 3)})
    >>> dataset = dataset_of_rows(
    ...     {"train": few, "heldout": few}, name="numbers", digest="1", sizes=DataSizes(12),
    ...     row_tokens=2,
    ... )
    >>> dataset.batches(0, 0, 2, slice(None))["tokens"].shape, dataset.heldout(1)["valid"].tolist()
    ((2, 3), [True])
    """

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        count, select = parts["train"]
        return select(epoch_indices(count, seed, step, size, shard))

    def scored(name: str, count: int) -> Batch:
        total, select = parts[name]
        index = evenly_spaced(total, count)
        return {"valid": np.ones(len(index), bool)} | select(index)

    fields |= {name: functools.partial(scored, name) for name in parts}
    return Dataset(batches=batch, **fields)


def epoch_indices(
    count: int, seed: int, step: int, size: int, shard: slice = slice(None)
) -> np.ndarray:
    """Indices of the rows of a batch, below `count`: every epoch holds each row once.

    The rows come in one permutation after the other, each a function of (seed, epoch). The batch of
    `step` is the rows step * size and on, so it may begin in one epoch and end in the next. (The
    first step of a training is 1: its first epoch lacks the rows of step 0.)

    >>> sorted(int(i) for step in range(3) for i in epoch_indices(6, seed=0, step=step, size=2))
    [0, 1, 2, 3, 4, 5]
    """
    positions = step * size + np.arange(size)[shard]
    pairs = zip(*divmod(positions, count), strict=True)
    return np.array([_permutation(count, seed, int(epoch))[i] for epoch, i in pairs])


@functools.lru_cache(maxsize=16)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """`count` indices below `total`, evenly spaced; all where `count` is 0 or at least `total`.

    >>> evenly_spaced(10, 4).tolist(), evenly_spaced(3, 0).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if not 0 < count < total:
        return np.arange(total)
    return np.linspace(0, total - 1, count).astype(np.int64)


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], length: int) -> np.ndarray:
    """[rows, length]: longer rows are truncated, shorter ones end with -1.

    >>> pad_rows([[5, 6], [7, 8, 9, 9]], 3).tolist()
    [[5, 6, -1], [7, 8, 9]]
    """
    padded = np.full((len(rows), length), -1, np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        row[: min(len(tokens), length)] = tokens[:length]
    return padded


def select_rows(rows: Batch, index: np.ndarray) -> Batch:
    """The rows of these indices."""
    return {name: a[index] for name, a in rows.items()}
