"""Packed texts in whole models: logits and gradients are those of each text in a row of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from random_models import random_params
from test_models import SMALL, change

from attnlab import models
from attnlab import nnx as attnlab_nnx
from attnlab.heads import Standard, Wide
from attnlab.models import FFN, Alibi, LayerOverrides, Learned, Relative, run_model

SHORT = change(SMALL, max_len=6, heads=Standard(num_heads=3))
MODELS = {
    "learned, decoder": {"positions": Learned(), "sharing": "albert"},
    "learned, padding not counted": {
        "positions": Learned(pad_token=1), "kind": "encoder", "max_len": 9
    },
    "sinusoidal, wide": {"positions": models.Sinusoidal(), "heads": Wide(num_heads=2)},
    "rotary, windows": {
        "positions": models.Rotary(), "heads": Standard(num_heads=2, num_kv_heads=1),
        "layer_types": ((2, LayerOverrides(window=2)), (1, LayerOverrides(full_attention=True))),
    },
    "relative, both sides": {"positions": Relative(), "kind": "encoder"},
    "relative, and a table": {"positions": Relative(table=True), "kind": "encoder"},
    "alibi, experts": {
        "positions": Alibi(), "ffn": FFN(width=8, experts=models.Experts(num_experts=3, top_k=2))
    },
    "alibi, scaled by position": {
        "positions": Alibi(), "attention": models.Attention(position_scale=(0.7, 2.0))
    },
    "no positions": {"positions": models.NoPositions()},
    "encoder and decoder, learned": {"positions": Learned(), "kind": "encoder_decoder"},
    "encoder and decoder, relative":
        {"positions": Relative(per_layer=True), "kind": "encoder_decoder"},
}  # fmt: skip
LENGTHS, OF_SOURCE = (4, 1, 6, 3), (2, 6, 1, 4)


def packed(lengths, size):
    """[1, size]: 1, 1, 1, 1, 2, 3, ... and 0 for padding."""
    ids = np.repeat(np.arange(1, 1 + len(lengths)), lengths)
    return np.pad(ids, (0, size - len(ids)))[None]


def cut(a, lengths):
    return np.split(a[:, : sum(lengths)], np.cumsum(lengths)[:-1], axis=1)


QUICK = (
    "learned, decoder", "rotary, windows", "relative, and a table", "encoder and decoder, relative"
)  # fmt: skip


@pytest.mark.parametrize("case", deep(MODELS, *QUICK))
def test_a_packed_text_is_the_text_alone(case):
    """A row of 17 tokens in a model of texts of at most 6; padding may hold any token."""
    config = change(SHORT, **MODELS[case])
    rng = np.random.default_rng(0)
    params = random_params(config, scale=0.5)
    model, tokens, source = config.build(), *rng.integers(0, 11, (2, 1, 17))
    if case == "learned, padding not counted":
        tokens[0, [3, 10]] = 1
    pair = packed(LENGTHS, 17), packed(OF_SOURCE, 17)

    def total(logits):
        return sum(jnp.sum(jnp.sin(a)) for a in logits)

    def together(params):
        inputs = {"segments": pair[0]}
        if config.encoder is not None:
            inputs = {"segments": pair, "source": source}
        logits = cut(model.apply({"params": params}, tokens, **inputs).logits, LENGTHS)
        return total(logits), logits

    def alone(params):
        sources = [{"source": a} for a in cut(source, OF_SOURCE)]
        logits = [
            model.apply({"params": params}, a, **(b if config.encoder is not None else {})).logits
            for a, b in zip(cut(tokens, LENGTHS), sources, strict=True)
        ]
        return total(logits), logits

    (_, got), grads = jax.jit(jax.value_and_grad(together, has_aux=True))(params)
    (_, expected), expected_grads = jax.jit(jax.value_and_grad(alone, has_aux=True))(params)
    assert_close(got, expected, loosen=3)
    assert_close(grads, expected_grads, loosen=10)


def test_other_ways_to_call():
    config, params = SHORT, random_params(SHORT, scale=0.5)
    tokens, ids = jnp.arange(10)[None], packed((4, 5), 10)
    expected = config.build().apply({"params": params}, tokens, segments=ids).logits
    module = attnlab_nnx.Transformer(config, params=params)
    assert_close(module(tokens, segments=jnp.asarray(ids)).logits, expected)
    masked = jnp.arange(10)[None] != 3
    got = module(tokens, segments=np.where(ids, ids, 2), padding_mask=(ids != 0) & masked).logits
    alone = run_model(params, tokens[:, 4:9], config).logits
    assert_close(got[:, 4:9], alone, loosen=3)
    with pytest.raises(ValueError, match=r"position 6 at .* is out of range"):
        run_model(params, tokens, config, models.ModelInputs(segments=packed((7, 3), 10)))
