"""What a model promises: captured values, auxiliary losses, layer indices."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax.core import freeze
from test_models import SMALL, TOKENS, random_params

from attnlab import heads, models
from attnlab.sharing import Plan

PLANS = {
    "separate": "separate",
    "albert": "albert",
    "cycle": "cycle:2",
    "cla": "cla:2",
    "relaxed": "relaxed:2",
}


def run(config, tokens=TOKENS, params=None, **inputs):
    params = random_params(config) if params is None else params
    model = config.build()
    return jax.jit(lambda p, tokens: model.apply({"params": p}, tokens, **inputs))(params, tokens)


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
    assert_close(outputs.logits, model.apply(variables, TOKENS).logits)
    frozen = model.apply(freeze(variables), TOKENS).logits
    assert_close(outputs.logits, frozen)


# Captured values ----------------------------------------------------------------------------------


def test_values_of_a_model_with_an_encoder_have_prefixes():
    config = dataclasses.replace(SMALL, kind="encoder_decoder")
    names = ("probs", "cross.probs", "encoder.probs", "encoder.residual")
    outputs = run(config, source=TOKENS[:, :5], capture=names)
    assert {n: a.shape[-2:] for n, a in outputs.captured.items()} == {
        "probs": (7, 7), "cross.probs": (7, 5), "encoder.probs": (5, 5),
        "encoder.residual": (5, 12),
    }  # fmt: skip
    encoded = run(config, encoded=outputs.encoded, capture=("cross.probs",))
    assert_close(encoded.logits, outputs.logits)
    with pytest.raises(ValueError, match=r"unknown value 'encoder.probs'.*known: .*cross.probs"):
        run(config, encoded=outputs.encoded, capture=("encoder.probs",))


def test_a_patch_replaces_a_value_of_one_layer():
    """Heads of layer 1 set to zero are the heads that a head mask removes."""
    mask = jnp.ones((3, 3)).at[1].set(0)
    patch = {"heads": lambda value, layer: jnp.where(layer == 1, 0, value)}
    assert_close(run(SMALL, patch=patch).logits, run(SMALL, head_mask=mask).logits)
    with pytest.raises(ValueError, match="unknown value 'head'"):
        run(SMALL, patch={"head": lambda value, layer: value})


# Extras from outside ------------------------------------------------------------------------------


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


BALANCED = dataclasses.replace(
    SMALL, num_layers=4, heads=heads.Standard(num_heads=3, extras=(Balanced(),))
)


@pytest.mark.parametrize("plan", PLANS)
def test_the_layer_index_reaches_the_heads_under_every_plan(plan):
    config = dataclasses.replace(BALANCED, sharing=PLANS[plan])
    assert run(config, capture=("layer_index",)).captured["layer_index"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("sharing", ["separate", "albert"])
def test_auxiliary_losses_are_summed_over_layers_and_have_gradients(sharing, remat):
    compute = models.Compute(remat=remat)
    config = dataclasses.replace(BALANCED, sharing=sharing, compute=compute)
    params = random_params(config)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return config.build().apply({"params": params}, TOKENS).losses["balance"]

    value, gradient = loss(params)
    gate = params["layers"]["attention"]["balance_gate"]
    uses = 4 / len(gate)
    assert_close(value, uses * jnp.sum(gate**2))
    assert_close(gradient["layers"]["attention"]["balance_gate"], 2 * uses * gate)


def test_keys_of_an_earlier_layer_are_shared():
    """A layer under cross-layer attention captures the keys of the layer that made them."""
    plan = Plan(attention=(0, 1, 2), ffn=(0, 1, 2), kv=(0, "@0", 1))
    k = run(dataclasses.replace(SMALL, sharing=plan), capture=("k",)).captured["k"]
    assert (k[0] == k[1]).all()
    assert not (k[1] == k[2]).all()
