"""Which head_dim can produce any attention matrix?

    python -m experiments.studies.rank_bound --out=DIR

Bhojanapalli et al. 2020 (arXiv 2002.07028), Theorem 1: for n linearly independent tokens, a head
with head_dim >= n can produce every positive attention matrix P; with a smaller head_dim there are
matrices it cannot produce. The softmax ignores a constant per query, so the exact threshold is the
rank of log P minus its mean over keys, at most n - 1. Here P has random rows from Dirichlet(1). For
each head_dim two heads approximate it: one from a truncated SVD of the scores (exact from n - 1 on;
below, its error is an upper bound on that of the best head), and one fitted by gradient descent on
the KL divergence. About a minute on 2 cores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
from jaxtyping import Float

from attnlab import dot_product_attention
from attnlab.report import page as report
from attnlab.tap import capture

SIZES, MATRICES, STEPS = (16, 32), 5, 10_000
"""Lengths n, random matrices of each, steps of gradient descent."""
MADE = f"Dirichlet(1) rows, {MATRICES} matrices, {STEPS} steps of Adam; median (lowest to highest)"
Matrix = Float[np.ndarray, "n n"]


def centred_scores(P: Matrix) -> Matrix:
    """log P - its mean over keys: the scores of P whose rows sum to zero, so rank n - 1 at most.

    P [T, S] holds one query per row, a distribution without zeros.
    """
    scores = np.log(np.asarray(P, np.float64))
    return scores - scores.mean(-1, keepdims=True)


def scores_factors(P: Matrix, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys [n, rank] whose products are the truncated scores; zero columns past n."""
    u, s, vt = np.linalg.svd(centred_scores(P))
    root = np.sqrt(s[:rank])
    factors = (np.pad(a[:, : len(root)] * root, ((0, 0), (0, rank - len(root)))) for a in (u, vt.T))
    return tuple(factors)  # type: ignore[return-value]


def weights_for_attention(
    P: Matrix, X: Float[np.ndarray, "n D"], head_dim: int
) -> tuple[Float[np.ndarray, "D H"], Float[np.ndarray, "D H"]]:
    """W_Q and W_K whose scores X W_Q (X W_K)^T / sqrt(H) are those of P, truncated to rank H.

    The SVD of the scores gives the queries and keys, and pinv(X) the weights that compute them from
    X. With head_dim >= n - 1 this is exact for every P; below, the error is an upper bound on that
    of the best head.

    Raises ValueError unless the n tokens in the rows of X are linearly independent. This needs
    D >= n; in the paper's counterexample D = 1 and X = [1, 0], and the query of a zero token is 0.
    """
    X = np.asarray(X, np.float64)
    n = len(X)
    if np.linalg.matrix_rank(X) < n:
        raise ValueError(
            f"X {X.shape}: its {n} rows must be linearly independent, which takes D >= {n}"
        )
    inverse = np.linalg.pinv(X)
    left, right = scores_factors(P, head_dim)
    return inverse @ left * head_dim**0.25, inverse @ right * head_dim**0.25


def attention_of(
    w_q: Float[Any, "D H"], w_k: Float[Any, "D H"], X: Float[Any, "n D"]
) -> Float[Any, "n n"]:
    """The attention matrix that attnlab computes from these weights."""
    q, k = (jnp.asarray(X @ w)[:, None] for w in (w_q, w_k))
    _, values = capture(dot_product_attention, q, k, jnp.zeros_like(k), names=("probs",))
    return values["probs"][0]


@functools.partial(jax.jit, static_argnames=("head_dims", "steps"))
def fit(
    P: Float[Any, "M n n"],
    X: Float[Any, "M n D"],
    key: Any,
    *,
    head_dims: tuple[int, ...],
    steps: int,
    rate: float = 0.03,
) -> tuple[Float[Any, "R M"], Float[Any, "R M"]]:
    """W_Q and W_K of every head_dim and matrix by Adam, from random weights, in one program.

    Returns for each of R head_dims and M matrices: KL(P || fitted) in nats, mean over queries, and
    max |fitted - P|. Weights of a smaller head_dim are padded with zero columns to one shape.
    """
    (count, _, width), widest = X.shape, max(head_dims)
    used = jnp.arange(widest) < jnp.array(head_dims)[:, None]
    scale = jnp.array(head_dims) ** -0.5
    shape = (2, len(head_dims), count, width, widest)
    start = jax.random.normal(key, shape, X.dtype) * width**-0.5

    def log_probs(weights):
        q, k = jnp.einsum("MnD,wRMDH->wRMnH", X, weights * used[:, None, None])
        return jax.nn.log_softmax(jnp.einsum("R,RMnH,RMmH->RMnm", scale, q, k))

    def divergence(weights):
        return jnp.sum(P * (jnp.log(P) - log_probs(weights)), -1).mean(-1)

    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(_, state):
        weights, memory = state
        grads = jax.grad(lambda w: divergence(w).sum())(weights)
        updates, memory = optimizer.update(grads, memory)
        return optax.apply_updates(weights, updates), memory

    weights, _ = jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start)))
    worst = jnp.abs(jnp.exp(log_probs(weights)) - P).max((-2, -1))
    return divergence(weights), worst


def head_dims(n: int) -> tuple[int, ...]:
    """Powers of two below n, and values near n - 1."""
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    return tuple(sorted({*powers, 3 * n // 4, n - 2, n - 1, n} - {0}))


def experiment(n: int, matrices: int = MATRICES, steps: int = STEPS) -> pandas.DataFrame:
    """Errors of every head_dim on `matrices` random P [n, n], each with its own tokens.

    A row for each head_dim and matrix. constructed: max |P_hat - P| of the truncated SVD, with
    explicit weights, through attnlab; fitted: the same after gradient descent; kl: KL(P || fitted),
    nats per query.
    """
    rng = np.random.default_rng(n)
    P = rng.dirichlet(np.ones(n), (matrices, n))
    X = rng.standard_normal((matrices, n, 3 * n // 2))
    sizes = head_dims(n)
    kl, fitted = fit(P, X, jax.random.key(n), head_dims=sizes, steps=steps)
    rows = []
    for i, size in enumerate(sizes):
        made = [
            attention_of(*weights_for_attention(p, x, size), x) for p, x in zip(P, X, strict=True)
        ]
        worst = np.abs(np.stack(made) - P).max((1, 2))
        errors = {"constructed": worst, "fitted": np.asarray(fitted[i]), "kl": np.asarray(kl[i])}
        rows.append({"n": n, "head_dim": size, "matrix": range(matrices)} | errors)
    return pandas.concat(map(pandas.DataFrame, rows), ignore_index=True)


def table(rows: pandas.DataFrame) -> str:
    """Markdown: median over matrices, lowest to highest in brackets."""
    header = ("n", "head_dim", "constructed, max error", "fitted, max error", "fitted, KL in nats")
    lines = []
    for (n, head_dim), some in rows.groupby(["n", "head_dim"], sort=False):
        mark = " (n - 1)" if head_dim == n - 1 else ""
        values = [some[name] for name in ("constructed", "fitted", "kl")]
        texts = [f"{v.median():.1e} ({v.min():.0e} to {v.max():.0e})" for v in values]
        lines.append([str(n), f"{head_dim}{mark}", *texts])
    return report.table(header, lines)


def page(rows: pandas.DataFrame) -> str:
    """How the rows were made, and their table."""
    return f"{MADE}\n\n{table(rows)}\n"
