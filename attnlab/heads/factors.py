"""Matrices of low rank as products, in NumPy float64: what inverses of `Layout.general` need."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]
"""Parameters in NumPy float64."""


def factor(a: Floats, rank: int, tolerance: float) -> tuple[Floats, Floats] | None:
    """[..., m, n] = left [..., m, rank] right [..., rank, n] by SVD; None where a rank is larger.

    Columns and rows beyond the rank are zero.

    Args:
      tolerance: singular values below this share of the largest are taken for rounding.

    >>> left, right = factor(np.ones((3, 4)), 2, 1e-12)
    >>> np.allclose(left @ right, 1), np.any(left[:, 1])
    (True, np.False_)
    """
    if not np.all(np.isfinite(a)):  # products of weights near the largest float
        return None
    u, values, vt = np.linalg.svd(a, full_matrices=False)
    counts = values > tolerance * values[..., :1]
    if np.any(counts[..., rank:]):
        return None
    root = np.sqrt(values * counts)[..., :rank]
    left, right = u[..., :rank] * root[..., None, :], root[..., None] * vt[..., :rank, :]
    spare = [(0, 0)] * (a.ndim - 2), (0, rank - root.shape[-1])
    left = np.pad(left, [*spare[0], (0, 0), spare[1]])
    return left, np.pad(right, [*spare[0], spare[1], (0, 0)])
