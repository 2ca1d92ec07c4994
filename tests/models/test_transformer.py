"""What a model promises: its init, values, auxiliary losses, layer indices, encoded sources; ids
that are not in the table never read another token's row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from flax.core import freeze
from test_models import SMALL, SOURCE, TOKENS, change, make

from attnlab import heads, models
from attnlab.models import Alibi, Compute, Embedding, NoPositions, OutputHead
from attnlab.models.embed import embed


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


# Ids ----------------------------------------------------------------------------------------------


def test_an_id_outside_of_the_table():
    """Is refused; within `jit` it gives NaN in its text, and in no other text of the batch."""
    run, params = make()
    for bad in (19, 20, -1, -19, 2**31 - 1, -(2**31)):
        for array in (np.array, jnp.array):
            with pytest.raises(ValueError, match=rf"token id {bad} at \[0, 2\].* 0 to 18"):
                SMALL.build().apply({"params": params}, array([[1, 2, bad, 3]]))
        logits = run(params, jnp.array([[1, 2, bad, 3], [1, 2, 18, 0]])).logits
        assert np.isnan(logits[0, 2:]).all()
        assert np.isfinite(logits[1]).all()


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder_decoder"])
def test_padding_may_hold_any_id(kind):
    output = OutputHead(pooler="mean", num_classes=2) if kind != "encoder_decoder" else OutputHead()
    config, mask = change(SMALL, kind=kind, output=output), jnp.array([[True, True, False]])
    run, params = make(config)
    for call in (run, lambda params, *a, **b: config.build().apply({"params": params}, *a, **b)):
        got = []
        for last in (-100, 0):
            text = jnp.array([[1, 2, last]])
            source = {"source": text, "source_padding_mask": mask} if config.encoder else {}
            got.append(call(params, text, padding_mask=mask, **source))
        np.testing.assert_array_equal(*(outputs.logits[:, :2] for outputs in got))
        np.testing.assert_array_equal(*(outputs.classes for outputs in got))


def test_token_types_too():
    run, params = make(change(SMALL, kind="encoder", embedding=Embedding(token_types=2)))
    tokens, types = jnp.array([[1, 2, 3]]), jnp.array([[0, 1, 2]])
    assert np.isnan(run(params, tokens, token_types=types).logits).any()
    assert np.isfinite(run(params, tokens, token_types=types % 2).logits).all()


def test_ids_outside_of_the_table_have_no_gradient():
    config = change(SMALL, positions=NoPositions())

    def loss(table, tokens):
        return jnp.nansum(embed({"embedding": table}, tokens, config))

    gradient = jax.grad(loss)(jnp.ones((7, 2)), jnp.array([[0, 6, 0, 9, -1]]))
    np.testing.assert_array_equal(gradient[:, 0], [2, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int16, jnp.uint32])
@pytest.mark.parametrize(
    "scheme", [Alibi(), models.Relative(buckets=8, max_distance=20), models.Rotary()]
)
def test_ids_and_positions_of_any_integer_dtype(scheme, dtype):
    """Distances between positions may be negative."""
    run, params = make(change(SMALL, num_layers=1, positions=scheme))
    given = np.array([4, 0, 7, 3, 5, 2, 8])
    got = run(params, TOKENS.astype(dtype), positions=given.astype(dtype)).logits
    np.testing.assert_array_equal(got, run(params, TOKENS, positions=given).logits)
