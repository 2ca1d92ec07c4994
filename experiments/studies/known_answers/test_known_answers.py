"""Experiments whose answer is known: their data, their bounds, and what a report makes of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_files import experiments
from conftest import assert_close

from attnlab import data
from attnlab.data.synthetic import examples
from attnlab.models import Compute, head_distance, num_parameters, to_dict
from attnlab.models.head_similarity import smallest_change
from attnlab.names import load
from attnlab.nested import flatten
from attnlab.training import (
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    init_state,
    make_optimizer,
    train_step,
)
from attnlab.training.objectives import OBJECTIVES
from experiments.studies.known_answers.maxima import Maxima


def test_each_cause_is_undone_alone_and_every_such_variant_costs_as_much():
    """Of chunks.py: each has one difference from the code of former; scales and counts by hand."""
    found = experiments("chunks")
    code, width = found["one for all chunks, small scores"].model, 64
    size = code.layout.size("head_dim")
    assert (code.heads.name, code.width, size) == ("narrow_tied", width, 16)
    assert code.layout.score_scale == 1 / 8  # 1/sqrt(64), where 1/sqrt(16) is right
    undone = {
        "own chunks, small scores": {"heads.layout"},
        "one for all chunks": {"heads.scale"},
        "one for all chunks, small scores, equal parameters": {"ffn.width"},
        "own chunks, equal parameters": {"heads.layout", "heads.scale", "ffn.width"},
    }
    for name, fields in undone.items():
        ours, theirs = (flatten(to_dict(m)) for m in (code, found[name].model))
        assert {path for path in ours if ours[path] != theirs[path]} == fields
    assert found["one for all chunks"].model.layout.score_scale == 1 / 4
    wide = num_parameters(found["wide"].model)
    for name, one in found.items():
        if name.endswith("equal parameters"):
            assert abs(num_parameters(one.model) - wide) <= 4 * (2 * width + 1) / 2


def right(config, params, rows):
    """Share of the examples that have the largest logit; params [models, ...]."""
    model, tokens = config.build(), jnp.asarray(rows["tokens"])
    logits = jax.vmap(lambda p: model.apply({"params": p}, tokens).logits[:, -1])(params)
    return np.mean(np.argmax(logits, axis=-1) == rows["values"][:, -1], axis=1)


def at_random(config, count):
    """Large random weights, every number different."""
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), jnp.zeros((1, 4), int))
    rng = np.random.default_rng(0)
    make = lambda a: rng.normal(0, 2, (count, *a.shape)).astype(np.float32)
    return jax.tree.map(make, shapes["params"])


def test_one_head_keeps_the_bound_whatever_its_weights():
    """None of 4,000 random models is right in more than 3 of the 4 examples of a pair."""
    found = experiments("two_heads_beat_one", "tiny")
    one = found["one head"].model
    heads = dataclasses.replace(one.heads, head_dim=6)
    one = dataclasses.replace(one, vocab_size=5, width=4, heads=heads)
    assert right(one, at_random(one, 4000), examples(2, "complete")).max() == 0.75


def test_two_narrow_heads_are_right_in_every_case():
    """By hand: head i looks at place i, unless the selector is the other one, which says nothing;
    tokens and places are coordinates of their own."""
    n, large = 5, 30.0
    found = experiments("two_heads_beat_one")
    model = found["two small heads"].model
    heads = dataclasses.replace(model.heads, head_dim=1, value_dim=n, num_heads=2)
    model = dataclasses.replace(model, vocab_size=n + 3, width=n + 7, heads=heads)
    params = jax.tree.map(lambda a: np.zeros_like(a[0]), at_random(model, 1))
    params["embedding"][:, : n + 3] = np.eye(n + 3)
    params["positions"][:, n + 3 :] = np.eye(4)
    params["final_norm"]["scale"][:] = 1
    layer = jax.tree.map(lambda a: a[0], params["layers"]["attention"])
    layer["norm"]["scale"][:] = 1
    layer["q_bias"][:] = 1
    for head, (place, other) in enumerate([(n + 3, n + 1), (n + 4, n)]):
        layer["k"][place, head], layer["k"][other, head] = large, 2 * large
        layer["v"][:n, head] = layer["o"][head, :, :n] = large * np.eye(n)
    params["layers"]["attention"] = jax.tree.map(lambda a: a[None], layer)
    found = right(model, jax.tree.map(lambda a: a[None], params), examples(n, "complete"))
    assert found.tolist() == [1.0]


def trained(model, init, steps=12):
    """Weights at the start and after some steps of Adam on the examples of a small graph."""
    # A smaller epsilon would make steps of the noise in gradients that are zero.
    adam = OptimizerConfig(
        name="adam", learning_rate=1e-2, weight_decay=0.0, clip_norm=0.0, epsilon=1e-10
    )
    config = TrainConfig(
        steps=steps,
        seeds=(0,),
        optimizer=adam,
        schedule=ScheduleConfig(warmup_steps=1),
    )
    source = data.Endpoints(vertices=4).load(4)
    task, transform = OBJECTIVES["endpoint"].bind(source.sizes), make_optimizer(config).transform
    make = lambda key, inputs: load(init)(key, model, inputs)
    state = init_state(model.build(), task, transform, source.shapes(), 0, make)
    begun = state.params
    batch = jax.tree.map(jnp.asarray, examples(4, "complete"))
    step = jax.jit(lambda state: train_step(model.build(), task, transform, state, batch, 0))
    for _ in range(steps):
        state = step(state)
    return begun, state.params


@pytest.mark.slow
def test_equal_heads_stay_equal_and_are_one_head_twice(x64):
    """Distance 0.0 to the bit while every array moves; the weights of one head with its output
    times 2, started as the first of the two, are those of each; noise tells them apart."""
    found = experiments("same_start", "tiny")
    two = found["equal"]
    exact = lambda one: dataclasses.replace(one.model, compute=Compute(dtype="float64"))
    begun, equal = trained(exact(two), two.init)
    assert float(head_distance(two.model, equal)) == 0
    assert float(smallest_change(begun, equal)) > 1e-3
    lone = found["one head, output times 2"]
    _, one = trained(exact(lone), lone.init)
    both = jax.tree.map(lambda a, like: a[tuple(map(slice, like.shape))], equal, one)
    assert_close(one, both, loosen=1e4)
    noisy = found["noise of 1e-4"]
    begun, parted = trained(exact(noisy), noisy.init)
    start, end = (float(head_distance(noisy.model, p)) for p in (begun, parted))
    assert 0 < start < end


def test_sums_of_maxima_by_numpy():
    """Of mean 0 and variance 1 over many rows; one token asks, and none but it is scored."""
    config = Maxima(dimensions=3, directions=2, heldout_rows=4000)
    rows = config.load(6).heldout(0)
    x, answers = rows["features"], rows["answers"][:, -1, 0]
    assert (x[..., 3:] == np.where(rows["scored"][..., None], [0, 1], [1, 0])).all()
    assert (rows["scored"] == (np.arange(6) == 5)).all()
    assert abs(answers.mean()) < 0.06
    assert abs(answers.std() - 1) < 0.06
    # The directions are orthonormal and the same for all rows: found again from rows alone.
    square = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0][:2]
    assert_close(square @ square.T, np.eye(2))
    plain = np.max(x[:, :5, :3] @ square.T, axis=1).sum(-1)
    slope, offset = np.polyfit(plain, answers, 1)
    assert_close(answers, np.float32(slope * plain + offset), loosen=10)


def test_one_full_rank_head_finds_the_farthest():
    """By hand: W_Q = -W_K, large, and W_V W_O reads the point off; what one head has to learn."""
    found = experiments("one_wide_beats_many_narrow")
    one = found["one full-rank head"]
    model, d, large = one.model, one.data.dimensions, 60.0
    model = dataclasses.replace(model, width=d)
    source = one.data.load(one.train.length)
    rows = jax.tree.map(jnp.asarray, source.heldout(64))
    params = model.build().init(jax.random.key(0), rows["features"])["params"]
    params = jax.tree.map(np.zeros_like, params)
    params["embedding"], params["classifier"] = np.eye(d, dtype=np.float32), np.eye(d) / d**0.5
    params["final_norm"]["scale"] += 1
    layer = params["layers"]["attention"]
    layer["norm"]["scale"] += 1
    layer["q"][0, :, 0], layer["k"][0, :, 0] = np.eye(d), -large * np.eye(d)
    layer["v"][0, :, 0], layer["o"][0, 0] = np.eye(d), large * np.eye(d)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    task = OBJECTIVES["regression"]
    example = task.prepare(rows, jax.random.key(0))
    assert example.inputs["tokens"].shape == (64, one.train.length, d)
    metric = task.metrics[0]
    answer, _ = task.predict(model.build(), params, example.inputs)
    amounts, counts = metric.measure(answer, example)
    unexplained = float(jnp.sum(amounts) / jnp.sum(counts) / metric.divisor)
    assert unexplained < 3
    assert source.baselines()["unexplained"]["the mean"] == pytest.approx(100, abs=0.01)


@pytest.mark.slow
def test_a_fixed_random_pattern_does_not_read_the_text():
    """Its probabilities are those of any other text, and differ from head to head and place."""
    found = experiments("which_matrices_learn", "tiny")
    model = found["fixed random pattern"].model
    texts = jax.random.randint(jax.random.key(1), (2, 9), 0, 32)
    params = model.build().init(jax.random.key(0), texts)["params"]
    outputs = model.build().apply({"params": params}, texts, capture=("probs",))
    probs = outputs.captured["probs"]
    assert np.array_equal(probs[:, 0], probs[:, 1])
    assert not np.allclose(probs[0, 0, 0], probs[0, 0, 1])
    uniform = np.tril(np.ones((9, 9))) / np.arange(1, 10)[:, None]
    assert not np.allclose(probs[0, 0, 0], uniform)
