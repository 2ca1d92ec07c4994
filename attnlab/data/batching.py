"""Which rows of data in host memory a batch holds, and how rows are padded."""

import functools
from collections.abc import Sequence

import numpy as np

from attnlab.data.dataset import Batch


def epoch_indices(
    count: int, seed: int, step: int, size: int, shard: slice = slice(None)
) -> np.ndarray:
    """Indices of the rows of a batch, below `count`: every epoch holds each row once.

    The rows come in one permutation after the other, each a function of (seed, epoch). The batch of
    `step` is the rows step * size and on, so it may begin in one epoch and end in the next.

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


def window_starts(total: int, length: int, count: int) -> np.ndarray:
    """Where windows of `length` + 1 of `total` tokens start: `count` evenly spaced ones, or with
    count 0 those of which each token but the first is a target once.

    >>> window_starts(10, 3, 2).tolist(), window_starts(10, 4, 0).tolist()
    ([0, 6], [0, 4, 8])
    """
    if count:
        return np.linspace(0, total - length - 1, count).astype(np.int64)
    return np.arange(0, total - 1, length)


def random_starts(
    total: int, length: int, size: int, *, seed: int, step: int, shard: slice = slice(None)
) -> np.ndarray:
    """Where the windows of the rows `shard` of the batch of `step` start, drawn uniformly."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    return generator.integers(0, total - length, size=size)[shard]


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray], length: int) -> np.ndarray:
    """[rows, length]: longer rows are truncated, shorter ones end with -1.

    >>> pad_rows([[5, 6], [7, 8, 9, 9]], 3).tolist()
    [[5, 6, -1], [7, 8, 9]]
    """
    padded = np.full((len(rows), length), -1, np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        kept = tokens[:length]
        row[: len(kept)] = kept
    return padded


def select_rows(rows: Batch, index: np.ndarray) -> Batch:
    """The rows of these indices."""
    return {name: a[index] for name, a in rows.items()}


def scored_rows(rows: Batch, count: int) -> Batch:
    """`count` evenly spaced rows (0: all), with `valid`."""
    total = len(next(iter(rows.values())))
    index = evenly_spaced(total, count)
    return select_rows(rows, index) | {"valid": np.ones(len(index), bool)}
