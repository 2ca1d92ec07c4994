"""Which attention matrices a head of a given width can make (Bhojanapalli et al. 2020)."""

import jax
import numpy as np
import pytest
from conftest import assert_close

from experiments.studies.rank_bound.study import (
    attention_of,
    centred_scores,
    experiment,
    fit,
    scores_factors,
    table,
    weights_for_attention,
)

N = 6


def reachable_attention(P, rank):
    """Softmax of the scores truncated to a rank: equals P from n - 1 on."""
    left, right = scores_factors(P, rank)
    weights = np.exp(left @ right.T)
    return weights / weights.sum(-1, keepdims=True)


@pytest.fixture
def P():
    return np.random.default_rng(0).dirichlet(np.ones(N), N)


def test_every_attention_is_reached_at_n_minus_one_and_not_below(P):
    assert_close(reachable_attention(P, N - 1), P)
    assert_close(reachable_attention(P, N + 3), P)
    errors = [np.abs(reachable_attention(P, r) - P).max() for r in range(1, N - 1)]
    assert min(errors) > 1e-3


def test_centred_scores_have_rank_n_minus_one_and_the_softmax_of_P(P):
    scores = centred_scores(P)
    assert_close(scores + scores.mean(1, keepdims=True), scores)
    assert np.linalg.matrix_rank(scores) == N - 1
    assert_close(np.asarray(jax.nn.softmax(scores)), P.astype(np.float32))


def test_rank_of_the_scores_decides(P):
    """A matrix made by a head of width 2 is reached at width 2, whatever n is."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(N, 2)) @ rng.normal(size=(2, N))
    low = np.exp(scores - scores.mean(1, keepdims=True))
    low /= low.sum(1, keepdims=True)
    assert_close(reachable_attention(low, 2), low)
    assert np.abs(reachable_attention(low, 1) - low).max() > 1e-3


@pytest.mark.parametrize("head_dim", [2, N - 1, N + 3])
def test_explicit_weights_reach_it_through_attnlab(P, x64, head_dim):
    X = np.random.default_rng(2).standard_normal((N, N + 2))
    w_q, w_k = weights_for_attention(P, X, head_dim)
    assert w_q.shape == w_k.shape == (N + 2, head_dim)
    probs = attention_of(w_q, w_k, X)
    assert_close(probs, reachable_attention(P, head_dim))
    assert (np.abs(probs - P).max() < 1e-12) == (head_dim >= N - 1)


def test_one_number_per_token_cannot_ask(x64):
    """The paper's counterexample, d = 1, n = 2, X = [1, 0]: the second row is always uniform."""
    X, P = np.array([[1.0], [0.0]]), np.array([[0.9, 0.1], [0.8, 0.2]])
    w = np.random.default_rng(3).normal(0, 30, (2, 4, 1, 1))
    for w_q, w_k in zip(*w, strict=True):
        assert_close(attention_of(w_q, w_k, X)[1], np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="linearly independent"):
        weights_for_attention(P, X, 1)
    # It is X that fails: width 1 = n - 1 is enough as soon as the tokens are independent.
    X = np.array([[1.0, 0.0], [3.0, 2.0]])
    assert_close(attention_of(*weights_for_attention(P, X, 1), X), P)


def test_gradient_descent_finds_the_threshold_too(x64):
    rng = np.random.default_rng(4)
    P, X = rng.dirichlet(np.ones(4), (2, 4)), rng.standard_normal((2, 4, 7))
    kl, worst = fit(P, X, jax.random.key(0), head_dims=(1, 2, 3), steps=2000)
    assert kl.shape == worst.shape == (3, 2)
    assert (kl[:2] > 1e-3).all()
    assert (kl[2] < 1e-6).all()
    assert (worst[2] < 1e-3).all()
    # A head of width 1 has no other way: the fit is no worse than the construction.
    bound = [np.sum(p * np.log(p / reachable_attention(p, 1)), 1).mean() for p in P]
    assert (kl[0] <= np.array(bound) + 1e-9).all()


def test_table_and_numbers(x64):
    rows = experiment(5, matrices=2, steps=3)
    assert rows.head_dim.tolist() == [n for n in (1, 2, 3, 4, 5) for _ in range(2)]
    assert ((rows.constructed < 1e-12) == (rows.head_dim >= 4)).all()
    assert "| 5 | 4 (n - 1) |" in table(rows)
