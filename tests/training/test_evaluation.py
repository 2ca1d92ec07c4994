"""Held-out scores are those of the rows of the dataset, one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig
from attnlab.training import sharding
from attnlab.training.objectives import Example, Metric, Objective, accuracy
from attnlab.training.step import Evaluator

MODEL = ModelConfig(
    kind="encoder", vocab_size=10, width=12, num_layers=1, heads=Standard(num_heads=2),
    ffn=FFN(width=20), max_len=5,
)  # fmt: skip


def reversed_rows(batch, key, sizes=None):  # as docs/howto/own_objective.md
    row = batch["rows"]
    weights = jnp.ones(row.shape)  # every position counts
    return Example({"tokens": row}, row[:, ::-1], weights)


def hits_of_rows(logits, example):
    """Sums that read no weights."""
    hits = jnp.argmax(logits, axis=-1) == example.targets
    return jnp.sum(hits), hits.size


def largest(logits, example):
    """A number of each row, infinite where a row is all zeros."""
    return 1 / jnp.sum(example.inputs["tokens"], axis=1), jnp.ones(len(logits))


METRICS = (
    accuracy("numbers"),
    Metric("hits", "% right", "higher", hits_of_rows, 0.01),
    Metric("inverse", "a row", "higher", largest),
)
REVERSE = Objective(
    reversed_rows, "the row reversed", ("encoder",), METRICS, required_arrays=("rows",)
)


@pytest.fixture(scope="module")
def params():
    variables = MODEL.build().init(jax.random.key(0), jnp.zeros((1, 5), int))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    one = jax.tree.map(lambda a: a + jax.random.normal(next(keys), a.shape), variables["params"])
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a]), one)  # two seeds


def evaluator(size, devices=1, model_parallel=1, objective=REVERSE):
    mesh = sharding.data_mesh(jax.devices()[:devices], model_parallel=model_parallel)
    return Evaluator(MODEL.build(), objective.smoothed(0.5), mesh, size)  # never smoothed


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).integers(1, 10, (200, 5))


@pytest.fixture(scope="module")
def scores_of_rows(params, rows):
    """{name: [rows, seeds]}: the scores of every row by itself."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def of_row(params, row):
        logits = MODEL.build().apply({"params": params}, tokens=row[None]).logits[0]
        right = 100 * jnp.mean(jnp.argmax(logits, axis=-1) == row[::-1])
        nats = -jax.nn.log_softmax(logits)[jnp.arange(5), row[::-1]]
        found = {"loss": jnp.mean(nats), "inverse": 1 / jnp.sum(row)}
        return found | {"accuracy": right, "hits": right}

    found = [of_row(params, row) for row in rows]
    return {name: np.array([one[name] for one in found]) for name in found[0]}


def assert_same(got, expected):
    assert got.keys() == expected.keys() == {"loss", "accuracy", "hits", "inverse"}
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5)


@pytest.mark.parametrize("devices", [(1, 1), (8, 1), (4, 2)])
def test_scores_of_an_own_objective_are_those_of_its_rows(params, rows, scores_of_rows, devices):
    evaluate = evaluator(64, *devices)
    for count in (129, 192, 200):
        expected = {name: a[:count].mean(axis=0) for name, a in scores_of_rows.items()}
        assert_same(evaluate(params, {"rows": rows[:count]}), expected)


def test_rows_that_are_all_padding_do_not_count(params, rows):
    rows, evaluate = rows[:11], evaluator(4)
    expected = evaluate(params, {"rows": rows})
    more = np.pad(rows, [(0, 2), (0, 0)])
    for valid in (np.arange(13) < 11, np.arange(13)[:, None] + np.zeros((13, 5)) < 11):
        assert_same(evaluate(params, {"rows": more, "valid": valid}), expected)
    with pytest.raises(ValueError, match="no target of the 11 scored rows counts"):
        evaluate(params, {"rows": rows, "valid": np.zeros(11, bool)})
    with pytest.raises(ValueError, match="no target of the 0 scored rows counts"):
        evaluate(params, {"rows": rows[:0]})
