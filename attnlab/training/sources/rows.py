"""Rows that lie in the memory of the host: which of them a batch holds, and how they are padded."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


def drawn(count: int, seed: int, step: int, size: int, part: slice = slice(None)) -> np.ndarray:
    """The numbers of the rows of a batch, of `count`: every epoch holds each row once.

    The stream of rows is one permutation after the other, each a function of (seed, epoch); the
    batch of `step` is the rows step * size and on, so it may begin in one epoch and end in the
    next.

    >>> sorted(int(i) for step in range(3) for i in drawn(6, seed=0, step=step, size=2))
    [0, 1, 2, 3, 4, 5]
    """
    at = step * size + np.arange(size)[part]
    return np.array(
        [_order(count, seed, int(e))[i] for e, i in zip(*divmod(at, count), strict=True)]
    )


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def spaced(total: int, count: int) -> np.ndarray:
    """`count` numbers below `total`, evenly spaced; all where count is 0 or there are no more.

    >>> spaced(10, 4).tolist(), spaced(3, 0).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if not 0 < count < total:
        return np.arange(total)
    return np.linspace(0, total - 1, count).astype(np.int64)


def padded(rows: Sequence[Any], length: int) -> np.ndarray:
    """[rows, length], what is longer cut, -1 behind the end of a row.

    >>> padded([[5, 6], [7, 8, 9, 9]], 3).tolist()
    [[5, 6, -1], [7, 8, 9]]
    """
    found = np.full((len(rows), length), -1, np.int32)
    for row, tokens in zip(found, rows, strict=True):
        some = tokens[:length]
        row[: len(some)] = some
    return found
