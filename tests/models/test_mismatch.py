"""Weights of another model: the error names the first weight that differs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from attnlab import heads
from attnlab.models import FFN, EncoderConfig, LayerOverrides, ModelConfig, OutputHead
from attnlab.models.params import param_shapes

SMALL = ModelConfig(
    vocab_size=11, max_len=8, width=12, num_layers=3, heads=heads.Standard(num_heads=3),
    ffn=FFN(width=10),
)  # fmt: skip
TOKENS = jnp.ones((1, 4), jnp.int32)
OTHERS = {
    # fields of the other model -> the weight, and its shape there (or "missing")
    "plan": (dict(sharing="albert"), "layers/attention/k.*change_plan"),
    "layers": (dict(num_layers=2), "layers/attention/k.*change_plan"),
    "delta": (dict(sharing="relaxed:3"), "layers/delta/attention/k"),
    "kv": (dict(sharing="cla:2"), "layers/attention/k' is missing"),
    "wide": (dict(heads=heads.Wide(num_heads=3)), r"layers/attention/k.*\(3, 12, 3, 12\)"),
    "sink": (dict(heads=heads.Standard(num_heads=3, extras=(heads.Sink(),))), "attention/sink"),
    "LM head": (dict(output=OutputHead(kind="own")), "lm_head' .* no such weight"),
    "encoder": (dict(kind="encoder_decoder"), "encoder_final_norm"),
    "types": (
        dict(layer_types=((2, LayerOverrides(window=2)), (1, LayerOverrides()))),
        "layers/attention/k' is missing",
    ),
    "vocabulary": (dict(vocab_size=13), r"'embedding' has shape \(13, 12\).*\(11, 12\)"),
}


def zeros(config):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), param_shapes(config))


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_another_model(name):
    fields, message = OTHERS[name]
    params = zeros(dataclasses.replace(SMALL, **fields))
    call = lambda p: SMALL.build().apply({"params": p}, TOKENS).logits
    for run in (call, jax.jit(call), lambda p: jax.eval_shape(call, p)):
        with pytest.raises(ValueError, match=message):
            run(params)


def test_a_shared_encoder_is_no_encoder_of_its_own():
    own = dataclasses.replace(SMALL, kind="encoder_decoder")
    shared = dataclasses.replace(own, encoder=EncoderConfig(shares_decoder=True))
    with pytest.raises(ValueError, match="encoder_"):
        own.build().apply({"params": zeros(shared)}, TOKENS, source=TOKENS)


def test_what_is_no_tree_of_weights():
    model, params = SMALL.build(), zeros(SMALL)
    for variables in (params, {"params": {"params": params}}, TOKENS, {"params": TOKENS}):
        with pytest.raises(ValueError, match="'params': params"):
            model.apply(variables, TOKENS)
    with pytest.raises(ValueError, match="'layers'"):
        model.apply({"params": params | {"layers": "x"}}, TOKENS)
    with pytest.raises(ValueError, match=r"pretrained\.load"):
        model.apply({"params": {"transformer.h.0.attn.c_attn.weight": jnp.ones(3)}}, TOKENS)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    assert jax.vmap(lambda p: model.apply({"params": p}, TOKENS).hidden)(stacked).shape[0] == 2
