"""What is told of a model's attention is what its call does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attnlab import BACKENDS, ModelConfig, explain_model
from attnlab.attention.masks import Edges
from attnlab.heads.old import multihead

WIDE = ModelConfig(width=32, num_heads=4, layout="wide", num_layers=4, max_len=2048)


def shape(*sizes, dtype="int32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ran(monkeypatch, config, inputs):
    """(what is told, [(order, backend) of every call of attention that JAX traces])."""
    told, calls, orders = explain_model(config, inputs, training=True), [], []
    for name, row in BACKENDS.items():
        run = lambda call, name=name, run=row.run: calls.append(name) or run(call)
        monkeypatch.setitem(BACKENDS, name, row._replace(run=run))
    plain = multihead.merge_heads
    taken = lambda w, heads, *, spec: orders.append(spec.layout) or plain(w, heads, spec=spec)
    monkeypatch.setattr(multihead, "merge_heads", taken)
    model, key = config.build(), jax.random.key(0)
    call = lambda key, inputs: model.init_with_output(
        {"params": key, "dropout": key}, **inputs, deterministic=False
    )
    jax.eval_shape(call, key, inputs)
    return told, [
        ("factored" if order == config.layout else order, backend)
        for order, backend in zip(orders, calls, strict=True)
    ]


def said(told):
    """(order, backend) that is told."""
    chosen = [name for name, why in told["implementation"].items() if why.startswith("chosen")]
    return told["chosen"]["order"], *chosen


CASES = {
    # fields -> (order, backend); wide heads go without keys of their own, long texts go in blocks
    "plain": ({}, ("bilinear", "blockwise")),
    "talking heads": ({"talking_heads": True}, ("bilinear", "dense")),
    "shared keys": ({"plan": "cla:2"}, ("factored", "blockwise")),
    "rotary": ({"positions": "rotary"}, ("factored", "blockwise")),
    "told": ({"order": "bilinear", "implementation": "dense"}, ("bilinear", "dense")),
    "dropout": (
        {"attention_dropout_rate": 0.1, "implementation": "dense"},
        ("bilinear", "dense"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_call_that_runs(case, monkeypatch):
    fields, expected = CASES[case]
    config = dataclasses.replace(WIDE, **fields)
    told, calls = ran(monkeypatch, config, {"tokens": shape(8, 2048)})
    assert said(told["self"]) == expected
    assert set(calls) == {expected}
    assert list(told) == ["self"]


def test_both_stacks_and_what_lies_between(monkeypatch):
    config = dataclasses.replace(WIDE, kind="encoder_decoder", encoder_layers=2)
    inputs = {"source": shape(8, 2048), "tokens": shape(8, 16)}
    told, calls = ran(monkeypatch, config, inputs)
    expected = {
        "encoder": ("bilinear", "blockwise"),
        "self": ("absorbed", "dense"),
        "cross": ("absorbed", "dense"),
    }
    assert {name: said(part) for name, part in told.items()} == expected
    assert calls == [expected[name] for name in ("encoder", "self", "cross")]


def test_edges_and_what_is_asked_for_and_cannot_run(monkeypatch):
    config = dataclasses.replace(WIDE, kind="encoder", layout="standard")
    inputs = {"tokens": shape(1, 9), "mask": Edges(shape(20), shape(20))}
    told, calls = ran(monkeypatch, config, inputs)
    assert said(told["self"]) == calls[0] == ("factored", "edges")
    config = dataclasses.replace(WIDE, talking_heads=True, implementation="blockwise")
    told = explain_model(config, {"tokens": shape(1, 9)})
    assert said(told["self"]) == ("factored",)
    assert "talking_heads" in told["self"]["implementation"]["blockwise"]
    with pytest.raises(ValueError, match="longer than max_len"):
        explain_model(config, {"tokens": jnp.zeros((1, 4096), int)})
