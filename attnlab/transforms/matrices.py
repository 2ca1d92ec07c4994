"""Factorizations of stacked matrices, in NumPy float64: which structure do weights have?"""

import numpy as np
from numpy.typing import ArrayLike

from attnlab.transforms.measure import Floats, Weights

ROUNDING = 1e-12
"""Relative to the largest number: what is smaller is taken for rounding. A wrong guess does no
harm: it shows in the measured conversion error."""


def same(a: ArrayLike, b: ArrayLike) -> bool:
    """Equal up to rounding, relative to the largest value."""
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.max(np.abs(a - b), initial=0) <= ROUNDING * np.max(np.abs(a), initial=0))


def split(a: Floats, rank: int) -> tuple[Floats, Floats] | None:
    """[i, m, n] = left [i, m, rank] right [i, rank, n], zeros beyond its rank; None where a rank is
    larger."""
    u, values, vt = np.linalg.svd(a, full_matrices=False)
    counts = values > ROUNDING * values[:, :1]
    if np.any(counts[:, rank:]):
        return None
    root = np.sqrt(values * counts)[:, :rank]
    left, right = u[..., :rank] * root[:, None], root[..., None] * vt[:, :rank]
    spare = (0, rank - root.shape[1])  # more columns than the matrix has
    return np.pad(left, [(0, 0), (0, 0), spare]), np.pad(right, [(0, 0), spare, (0, 0)])


def stacked_scores(w: Weights) -> Floats:
    """[A_n; b_n] of bilinear or absorbed weights: [N, D, E], or [N, D+1, E] with query biases."""
    rows = [w["qk"].swapaxes(0, 1)] + ([w["q_bias"][:, None]] if "q_bias" in w else [])
    return np.concatenate(rows, axis=1)


def stacked_values(w: Weights) -> Floats:
    """[W_V W_O; b W_O] of absorbed weights: [N, W, O], or [N, W+1, O] with value biases."""
    return np.concatenate([w["vo"]] + ([w["v_bias"][:, None]] if "v_bias" in w else []), axis=1)
