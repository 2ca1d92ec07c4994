"""GAT: identities, a tiny training, and the published page."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import small_data
from conftest import ROOT

from attnlab import dot_product_attention, masks
from attnlab.lab.stats import paired_difference
from experiments.configs import cora
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


@pytest.fixture
def folder(tmp_path):
    small_data.graph(tmp_path)
    return tmp_path


def test_a_graph_holds_each_edge_both_ways_and_once(folder):
    graph = cora.read_graph(folder)
    ends = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert len(ends) == len(graph.senders) == 100
    assert all((j, i) in ends and i != j for i, j in ends)
    assert graph.classes == ("a", "b")
    assert [int(nodes.sum()) for nodes in graph.parts.values()] == [8, 8, 10]


def test_labels_spread_along_edges(folder):
    """On a path 0 - 1 - 2 - 3 whose ends are known, and node 4 apart."""
    graph = cora.read_graph(folder)._replace(
        labels=np.array([1, 1, 0, 0, 0]),
        classes=("a", "b"),
        senders=np.array([0, 1, 1, 2, 2, 3]),
        receivers=np.array([1, 0, 2, 1, 3, 2]),
    )
    known = np.array([True, False, False, True, False])
    got = cora.spread_labels(graph, known, 2)
    assert got.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_cora(shared_data):
    """README and ANCHORS.md of the data: sizes, and label propagation near 73.0 %."""
    graph = cora.read_graph(shared_data / "cora")
    assert graph.features.shape == (2708, 1433)
    assert len(graph.senders) == 2 * 5278
    assert [int(nodes.sum()) for nodes in graph.parts.values()] == [140, 500, 1000]
    right = cora.spread_labels(graph, graph.parts["train"], 50)[50] == graph.labels
    assert abs(right[graph.parts["test"]].mean() - 0.730) < 0.005
    accuracy, rounds = cora.label_propagation(graph)
    assert 0.72 < accuracy < 0.74
    assert 0 < rounds <= 50


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("g.content", "n0\t1\t0\t1\t0\t1\t0\ta", "twice"),
        ("g.content", "n30\t1\t0\t1\tnan\t1\t0\ta", "g.content:31"),
        ("g.content", "n30\t1\t0\ta", "g.content:31"),
        ("g.content", "n30\t1\t0\t1\tx\t1\t0\ta", "'x'"),
        ("g.cites", "n1 n2", "g.cites:55"),
        ("split.tsv", "9\tn99\ttest", "n99"),
        ("split.tsv", "9\tn9\ttets", "tets"),
        ("split.tsv", "9\tn9\ttest", "one part"),
    ],
)
def test_lines_that_would_be_another_graph_are_refused(folder, file, line, said):
    with (folder / file).open("a") as opened:
        opened.write(line + "\n")
    with pytest.raises(ValueError, match=said):
        cora.read_graph(folder)


def test_the_rows_of_a_graph(folder):
    """Features sum to 1, every node has an edge to itself, and no node counts in two parts."""
    data, length, _ = small_data.graph(folder)
    dataset = data.load(length)
    parts = [part(0) for part in (dataset.train, dataset.validation, dataset.heldout)]
    assert [rows["valid"].sum() for rows in parts] == [8, 8, 10]
    assert sum(rows["valid"].astype(int) for rows in parts).max() == 1
    np.testing.assert_allclose(parts[0]["features"].sum(-1), 1, rtol=1e-6)
    assert (parts[0]["senders"] == parts[0]["receivers"]).sum() == 30
    assert dataset.baselines()["accuracy"].keys() == {"label propagation", "majority class"}
    assert dataset.batches(0, 1, 2, slice(None))["features"].shape == (2, 30, 6)
