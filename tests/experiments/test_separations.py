"""Experiments whose answer is known: their data, their bounds, and what a report makes of them."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, assert_close
from written_arms import ARMS, write_arm

from attnlab.training import sources
from attnlab.training.sources.endpoints import cases
from experiments import report, sweep
from experiments.reporting import claims
from experiments.reporting.results import read
from experiments.running import arm
from experiments.running.claims import Claim, Drawing, Expect

CONFIGS = ("two_heads_beat_one",)


def expected(name, words=""):
    """The module, its planned arms resolved, its claim."""
    module = importlib.import_module(f"experiments.configs.{name}")
    planned = sweep.read(f"{ROOT}/experiments/configs/{name}.py:{words}", {})
    base = module.get_config(words)
    changed = {n: sweep.with_changes(base, changes) for n, changes in planned.arms.items()}
    return planned, {planned.titles[n]: arm.resolve(config) for n, config in changed.items()}


@pytest.mark.parametrize("words", ["", "tiny"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_claim_is_of_arms_that_the_sweep_has(name, words):
    planned, arms = expected(name, words)
    assert planned.claim["expects"]
    for expect in planned.claim["expects"]:
        assert {expect["arm"], expect["of"]} - {""} <= set(arms)
        assert expect["relation"] in claims.RELATIONS
        expect["says"].format(mean=0.0, least=0.0, most=0.0, ratio=0.0)
    assert planned.claim["drawing"]["kind"] in claims.DRAWINGS


def test_every_case_of_a_small_graph():
    """Written out by hand: 0 -> 1 and 1 -> 0, selectors 2 and 3, query 4."""
    rows = cases(2, "complete")
    assert rows["tokens"].tolist() == [[0, 1, 2, 4], [1, 0, 2, 4], [0, 1, 3, 4], [1, 0, 3, 4]]
    assert rows["values"].tolist() == [[-1, -1, -1, v] for v in (0, 1, 1, 0)]
    assert len(cases(5, "complete")["tokens"]) == 2 * 5 * 4
    arcs = cases(5, "acyclic")["tokens"][:, :2]
    assert len(arcs) == 5 * 4
    assert (arcs[:, 0] < arcs[:, 1]).all()


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"vertices": 1}, 4, "data.vertices of at least 2, not 1"),
        ({"graph": "complet"}, 4, "did you mean 'complete'"),
        ({}, 8, "set train.length=4, not 8"),
    ],
)
def test_impossible_endpoints(fields, length, message):
    with pytest.raises(ValueError, match=message):
        sources.Endpoints(**fields).load(length)


def right(config, params, rows):
    """Share of the cases that have the largest logit; params [models, ...]."""
    model, tokens = config.build(), jnp.asarray(rows["tokens"])
    logits = jax.vmap(lambda p: model.apply({"params": p}, tokens)[:, -1])(params)
    return np.mean(np.argmax(logits, axis=-1) == rows["values"][:, -1], axis=1)


def at_random(config, count):
    """Large random weights, every number different."""
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), jnp.zeros((1, 4), int))
    rng = np.random.default_rng(0)
    make = lambda a: rng.normal(0, 2, (count, *a.shape)).astype(np.float32)
    return jax.tree.map(make, shapes["params"])


def test_one_head_keeps_the_bound_whatever_its_weights():
    """None of 4,000 random models is right in more than 3 of the 4 cases of a pair, some in 3."""
    _, arms = expected("two_heads_beat_one", "tiny")
    one = dataclasses.replace(arms["one head"].model, vocab_size=5, width=4, head_dim=6)
    assert right(one, at_random(one, 4000), cases(2, "complete")).max() == 0.75


def test_what_one_head_writes_is_a_sum_over_arc_and_selector():
    """The step of the proof that a second head, or a feed-forward part, takes away: the residual at
    # times Z, which is 1 / (share of # itself) but for a factor, is A(u, v) + s_i."""
    _, arms = expected("two_heads_beat_one", "tiny")
    one = arms["one head"].model
    rows = jnp.asarray(cases(4, "complete")["tokens"])

    def apart(model):
        params = jax.tree.map(lambda a: jnp.asarray(a[0] / 4), at_random(model, 1))
        shown = model.build().apply({"params": params}, rows, show=("probs", "residual"))[1]
        scaled = shown["residual"][0, :, -1] / shown["probs"][0, :, 0, -1, -1:]
        first, second = np.split(np.asarray(scaled), 2)  # by the selector
        return first - second

    found = apart(one)
    assert_close(found, np.broadcast_to(found[:1], found.shape))
    for change in ({"num_heads": 2}, {"ffn_width": 8}):
        found = apart(dataclasses.replace(one, **change))
        assert np.ptp(found, axis=0).max() > 0.1 * np.abs(found).max()


def test_two_narrow_heads_are_right_in_every_case():
    """By hand: head i looks at place i, unless the selector is the other one, which says nothing;
    tokens and places are coordinates of their own."""
    n, large = 5, 30.0
    _, arms = expected("two_heads_beat_one")
    model = arms["two narrow heads"].model
    sizes = dict(vocab_size=n + 3, width=n + 7, head_dim=1, value_dim=n, num_heads=2)
    model = dataclasses.replace(model, **sizes)
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
    found = right(model, jax.tree.map(lambda a: a[None], params), cases(n, "complete"))
    assert found.tolist() == [1.0]


def known(*expects, kind="bars", **drawing):
    """A claim about the arms of `three`."""
    return Claim("Is it so?", "A and B 2020", expects, Drawing(kind, "What is seen.", **drawing))


def three(folder, claim):
    """Three arms with scores near 2.8, 2.9 and 3.1, and what was expected of them."""
    titles = {}
    for (layout, plan), (loss, count) in ARMS.items():
        write_arm(folder / layout, layout, plan, loss, count)
        titles[layout] = f"{layout} heads"
    record = {"arms": {n: {} for n in titles}, "titles": titles, "claim": claim.record()}
    record["environment"] = {"config": "experiments/configs/known.py"}
    (folder / "config.json").write_text(json.dumps(record))
    return read([folder])


def test_a_report_says_first_what_did_not_come(tmp_path):
    """Every seed counts, and the worst of them; a ratio is of means."""
    met = Expect("wide heads", "at most", 2.82, "wide has {most:.3f}")
    missed = Expect("wide heads", "at most", 2.80, "wide has {most:.3f}")
    ratio = Expect("narrow heads", "at least", 1.1, "{ratio:.2f} times", of="wide heads")
    absent = Expect("none", "at least", 0, "")
    [panel] = three(tmp_path, known(met, missed, ratio, absent))
    most = f"{panel.complete[0].heldout.max():.3f}"
    assert claims.answer(panel) == (
        f"**Not as expected:** wide has {most} (asked: at most 2.8). **As expected in the rest:** "
        f"wide has {most} (asked: at most 2.82); 1.11 times (asked: at least 1.1). No result, so "
        "no answer: none. The expectation is of A and B 2020."
    )
    report.write([tmp_path])
    told = (tmp_path / "report.md").read_text().split("\n\n")
    assert told[0] == "# Is it so?"
    assert told[2].startswith("**Not as expected:**")
    assert told[3:5] == ["![Is it so?](figures/1-width-claim.svg)", "What is seen."]
    assert "predicts best" not in "".join(told)
    svg = (tmp_path / "figures/1-width-claim.svg").read_text()
    assert all(f"{name} heads" in svg for name in ("wide", "standard", "narrow"))
