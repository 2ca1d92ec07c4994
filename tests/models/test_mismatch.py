"""Weights of another model: `apply` says whose they look like and what converts them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attnlab import heads, models
from attnlab.models import FFN, EncoderConfig, LayerOverrides, ModelConfig, OutputHead
from attnlab.models.params import param_shapes

SMALL = ModelConfig(
    vocab_size=11, max_len=8, width=12, num_layers=3, heads=heads.Standard(num_heads=3),
    ffn=FFN(width=10),
)  # fmt: skip
SEQ = dataclasses.replace(SMALL, kind="encoder_decoder")
TOKENS = jnp.ones((1, 4), jnp.int32)
SHARED = EncoderConfig(shares_decoder=True)
TYPES = ((2, LayerOverrides(window=2)), (1, LayerOverrides()))


def inputs(config):
    return {"source": TOKENS} if config.encoder is not None else {}


def zeros(config):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), param_shapes(config))


def change(config, **fields):
    return dataclasses.replace(config, **fields)


def with_heads(layout):
    return change(SMALL, heads=layout)


SINK = heads.Standard(num_heads=3, extras=(heads.Sink(),))
MISTAKES = {
    "albert in separate": (
        SMALL, change(SMALL, sharing="albert"), ["sharing plan", "1 parameter group", "change_plan"]
    ),
    "separate in albert": (change(SMALL, sharing="albert"), SMALL, ["sharing plan", "change_plan"]),
    "fewer layers": (
        SMALL, change(SMALL, num_layers=2), ["Every sublayer has 2 ", "has 3: set num_layers=2 "]
    ),
    "deltas in cycle": (
        change(SMALL, sharing="cycle:1"), change(SMALL, sharing="relaxed:1"),
        ["'delta'", "change_plan"],
    ),
    "kv apart": (SMALL, change(SMALL, sharing="cla:2"), ["'kv'", "change_plan"]),
    "wide in standard": (
        SMALL, with_heads(heads.Wide(num_heads=3)), ["'wide'", "'standard'", "attnlab.convert"]
    ),
    "wide with a sink in standard": (
        SMALL, with_heads(heads.Wide(num_heads=3, extras=(heads.Sink(),))), ["'wide'", "convert"]
    ),
    "narrow_tied in standard": (
        SMALL, with_heads(heads.NarrowTied(num_heads=3)), ["'narrow_tied'", "'standard'"]
    ),
    "standard in alt": (with_heads(heads.Alt(num_heads=3)), SMALL, ["'standard'", "'alt'"]),
    "wide and albert": (
        SMALL, change(SMALL, heads=heads.Wide(num_heads=3), sharing="albert"), ["'wide'"]
    ),
    "key heads": (SMALL, with_heads(heads.Standard(num_heads=3, num_kv_heads=1)), ["num_kv_heads"]),
    "a sink": (SMALL, with_heads(SINK), ["differ in sink"]),
    "no positions": (
        SMALL, change(SMALL, positions=models.Rotary()), ["lack positions", "Learned"]
    ),
    "an LM head": (SMALL, change(SMALL, output=OutputHead(kind="own")), ["have lm_head"]),
    "a decoder in both": (SEQ, SMALL, ["no encoder of their own"]),
    "a shared encoder": (SEQ, change(SEQ, encoder=SHARED), ["untie_encoder"]),
    "an encoder of its own": (change(SEQ, encoder=SHARED), SEQ, ["tie_encoder"]),
    "layer types": (SMALL, change(SMALL, layer_types=TYPES), ["layers_0", "layer_types"]),
    "vocabulary": (
        SMALL, change(SMALL, vocab_size=13), ["'embedding' has shape (13, 12)", "(11, 12)"]
    ),
    "FFN": (SMALL, change(SMALL, ffn=FFN(width=7)), ["layers/ffn/", "7", "10"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_weights_of_another_model(mistake):
    config, other, parts = MISTAKES[mistake]
    with pytest.raises(ValueError, match="params are not those of this model") as caught:
        config.build().apply({"params": zeros(other)}, TOKENS, **inputs(config))
    assert type(caught.value) is ValueError
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("config", [SMALL, SEQ])
def test_wrapping(config):
    model, params = config.build(), zeros(config)
    calls = {
        r"\{'params': params\}": params,
        r'pass params\["params"\]': {"params": {"params": params}},
        r"\{'params': params\} first, not ": TOKENS,
        "dict of weights": {"params": TOKENS},
        "'layers' must be an array, not a str": {"params": params | {"layers": "x"}},
    }
    for message, variables in calls.items():
        with pytest.raises(ValueError, match=message):
            model.apply(variables, TOKENS, **inputs(config))


def test_names_of_another_library():
    state = {"transformer.h.0.attn.c_attn.weight": jnp.ones((12, 36)), "wte.weight": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"pretrained\.load"):
        SMALL.build().apply({"params": state}, TOKENS)


def test_a_leaf_that_no_one_reads():
    """Flax ignores it: often it is a sign of weights of another model."""
    params = zeros(SMALL)
    params["layers"]["ffn"]["gate"] = jnp.ones((3, 12, 10))
    with pytest.raises(ValueError, match=r"'layers/ffn/gate' .*no such weight"):
        SMALL.build().apply({"params": params}, TOKENS)


def test_under_transformations():
    model, params = SMALL.build(), zeros(change(SMALL, sharing="albert"))

    def loss(p):
        return jnp.sum(model.apply({"params": p}, TOKENS).logits)

    for call in (jax.jit(loss), jax.grad(loss), lambda p: jax.eval_shape(loss, p)):
        with pytest.raises(ValueError, match="sharing plan"):
            call(params)
    seeds = jax.tree.map(lambda a: jnp.stack([a, a]), zeros(SMALL))
    assert jax.vmap(loss)(seeds).shape == (2,)
    with pytest.raises(ValueError, match="not those of this model"):
        loss(seeds)
