"""Matrices as products of smaller ones, in NumPy float64: what decides whether a map is exact."""

import numpy as np

from attnlab.heads.old.maps import Weights


class Refused(Exception):
    """These weights lack the structure that a map needs: what is missing, and by how much."""

    def __init__(self, message: str, amount: float = 0.0):
        super().__init__(message)
        self.amount = amount


def tolerance(*shape: int) -> float:
    """Of rounding, relative to the largest value: max(shape) eps as in `numpy.linalg.matrix_rank`,
    and 64 eps at least: weights that were multiplied out carry the rounding of that.
    """
    return max(64, *shape) * float(np.finfo(np.float64).eps)


def numerical_rank(values: np.ndarray, *shape: int) -> int:
    """How many of a matrix's singular values are not rounding."""
    return int(np.sum(values > tolerance(*shape) * np.max(values, initial=0)))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal up to rounding, relative to the largest value."""
    largest = np.max(np.abs(a), initial=0)
    return bool(np.max(np.abs(a - b), initial=0) <= tolerance(*a.shape) * largest)


def truncated(a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest matrices of that rank as left [..., m, rank] and right [..., rank, n], evenly
    scaled, and all singular values.
    """
    u, values, vt = np.linalg.svd(a, full_matrices=False)
    root = np.sqrt(values[..., :rank])
    left, right = u[..., :rank] * root[..., None, :], root[..., None] * vt[..., :rank, :]
    spare = [(0, rank - root.shape[-1])]  # more columns than the matrix has
    first = [(0, 0)] * (a.ndim - 2)
    return np.pad(left, [*first, (0, 0), *spare]), np.pad(right, [*first, *spare, (0, 0)]), values


def split(a: np.ndarray, rank: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """[i, m, n] = left [i, m, rank] right [i, rank, n].

    Raises Refused where a numerical rank is larger.
    """
    left, right, values = truncated(a, rank)
    beyond = values[:, rank:] / np.maximum(values[:, :1], 1e-300)
    if np.any(beyond > tolerance(*a.shape[1:])):
        worst = int(np.argmax(np.max(beyond, axis=1)))
        one = values[worst]
        raise Refused(
            f"{what} {worst} has rank {numerical_rank(one, *a.shape[1:])}, beyond {rank}: its "
            f"singular value {rank + 1} is {one[rank]:.2g}, its largest {one[0]:.2g}"
        )
    return left, right


def diagonalised(a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a [N, m, n] = q [m, R] diag(mix_n [R]) k [n, R]^T with one q and one k, for R = rank.

    All a_n live between one column space and one row space. There, quotients a_i a_j^-1 =
    q diag(mix_i / mix_j) q^-1 have the same eigenvectors q, and they must be real (Harshman 1970;
    De Lathauwer et al. 2004 on simultaneous diagonalisation). Raises Refused where they are not,
    or where the spaces are larger than `rank`: for those of dimension `rank` that is a proof.
    """
    count, m, n = a.shape
    columns, rows = a.swapaxes(0, 1).reshape(m, -1), a.reshape(-1, n)
    u, left, _ = np.linalg.svd(columns, full_matrices=False)
    _, right, vt = np.linalg.svd(rows, full_matrices=False)
    sizes = numerical_rank(left, *columns.shape), numerical_rank(right, *rows.shape)
    size = max(sizes)
    if size > rank:
        raise Refused(f"the score matrices side by side have rank {size}, beyond {rank}")
    u, vt = u[:, :size], vt[:size]
    core = u.T @ a @ vt.T
    one, two = np.einsum("iN,Nrs->irs", np.random.default_rng(0).normal(size=(2, count)), core)
    if size and np.linalg.cond(two) > 1e12:
        raise Refused(
            f"column and row spaces of dimensions {sizes[0]} and {sizes[1]} without an invertible "
            "sum of the score matrices: eigenvectors do not tell"
        )
    values, q = np.linalg.eig(np.linalg.solve(two.T, one.T).T) if size else (np.zeros(0), u.T @ u)
    largest = np.max(np.abs(values), initial=1e-300)
    imaginary = np.max(np.abs(np.imag(values)), initial=0) / largest
    # Rounding splits a double eigenvalue by the root of eps.
    if imaginary > 1e-7:
        raise Refused(
            f"no {rank} real pairs of vectors give the score matrices of all heads: an eigenvalue "
            f"of their quotient has imaginary part {imaginary:.2g}, relative to the largest",
            imaginary,
        )
    q = np.where(np.imag(values) < 0, np.imag(q), np.real(q))  # of a pair, both parts
    products = np.linalg.solve(q, core).swapaxes(0, 1)  # [R, N, R]: mix_n,r k_r
    mix, k, values = truncated(products, 1)
    if np.any(values[:, 1:] > 1e-10 * values[:, :1]):
        second = np.max(values[:, 1] / values[:, 0])
        raise Refused(
            "the score matrices of the heads are not diagonal in one basis: what is left is "
            f"{second:.2g} of the whole",
            second,
        )
    spare = [(0, 0), (0, rank - size)]
    return (
        np.pad(u @ q, spare),
        np.pad(mix[:, :, 0].T, spare),
        np.pad((k[:, 0] @ vt).T, spare),
    )


def stacked_scores(w: Weights) -> np.ndarray:
    """[A_n; b_n] of bilinear weights: [N, D, E], or [N, D+1, E] with query biases."""
    rows = [w["qk"].swapaxes(0, 1)] + ([w["q_bias"][:, None]] if "q_bias" in w else [])
    return np.concatenate(rows, axis=1)


def stacked_values(w: Weights) -> np.ndarray:
    """[W_V W_O; b W_O] of absorbed weights: [N, W, O], or [N, W+1, O] with value biases."""
    return np.concatenate([w["vo"]] + ([w["v_bias"][:, None]] if "v_bias" in w else []), axis=1)


def count_minors(a: np.ndarray) -> int:
    """Dimension of the span of the 2 x 2 minors of sum_r x_r a[:, r], quadratic forms in x [R].

    Where R matrices of rank 1 span the same space, the forms hold no x_r^2 in their basis: then
    there are at most R (R-1)/2. a is [N, R, n].

    >>> count_minors(np.random.default_rng(0).normal(size=(3, 2, 3)))  # x_1^2, x_1 x_2, x_2^2
    3
    """
    count, rank, n = a.shape
    products = np.einsum("iae,jbf->ijefab", a, a)
    forms = products - products.swapaxes(2, 3)
    forms = forms + forms.swapaxes(4, 5)
    rows = forms[np.triu_indices(count, 1)][:, *np.triu_indices(n, 1)]
    kept = rows[..., *np.triu_indices(rank)].reshape(-1, rank * (rank + 1) // 2)
    values = np.linalg.svd(kept, compute_uv=False)
    return int(np.sum(values > 1e-9 * np.max(values, initial=0)))
