"""GAT, recall by head_dim and looped depth: identities, and facts of their published pages."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import ROOT

from attnlab import dot_product_attention, flops_per_token, masks, num_parameters
from experiments.studies.cells import interval, run_cells
from experiments.studies.cora import study as gat
from experiments.studies.looped_depth import study as looped_depth
from experiments.studies.recall import study as recall_capacity

RESULTS = ROOT / "docs/results"


def read(name):
    return list(csv.DictReader((RESULTS / f"{name}.csv").open()))


def small_graph():
    senders, receivers = np.array([[0, 1], [1, 0], [1, 2], [2, 1], [0, 0], [1, 1], [2, 2]]).T
    rows, columns = np.nonzero(np.eye(3))
    arrays = senders, receivers, rows, columns, np.ones(3, np.float32), np.array([0, 1, 0])
    return gat.Edges(*map(jnp.asarray, arrays))


def test_gat_is_attention_with_additive_scores_as_bias():
    edges = small_graph()
    params = gat.init(jax.random.key(0), 3, 2)
    h = jax.random.normal(jax.random.key(1), (3, gat.HEADS, gat.HEAD_DIM))
    first, second = (jnp.einsum("nth,th->tn", h, params[f"{name}0"]) for name in "ab")
    bias = jax.nn.leaky_relu(first[:, :, None] + second[:, None], 0.2)  # [heads, nodes, nodes]
    zeros = jnp.zeros_like(h)
    graph = masks.Edges(edges.senders, edges.receivers)
    expected = dot_product_attention(zeros, zeros, h, bias, graph)
    assert gat.attend(h, params, 0, edges) == pytest.approx(np.asarray(expected), abs=1e-5)


def test_parameters_of_gat():
    """92,373, as PyTorch Geometric counts them, and the 18 score biases of the published code."""
    params = gat.init(jax.random.key(0), 1433, 7)
    scores = sum(w.size for name, w in params.items() if name.startswith("score_bias"))
    assert (sum(w.size for w in params.values()) - scores, scores) == (92_373, 18)


def test_the_published_accuracy_lies_in_the_interval_of_cora():
    test = [float(o["test"]) for o in read("cora") if o["variant"] == "published configuration"]
    assert len(test) == 20
    _, low, high = interval(test)
    assert low <= gat.PUBLISHED[0] <= high


def test_recall_needs_no_more_than_one_layer():
    found = recall_capacity.run_one(recall_capacity.Run(4, 8, 4, 0, 150))
    assert found["recalled"] > 0.6  # a guess is right in 1 of 4


def test_the_logistic_curve_is_recovered():
    pairs, dims, count = (np.tile(x, 20) for x in ([4, 8, 16, 32], [2, 2, 4, 8], [1, 8, 2, 16]))
    pairs = np.repeat([4, 8, 16, 32, 64], 16)
    z = 1 - 2 * np.log(pairs) + 3 * np.log(dims) + 0.5 * np.log(count)
    right = 1 / pairs + (1 - 1 / pairs) / (1 + np.exp(-z))
    found = recall_capacity.fitted(pairs, dims, count, right)
    assert found == pytest.approx([1, -2, 3, 0.5], abs=0.1)


def test_pointers_are_followed_as_often_as_asked():
    hops = jnp.array([1, 2, 3, 4])
    features, answer = looped_depth.batch(jax.random.key(0), 4, hops)
    n = looped_depth.NODES
    f = np.argmax(features[..., n : 2 * n], -1)
    for row, count in enumerate([1, 2, 3, 4]):
        at = np.arange(n)
        for _ in range(count):
            at = f[row][at]
        assert answer[row].tolist() == at.tolist()
        assert sorted(f[row].tolist()) == list(range(n))


def test_budgets_of_looped_depth():
    configs = looped_depth.VARIANTS
    parameters = {name: num_parameters(c) for name, c in configs.items()}
    flops = {name: flops_per_token(c, looped_depth.NODES) for name, c in configs.items()}
    assert flops["albert, equal FLOPs"] == flops["separate"]
    assert parameters["albert, equal parameters"] == pytest.approx(
        parameters["separate"], rel=0.002
    )
    assert parameters["one layer"] == parameters["albert, equal FLOPs"]


def test_a_second_command_runs_nothing_again(tmp_path):
    cells = [recall_capacity.Run(1, 2, 4, seed, 1) for seed in (0, 1)]
    calls = []

    def run(cell):
        calls.append(cell)
        return {"loss": cell.seed / 3}

    first = run_cells(cells[:1], run, tmp_path / "a.csv")
    both = run_cells(cells, run, tmp_path / "a.csv")
    assert calls == cells
    assert both[0] == first[0]
    assert [line["loss"] for line in both] == ["0", "0.333333"]


@pytest.mark.parametrize(
    ("name", "module"), [("cora", gat), ("recall", recall_capacity), ("looped_depth", looped_depth)]
)
def test_pages_are_those_of_their_numbers(name, module):
    assert (RESULTS / f"{name}.md").read_text() == module.page(read(name))


def test_lines_of_other_steps_or_seeds_are_not_on_the_page_of_looped_depth(tmp_path):
    """All runs are in the file, so nothing is trained."""
    lines = read("looped_depth")
    short = [line | {"steps": "50", "hops1": "0"} for line in lines]
    with (tmp_path / "looped_depth.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines + short)
    done = command("experiments.studies.looped_depth", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "looped_depth.md").read_text().replace(str(tmp_path), "docs/results")
    assert page == (RESULTS / "looped_depth.md").read_text()
    done = command("experiments.studies.looped_depth", f"--out={tmp_path}", "--seeds=3")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "looped_depth.md").read_text()
    assert "; 3 seeds per variant, 1000 steps of" in page
    assert f"\npython -m experiments.studies.looped_depth --out={tmp_path} --seeds=3\n" in page


def test_the_page_of_recall_names_its_steps():
    short = [line | {"steps": line["steps"].replace("400", "200")} for line in read("recall")]
    said = " ".join(recall_capacity.page(short).split())
    assert "| heads | after 200 steps | after 1600 steps |" in said
    assert "half of the pairs after 200 steps" in said
    assert "after 400" not in said


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("recall", ["--steps=1600"], "--steps=1600 must be below 1600"),
        (
            "cora",
            ["--data=nowhere", "--seeds=3", "--other_seeds=5"],
            "--seeds=3 must be at least --other_seeds=5",
        ),
    ],
)
def test_flags_without_a_page_are_refused_before_training(tmp_path, name, given, said):
    done = command(f"experiments.studies.{name}", f"--out={tmp_path}", *given)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
