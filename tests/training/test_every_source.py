"""What every row of `SOURCES` promises, and every task that it is made for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_data import ROWS

from attnlab.training import sources, tasks
from attnlab.training.step import step_key
from attnlab.training.tasks import TASKS, abstract_inputs


@pytest.fixture(params=ROWS)
def row(request, tmp_path):
    """(data, length, task, source)"""
    data, length, task = ROWS[request.param](tmp_path)
    return data, length, TASKS[task], data.load(length)


def test_every_row_is_tried():
    assert set(ROWS) == set(sources.SOURCES)


def draw(source, seed, step, size=4, part=slice(None)):
    if source.draw is not None:
        return source.draw(source.resident, step_key(seed, step), size)
    return source.batch(seed, step, size, part)


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_batch_is_a_function_of_seed_and_step(row):
    data, length, _, source = row
    again = data.load(length)
    one = draw(source, 3, 5)
    assert same(one, draw(again, 3, 5))
    assert again.digest == source.digest
    if not isinstance(data, sources.Nodes):  # one graph is one batch
        assert not same(one, draw(source, 4, 5))
        assert not same(one, draw(source, 3, 6))
    if source.batch is not None:
        halves = [draw(source, 3, 5, part=slice(2 * p, 2 * p + 2)) for p in range(2)]
        assert same(jax.tree.map(lambda *a: np.concatenate(a), *halves), one)


def test_what_is_told_before_loading_is_what_is_loaded(row):
    data, length, task, source = row
    assert data.sizes() == source.sizes
    told, loaded = data.shapes(length), source.shapes()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), told) == jax.tree.map(
        lambda a: (a.shape, a.dtype), loaded
    )
    batch = draw(source, 0, 1, 2)
    assert {n: (2, *a.shape[1:]) for n, a in loaded.items()} == {
        n: a.shape for n, a in batch.items()
    }
    abstract_inputs(task.bind(source.sizes), loaded)
    type(data)()  # every field has a default: it is a flag
    assert all(f.type for f in dataclasses.fields(data))


def test_rows_that_are_scored(row):
    """All of them, or some, evenly spaced; other rows than are trained on."""
    *_, source = row
    parts = [source.heldout, source.train, *([source.validation] if source.validation else [])]
    for part in parts:
        whole = part(0)
        count = len(whole["valid"])
        assert all(len(a) == count for a in jax.tree.leaves(whole))
        assert same(part(count), whole) or "tokens" in whole  # windows of a text are cut anew
        some = part(min(3, count))
        assert len(some["valid"]) == min(3, count)
    if "senders" in source.shapes():
        counted = sum(part(0)["valid"].astype(int) for part in parts)
        assert counted.max() == 1
        return
    if isinstance(row[0], sources.Text):
        return  # short windows come again
    if isinstance(row[0], sources.Endpoints):
        return  # every case is scored, those of training too
    arrays = lambda rows: [a for name, a in sorted(rows.items()) if name != "valid"]
    held, trained = (
        {b"".join(a[i].tobytes() for a in arrays(rows)) for i in range(len(rows["valid"]))}
        for rows in (source.heldout(0), source.train(0))
    )
    assert not held & trained


def test_yardsticks_are_of_a_metric_of_the_task(row):
    _, _, task, source = row
    found = source.yardsticks()
    assert set(found) <= {metric.name for metric in task.metrics}
    for values in found.values():
        assert all(np.isfinite(v) and v >= 0 for v in values.values())


def test_filling_never_counts(row):
    """A row of zeros that is not valid changes no sum, as an evaluation fills its last batch."""
    *_, task, source = row
    task = task.bind(source.sizes)
    rows = source.heldout(2)
    filled = jax.tree.map(lambda a: np.pad(a, [(0, 3), *[(0, 0)] * (a.ndim - 1)]), rows)
    key = jax.random.key(0)
    one, more = (task.prepare(jax.tree.map(jnp.asarray, a), key) for a in (rows, filled))
    size = source.sizes.num_classes or source.sizes.vocab_size + len(task.symbols)
    answers = np.random.default_rng(0).normal(size=(*more.weights.shape, size))
    answers = jnp.asarray(answers, jnp.float32)
    for metric in (m for m in task.metrics if m.measure is not None):
        sums = [
            [float(np.sum(a)) for a in metric.measure(answers[: len(e.targets)], e)]
            for e in (one, more)
        ]
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6)
        assert sums[0][1] > 0
    assert tasks.Metric("m", "", "lower").measure is None
