"""Tensor product attention (Zhang et al. 2025, arXiv 2501.06425; T6): the queries of a token are
one N x H matrix of rank X, made of two sets of factors that both read the token.

    q = 1/X sum_r a_r(x) b_r(x)^T,   a_r(x) = x A_r + alpha_r [N],   b_r(x) = turn(x B_r) [H]

Keys (rank Y) and values (rank Z, not turned) likewise. A cache holds factors: (Y + Z) (N + H)
numbers a token for 2 N H, where V = H. Since a_r are numbers, turning b_r turns q.

The constants alpha are there where `biases` holds an a; the paper's code has none beside A. With
A = 0 they are its "non-contextual" factors, of which standard, grouped and multi-query heads are
cases: b_r the queries of head r, alpha_r = X where n = r and 0 elsewhere.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.old.maps import Held, Weights, read_all

# The ranks of the paper's models: 6, 2 and 2.
SIZES: dict[str, Callable] = {
    "H": lambda spec, s: s["C"],
    "V": lambda spec, s: s["H"],
    "X": lambda spec, s: 6,
    "Y": lambda spec, s: 2,
    "Z": lambda spec, s: 2,
}

# Both factors of fan D would give a mean over X of size 1/sqrt(X), not 1.
MAPS = {
    "q_heads": "query: D / X -> X N",
    "q": "query: D -> X H",
    "k_heads": "store: E / Y -> Y N",
    "k": "store: E -> Y H",
    "v_heads": "store: W / Z -> Z N",
    "v": "store: W -> Z V",
    "q_heads_bias": "query: X N = 0 if biases has a",
    "k_heads_bias": "store: Y N = 0 if biases has a",
    "v_heads_bias": "store: Z N = 0 if biases has a",
}
CACHE = {"k_heads": "Y N", "k": "Y H", "v_heads": "Z N", "v": "Z V"}
PRODUCTS = ("query: X N H", "read: Y N H", "read: Z N V")


def query(w: Weights, x: Array, spec: Any, turn: Callable) -> Array:
    """1/X sum_r a_r(x) b_r(x)^T"""
    return _mean(read_all(w, "q_heads", x), turn(read_all(w, "q", x)))


def store(w: Weights, x: Array, y: Array, spec: Any, turn: Callable) -> Held:
    """The factors of keys and of values."""
    return {
        "k_heads": read_all(w, "k_heads", x),
        "k": turn(read_all(w, "k", x)),
        "v_heads": read_all(w, "v_heads", y),
        "v": read_all(w, "v", y),
    }


def read(w: Weights, held: Held, spec: Any) -> tuple[Array, Array]:
    """Keys and values of every head."""
    return _mean(held["k_heads"], held["k"]), _mean(held["v_heads"], held["v"])


def _mean(a: Array, b: Array) -> Array:
    """[B, T, R, N] x [B, T, R, H] -> [B, T, N, H]: the mean of the outer products."""
    return jnp.einsum("BTRN,BTRH->BTNH", a, b) / a.shape[2]
