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


def zero(a: ArrayLike, beside: ArrayLike) -> bool:
    """No more than rounding of numbers as large as those of `beside`."""
    largest = np.max(np.abs(np.asarray(beside)), initial=0)
    return bool(np.max(np.abs(np.asarray(a)), initial=0) <= ROUNDING * largest)


def truncated(a: Floats, rank: int) -> tuple[Floats, Floats, Floats]:
    """The nearest matrices of that rank as left [..., m, rank] and right [..., rank, n], evenly
    scaled, and all singular values (Eckart and Young 1936)."""
    u, values, vt = np.linalg.svd(a, full_matrices=False)
    root = np.sqrt(values[..., :rank])
    left, right = u[..., :rank] * root[..., None, :], root[..., None] * vt[..., :rank, :]
    spare = (0, rank - root.shape[-1])  # more columns than the matrix has
    first = [(0, 0)] * (a.ndim - 2)
    return (
        np.pad(left, [*first, (0, 0), spare]),
        np.pad(right, [*first, spare, (0, 0)]),
        values,
    )


def split(a: Floats, rank: int) -> tuple[Floats, Floats] | None:
    """[i, m, n] = left [i, m, rank] right [i, rank, n]; None where a rank is larger."""
    left, right, values = truncated(a, rank)
    beyond = values[:, rank:] > ROUNDING * values[:, :1]
    return None if np.any(beyond) else (left, right)


def rank_at_least(a: Floats, gap: float) -> int:
    """How many singular values are above `gap` times the largest."""
    values = np.linalg.svd(a, compute_uv=False)
    return int(np.sum(values > gap * values[0])) if values.size and values[0] > 0 else 0


def diagonalize(a: Floats, rank: int) -> tuple[Floats, Floats, Floats] | None:
    """a [N, m, n] = q [m, R] diag(mixing_n [R]) k [n, R]^T with one q and one k, for R = rank.

    All a_n map between one column space and one row space. There, quotients a_i a_j^-1 =
    q diag(mixing_i / mixing_j) q^-1 have the same eigenvectors q, which must be real (Harshman
    1970; De Lathauwer et al. 2004 on simultaneous diagonalization). None where that fails, which
    proves nothing: eigenvectors of nearly equal eigenvalues are lost in rounding.
    """
    count, m, n = a.shape
    columns, rows = a.swapaxes(0, 1).reshape(m, -1), a.reshape(-1, n)
    u, vt = np.linalg.svd(columns, full_matrices=False)[0], np.linalg.svd(rows)[2]
    size = max(rank_at_least(columns, ROUNDING), rank_at_least(rows, ROUNDING))
    if size > min(rank, m, n):
        return None
    u, vt = u[:, :size], vt[:size]
    core = u.T @ a @ vt.T
    one, two = np.einsum("iN,Nrs->irs", np.random.default_rng(0).normal(size=(2, count)), core)
    if size and np.linalg.cond(two) > 1e12:
        return None
    values, vectors = np.linalg.eig(np.linalg.solve(two.T, one.T).T) if size else (core, u.T @ u)
    # Rounding splits a double eigenvalue by the root of eps.
    if np.max(np.abs(np.imag(values)), initial=0) > 1e-7 * np.max(np.abs(values), initial=1e-300):
        return None
    q = np.where(np.imag(values) < 0, np.imag(vectors), np.real(vectors)) if size else vectors
    if size and np.linalg.cond(q) > 1e12:
        return None
    products = np.linalg.solve(q, core).swapaxes(0, 1)  # [R, N, R]: mixing_n,r k_r
    mixing, k, left_over = truncated(products, 1)
    if np.any(left_over[:, 1:] > 1e-9 * left_over[:, :1]):
        return None
    spare = [(0, 0), (0, rank - size)]
    return (
        np.pad(u @ q, spare),
        np.pad(mixing[:, :, 0].T, spare),
        np.pad((k[:, 0] @ vt).T, spare),
    )


def stacked_scores(w: Weights) -> Floats:
    """[A_n; b_n] of bilinear or absorbed weights: [N, D, E], or [N, D+1, E] with query biases."""
    rows = [w["qk"].swapaxes(0, 1)] + ([w["q_bias"][:, None]] if "q_bias" in w else [])
    return np.concatenate(rows, axis=1)


def stacked_values(w: Weights) -> Floats:
    """[W_V W_O; b W_O] of absorbed weights: [N, W, O], or [N, W+1, O] with value biases."""
    return np.concatenate([w["vo"]] + ([w["v_bias"][:, None]] if "v_bias" in w else []), axis=1)
