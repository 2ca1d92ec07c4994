"""Documents packed into windows: as little padding as they allow, and which token is of which."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from attnlab.data.batching import Rows
from attnlab.data.dataset import Batch


def packed_rows(arrays: Batch, ends: np.ndarray, length: int) -> Rows:
    """Windows of `length` + 1 tokens, each of whole documents; `segments` numbers them 1, 2, ...
    within a window and is 0 at its end, where nothing fits.

    A document of more than `length` + 1 tokens becomes pieces, of which each but the first begins
    with the last token of the one before: so every token but the first of a document is a target
    once. A document of one token has no target and is left out.

    Args:
      arrays: "tokens" [N], and perhaps "bytes" [N], for how many each stands.
      ends: where each document ends, ascending; the last one is N.
      length: targets of a window.

    >>> count, select = packed_rows({"tokens": np.arange(9)}, np.array([2, 6, 9]), length=4)
    >>> rows = select(np.arange(count))
    >>> rows["tokens"].tolist(), rows["segments"].tolist()
    ([[2, 3, 4, 5, 0], [6, 7, 8, 0, 1]], [[1, 1, 1, 1, 0], [1, 1, 1, 2, 2]])
    """
    pieces = [
        (first, min(end - first, length + 1))
        for start, end in itertools.pairwise([0, *ends.tolist()])
        for first in range(start, end - 1, length)
    ]
    packed = pack([size for _, size in pieces], length + 1)

    def select(index: np.ndarray) -> Batch:
        rows = {n: np.zeros((len(index), length + 1), a.dtype) for n, a in arrays.items()}
        segments = np.zeros((len(index), length + 1), np.int32)
        for row, window in enumerate(index.tolist()):
            at = 0
            for number, piece in enumerate(packed[window], 1):
                start, size = pieces[piece]
                segments[row, at : at + size] = number
                for name, a in arrays.items():
                    rows[name][row, at : at + size] = a[start : start + size]
                at += size
        if "bytes" in rows:
            rows["bytes"] = rows["bytes"][:, 1:].astype(np.float32)
        return rows | {"segments": segments}

    return len(packed), select


def pack(sizes: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """The items of each window: best-fit decreasing (Ding et al. 2024, arXiv 2404.10830, section
    3), so that the largest item that is left goes where the least space remains.

    Args:
      sizes: of the items, at most `capacity` each.
      capacity: of a window.

    >>> pack([3, 5, 2, 4], capacity=7)
    [[1, 2], [3, 0]]
    """
    sizes = np.asarray(sizes)
    windows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space that is left, window), ascending
    for item in np.argsort(-sizes, kind="stable").tolist():
        size, left = int(sizes[item]), capacity
        if (at := bisect.bisect_left(spaces, (size, 0))) < len(spaces):
            left, window = spaces.pop(at)
        else:
            window = len(windows)
            windows.append([])
        windows[window].append(item)
        if left > size:
            bisect.insort(spaces, (left - size, window))
    return windows


def segments_until(tokens: np.ndarray, end: int) -> np.ndarray:
    """The number of each token's document within its window, 1, 2, ...: the token `end` is the last
    one of a document.

    >>> segments_until(np.array([[5, 0, 6, 7, 0, 8]]), end=0).tolist()
    [[1, 1, 2, 2, 2, 3]]
    """
    is_end = tokens == end
    return np.asarray(1 + np.cumsum(is_end, axis=1) - is_end, np.int32)
