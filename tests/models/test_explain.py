"""What `explain_model` reports of attention is what the call runs."""

import jax
import jax.numpy as jnp
import pytest
from test_models import change

from attnlab import BACKENDS, explain_model, heads
from attnlab.attention.masks import Edges
from attnlab.models import Attention, Dropout, EncoderConfig, ModelConfig, Rotary, param_shapes

QKVO = ("q", "k", "v", "o")
WIDE = ModelConfig(width=32, heads=heads.Wide(num_heads=4, biases=QKVO), num_layers=4, max_len=2048)


def shape(*sizes, dtype="int32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ran(monkeypatch, config, inputs):
    """(the report, the backend of every attention that JAX traces)."""
    report, calls = explain_model(config, inputs, training=True), []
    for name, backend in BACKENDS.items():

        def run(call, name=name, run=backend.run):
            calls.append(name)
            return run(call)

        monkeypatch.setitem(BACKENDS, name, backend._replace(run=run))
    model = config.build()

    def call(params, key, inputs):
        return model.apply(
            {"params": params}, **inputs, deterministic=False, rngs={"dropout": key}
        ).hidden

    jax.eval_shape(call, param_shapes(config), jax.random.key(0), inputs)
    return report, calls


def chosen(report):
    """(order, backend) of one attention sublayer."""
    backends = [name for name, why in report["implementation"].items() if why.startswith("chosen")]
    return report["chosen"]["order"], *backends


TALKING = heads.Wide(num_heads=4, biases=QKVO, extras=(heads.TalkingHeads(),))
GIVEN = Attention(order="bilinear", implementation="dense")
CASES = [
    # config, order, backend: wide heads need no keys of their own, long texts go in blocks
    (WIDE, "bilinear", "blockwise"),
    (change(WIDE, heads=TALKING), "bilinear", "dense"),
    (change(WIDE, sharing="cla:2"), "factored", "blockwise"),
    (change(WIDE, positions=Rotary()), "factored", "blockwise"),
    (change(WIDE, attention=GIVEN, dropout=Dropout(attention=0.1)), "bilinear", "dense"),
]


@pytest.mark.parametrize(("config", "order", "backend"), CASES)
def test_the_call_that_runs(config, order, backend, monkeypatch):
    report, calls = ran(monkeypatch, config, {"tokens": shape(8, 2048)})
    assert chosen(report["layers"]["self"]) == (order, backend)
    assert set(calls) == {backend}
    assert list(report) == ["layers"]


def test_both_stacks_and_cross_attention(monkeypatch):
    config = change(WIDE, kind="encoder_decoder", encoder=EncoderConfig(num_layers=2))
    inputs = {"source": shape(8, 2048), "tokens": shape(8, 16)}
    report, calls = ran(monkeypatch, config, inputs)
    expected = {
        ("encoder_layers", "self"): ("bilinear", "blockwise"),
        ("layers", "self"): ("absorbed", "dense"),
        ("layers", "cross"): ("absorbed", "dense"),
    }
    assert {(a, b): chosen(report[a][b]) for a in report for b in report[a]} == expected
    assert set(calls[:1]) == {"blockwise"}
    assert set(calls[-2:]) == {"dense"}


def test_edges_and_a_device_that_cannot_run(monkeypatch):
    config = change(WIDE, kind="encoder", heads=heads.Standard(num_heads=4))
    inputs = {"tokens": shape(1, 9), "mask": Edges(shape(20), shape(20))}
    report, calls = ran(monkeypatch, config, inputs)
    assert chosen(report["layers"]["self"]) == ("factored", "edges")
    assert set(calls) == {"edges"}
    report = explain_model(config, {"tokens": shape(1, 9)})["layers"]["self"]
    assert "needs an NVIDIA GPU" in report["implementation"]["cudnn"]
    with pytest.raises(ValueError, match="longer than max_len"):
        explain_model(config, {"tokens": jnp.zeros((1, 4096), int)})
