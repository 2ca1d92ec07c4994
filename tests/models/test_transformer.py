"""What a model promises: its init, values, auxiliary losses, layer indices, encoded sources."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax.core import freeze
from test_models import SMALL, SOURCE, TOKENS, change, make

from attnlab import heads
from attnlab.models import Compute


def test_init_checks_the_call_and_does_not_compute_it():
    computed = []

    def record(value, layer):
        jax.debug.callback(lambda: computed.append(layer))
        return value

    model, patch = SMALL.build(), {"embeddings": record}
    variables = model.init(jax.random.key(0), TOKENS, patch=patch)
    jax.effects_barrier()
    assert computed == []
    with pytest.raises(ValueError, match="token id 19"):
        model.init(jax.random.key(0), jnp.full((1, 2), 19))
    outputs, same = model.init_with_output(jax.random.key(0), TOKENS, patch=patch)
    jax.effects_barrier()
    assert len(computed) == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, variables, same))
    for given in (variables, freeze(variables)):
        assert_close(outputs.logits, model.apply(given, TOKENS).logits)


def test_inputs_of_an_encoder_decoder():
    """Padding masks are booleans, or zeros and ones; `encoded` stands for the source."""
    run, params = make(change(SMALL, kind="encoder_decoder"), capture=("cross.probs",))
    mask = np.array([[1, 1, 0, 0, 1]] * 2)
    ones, booleans = (
        run(params, SOURCE, source=SOURCE, padding_mask=mask, source_padding_mask=mask)
        for mask in (mask, mask == 1)
    )
    np.testing.assert_array_equal(ones.logits, booleans.logits)
    given = {"encoded": ones.encoded, "source_padding_mask": mask == 1}
    got = run(params, SOURCE, padding_mask=mask == 1, **given)
    assert_close((got.logits, got.captured), (ones.logits, ones.captured))
    run, _ = make(change(SMALL, kind="encoder_decoder"), capture=("encoder.probs",))
    with pytest.raises(ValueError, match=r"unknown value 'encoder.probs'.*known: .*cross.probs"):
        run(params, SOURCE, **given)


def test_a_patch_replaces_a_value_of_one_layer():
    """Heads of layer 1 set to zero are the heads that a head mask removes, and what the FFN of
    layer 2 returns is what it returns without weights."""
    patch = {
        "heads": lambda value, layer: jnp.where(layer == 1, 0, value),
        "ffn_out": lambda value, layer: jnp.where(layer == 2, 0, value),
    }
    run, params = make()
    got = make(patch=patch)[0](params, TOKENS).logits
    ffn = params["layers"]["ffn"]
    ffn |= {name: ffn[name].at[2].set(0) for name in ("down", "down_bias")}
    expected = run(params, TOKENS, head_mask=jnp.ones((3, 3)).at[1].set(0)).logits
    assert_close(got, expected)


@dataclasses.dataclass(frozen=True)
class Balanced(heads.Extra):
    """A learnt gate per head, with the loss sum_n gate_n^2; captures the layer index."""

    losses: ClassVar[tuple[str, ...]] = ("balance",)

    def weights(self, layout):
        return {"balance_gate": heads.Weight("attend", out_axes=("num_heads",), constant=1.0)}

    def values(self, layout):
        return {"layer_index": "", "balance": ""}

    def after_attention(self, params, heads, call):
        gate = params["balance_gate"]
        balance = call.tap("balance", jnp.sum(gate**2))
        call.tap("layer_index", jnp.asarray(call.layer, jnp.float32))
        return heads * gate[:, None].astype(heads.dtype), {"balance": balance}


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("sharing", ["separate", "albert", "cla:2"])
def test_losses_of_an_extra_are_summed_over_layers_and_have_gradients(sharing, remat):
    """The layer index reaches the heads under every plan."""
    layout, compute = heads.Standard(num_heads=3, extras=(Balanced(),)), Compute(remat=remat)
    config = change(SMALL, num_layers=4, heads=layout, sharing=sharing, compute=compute)
    run, params = make(config, capture=("layer_index",))
    loss = lambda params: (run(params, TOKENS).losses["balance"], run(params, TOKENS).captured)
    (value, captured), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    gate = params["layers"]["attention"]["balance_gate"]
    uses = 4 / len(gate)
    assert_close(value, uses * jnp.sum(gate**2))
    assert_close(gradient["layers"]["attention"]["balance_gate"], 2 * uses * gate)
    assert captured["layer_index"].tolist() == [0, 1, 2, 3]
