"""GAT: identities, a tiny training, and the published page."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from conftest import ROOT

from attnlab import dot_product_attention, masks
from attnlab.lab.stats import paired_difference
from experiments.studies.cora import analysis, study

ROWS = pandas.read_csv(ROOT / "docs/results/cora.csv")


def small_graph():
    """Three nodes in a chain with self-loops, one feature each."""
    senders, receivers = np.array([[0, 1], [1, 0], [1, 2], [2, 1], [0, 0], [1, 1], [2, 2]]).T
    rows, columns = np.nonzero(np.eye(3))
    arrays = senders, receivers, rows, columns, np.ones(3, np.float32), np.array([0, 1, 0])
    return study.Edges(*map(jnp.asarray, arrays))


def test_gat_is_attention_with_additive_scores_as_bias():
    edges = small_graph()
    params = study.init(jax.random.key(0), 3, 2)
    h = jax.random.normal(jax.random.key(1), (3, study.HEADS, study.HEAD_DIM))
    first, second = (jnp.einsum("nth,th->tn", h, params[f"{name}0"]) for name in "ab")
    bias = jax.nn.leaky_relu(first[:, :, None] + second[:, None], 0.2)  # [heads, nodes, nodes]
    zeros = jnp.zeros_like(h)
    graph = masks.Edges(edges.senders, edges.receivers)
    expected = dot_product_attention(zeros, zeros, h, bias, graph)
    assert study.attend(h, params, 0, edges) == pytest.approx(np.asarray(expected), abs=1e-5)


def test_number_of_parameters():
    """92,373, as PyTorch Geometric counts them, and the 18 score biases of the published code."""
    params = study.init(jax.random.key(0), 1433, 7)
    scores = sum(w.size for name, w in params.items() if name.startswith("score_bias"))
    assert (sum(w.size for w in params.values()) - scores, scores) == (92_373, 18)


@pytest.mark.parametrize("scores", ["additive", "dot"])
def test_a_small_graph_is_learnt(scores):
    variant = study.Variant(scores=scores, dropout=0.0, early_stopping=False)
    masks = dict.fromkeys(("train", "valid"), jnp.ones(3))
    params = study.init(jax.random.key(0), 3, 2)
    found = study.train(params, small_graph(), masks, jax.random.key(0), variant)
    assert int(found["epochs"]) == study.EPOCHS
    assert float(found["train"]) == 100


def test_the_published_accuracy_lies_in_the_interval():
    test = ROWS.test[ROWS.variant == study.MAIN]
    found = paired_difference(test)
    assert len(test) == 20
    assert found.low <= study.PUBLISHED[0] <= found.high


def test_the_page_is_that_of_its_rows():
    assert analysis.page(ROWS) == (ROOT / "docs/results/cora.md").read_text()
