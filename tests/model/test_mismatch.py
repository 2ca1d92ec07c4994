"""Weights of another model: `apply` says whose they look like and what converts them."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import attnlab.model.mismatch
from attnlab import ModelConfig
from attnlab.model.mismatch import describe_mismatch
from attnlab.model.shapes import param_shapes
from attnlab.transforms import change_plan, tie_encoder

SMALL = ModelConfig(vocab_size=11, max_len=8, width=12, num_layers=3, num_heads=3, ffn_width=10)
SEQ = dataclasses.replace(SMALL, kind="encoder_decoder")
TOKENS = jnp.ones((1, 4), jnp.int32)


def texts(config):
    return (TOKENS,) * (1 + (config.kind == "encoder_decoder"))


def params_of(config):
    return config.build().init(jax.random.key(0), *texts(config))["params"]


def change(config, **fields):
    return dataclasses.replace(config, **fields)


MISTAKES = {
    "albert in separate": (
        SMALL, change(SMALL, plan="albert"), ["sharing plan", "1 parameter group", "change_plan"]
    ),
    "separate in albert": (change(SMALL, plan="albert"), SMALL, ["sharing plan", "change_plan"]),
    "deltas in cycle": (
        change(SMALL, plan="cycle:1"), change(SMALL, plan="relaxed:1"), ["'delta'", "change_plan"]
    ),
    "kv apart": (SMALL, change(SMALL, plan="cla:2"), ["'kv'", "change_plan"]),
    "wide in standard": (
        SMALL, change(SMALL, layout="wide"), ["'wide'", "'standard'", "attnlab.convert"]
    ),
    "narrow_tied in standard": (
        SMALL, change(SMALL, layout="narrow_tied"), ["'narrow_tied'", "'standard'"]
    ),
    "standard in alt": (change(SMALL, layout="alt"), SMALL, ["'standard'", "'alt'", "convert"]),
    "wide and albert": (SMALL, change(SMALL, layout="wide", plan="albert"), ["'wide'"]),
    "key heads": (SMALL, change(SMALL, num_kv_heads=1), ["num_kv_heads"]),
    "a gate": (SMALL, change(SMALL, gate="head"), ["gate"]),
    "no positions": (
        SMALL, change(SMALL, positions="rotary"), ["lack positions", "positions='learned'"]
    ),
    "a readout": (SMALL, change(SMALL, readout="own"), ["have readout", "readout='own'"]),
    "a decoder in both": (SEQ, SMALL, ["encoder"]),
    "both in a decoder": (SMALL, change(SEQ, cross="merged"), ["encoder"]),
    "a shared encoder": (SEQ, change(SEQ, share_encoder=True), ["untie_encoder"]),
    "an encoder of its own": (change(SEQ, share_encoder=True), SEQ, ["tie_encoder"]),
    "layer types": (SMALL, change(SMALL, kinds="2(window=2) 1()"), ["layers_0", "kinds"]),
    "vocabulary": (
        SMALL, change(SMALL, vocab_size=13), ["embedding is (13, 12), the model expects (11, 12)"]
    ),
    "ffn_width": (SMALL, change(SMALL, ffn_width=7), ["layers.ffn.", "7", "10"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_weights_of_another_model(mistake):
    config, other, parts = MISTAKES[mistake]
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), param_shapes(other))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is compared)
        config.build().apply({"params": params}, *texts(config))
    assert type(caught.value) is ValueError
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("config", [SMALL, SEQ])
def test_wrapping(config):
    model, params = config.build(), params_of(config)
    with pytest.raises(ValueError, match=r'pass {"params": params}'):
        model.apply(params, *texts(config))
    with pytest.raises(ValueError, match=r'pass params\["params"\]'):
        model.apply({"params": {"params": params}}, *texts(config))
    with pytest.raises(ValueError, match="dict of weights"):
        model.apply(TOKENS, *texts(config))
    with pytest.raises(ValueError, match="dict of weights"):
        model.apply({"params": TOKENS}, *texts(config))
    with pytest.raises(ValueError, match=r"layers is no array but a str"):
        model.apply({"params": params | {"layers": "x"}}, *texts(config))


def test_names_of_another_library():
    state = {"transformer.h.0.attn.c_attn.weight": jnp.ones((12, 36)), "wte.weight": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"pretrained\.load"):
        SMALL.build().apply({"params": state}, TOKENS)


def test_a_leaf_that_no_one_reads():
    """Flax ignores it: often it is a sign of weights of another model."""
    params = params_of(SMALL)
    params["layers"]["ffn"]["gate"] = jnp.ones((3, 12, 10))
    with pytest.raises(ValueError, match=r"layers\.ffn\.gate is .* no weight of that name"):
        SMALL.build().apply({"params": params}, TOKENS)


def test_under_transformations():
    model, params = SMALL.build(), params_of(change(SMALL, plan="albert"))
    loss = lambda p: jnp.sum(model.apply({"params": p}, TOKENS))
    for call in (jax.jit(loss), jax.grad(loss), lambda p: jax.eval_shape(loss, p)):
        with pytest.raises(ValueError, match="sharing plan"):
            call(params)
    mine = params_of(SMALL)
    seeds = jax.tree.map(lambda a: jnp.stack([a, a]), mine)
    assert jax.vmap(loss)(seeds).shape == (2,)
    with pytest.raises(ValueError, match="do not fit"):
        loss(seeds)


def test_the_named_conversion_converts():
    albert = change(SMALL, plan="albert")
    after, params = change_plan(albert, params_of(albert), "separate")
    assert describe_mismatch(param_shapes(after), params) is None
    assert describe_mismatch(param_shapes(SMALL), params) is None
    after, params = tie_encoder(SEQ, params_of(SEQ))
    assert describe_mismatch(param_shapes(after), params) is None


def test_shapes_are_those_of_init():
    configs = [SMALL, SEQ, change(SEQ, share_encoder=True), change(SMALL, ffn_width=0)]
    configs += [c for pair in MISTAKES.values() for c in pair[:2]]
    for config in dict.fromkeys(configs):
        made = jax.eval_shape(lambda c=config: params_of(c))
        assert param_shapes(config) == made


def test_it_needs_no_flax():
    tree = ast.parse(Path(attnlab.model.mismatch.__file__).read_text())
    names = {
        name.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not any(name.startswith("flax") for name in names)
