"""One more number for the scores of each layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import ModelConfig, pretrained

CONFIG = ModelConfig(
    width=12, num_heads=3, num_layers=3, vocab_size=17, max_len=9, ffn_width=8, dtype="float64",
    positions="rotary", attention_scale=0.7,
)  # fmt: skip
SCALES = (1.0, 0.5, 2.0)


@pytest.mark.parametrize("order", ["factored", None])
def test_it_is_a_factor_of_the_queries(order, x64):
    """Of each application, not of a slot: layers 0 and 2 share their weights here."""
    shared = dataclasses.replace(CONFIG, plan="0,1,0", layer_scales=SCALES, order=order)
    apart = dataclasses.replace(CONFIG, order=order)
    rng, tokens = np.random.default_rng(0), jnp.arange(9)[None] % 7
    shapes = jax.eval_shape(shared.build().init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), shapes)
    layers = jax.tree.map(lambda a: a[jnp.array([0, 1, 0])], params["layers"])
    heads = layers["attention"]
    factor = jnp.array(SCALES)
    for name in ("q", "q_bias"):
        heads = heads | {name: heads[name] * factor.reshape(3, *(1,) * (heads[name].ndim - 1))}
    turned = params | {"layers": layers | {"attention": heads}}

    @jax.jit
    def run(params, turned, tokens):
        got, shown = shared.build().apply({"params": params}, tokens, show=("scores",))
        cache = shared.empty_cache(1, 9)
        stepped = [
            shared.build().apply({"params": params}, tokens[:, :5], cache=cache)[0],
            *apart.build().apply({"params": turned}, tokens, show=("scores",)),
        ]
        return got, shown, stepped

    got, shown, (cached, expected, scores) = run(params, turned, tokens)
    assert_close(got, expected, loosen=100)
    assert_close(cached, expected[:, :5], loosen=100)
    assert_close(shown["scores"], scores["scores"], loosen=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(layer_scales=(1.0, 2.0)), "must be 3 numbers above 0"),
        (dict(layer_scales=(1.0, 0.0, 1.0)), "must be 3 numbers above 0"),
        (dict(layer_scales=SCALES, kind="encoder_decoder", positions="learned"), "one stack"),
    ],
)
def test_what_is_no_scale_for_each_layer(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)


def test_a_list_of_scales_is_a_tuple():
    assert len({dataclasses.replace(CONFIG, layer_scales=a) for a in (SCALES, [*SCALES])}) == 1


@pytest.mark.parity
@pytest.mark.parametrize("scaled", [True, False])
def test_the_scales_of_gpt2(scaled, tmp_path):
    """transformers' own, live: every layer's output; and back into its config."""
    import torch
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=17, n_positions=9, n_embd=12, n_layer=3, n_head=3, scale_attn_weights=scaled,
        scale_attn_by_inverse_layer_idx=True, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    peer = GPT2Model(config).eval()
    with torch.no_grad():
        for name, a in peer.named_parameters():
            a.normal_(mean=float("ln_" in name and "weight" in name), std=0.4)
        tokens = torch.arange(9)[None] % 7
        said = peer(tokens, output_hidden_states=True).hidden_states
    peer.save_pretrained(tmp_path / "theirs")
    model, params = pretrained.load(tmp_path / "theirs")
    assert model.config.layer_scales == (1, 1 / 2, 1 / 3)
    ours = model.apply({"params": params}, jnp.asarray(tokens.numpy()), return_outputs=True)
    for got, expected in zip([*ours.hidden[:-1], ours.last], said, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4 * float(abs(expected).max()))
    pretrained.save(tmp_path / "ours", model, params)
    again = GPT2Model.from_pretrained(tmp_path / "ours")
    assert again.config.scale_attn_by_inverse_layer_idx is True
