"""What a model promises: padding, captured values, auxiliary losses, layer indices."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from flax.core import freeze

from attnlab import heads, models
from attnlab.models import FFN, ModelConfig, Norm, OutputHead
from attnlab.models.specs import Positions
from attnlab.sharing import Plan

SMALL = ModelConfig(
    vocab_size=19, max_len=9, width=12, num_layers=3, heads=heads.Standard(num_heads=3),
    ffn=FFN(width=10),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 7)))
PLANS = {
    "separate": "separate",
    "albert": "albert",
    "cycle": "cycle:2",
    "cla": "cla:2",
    "relaxed": "relaxed:2",
}
TYPES = ((2, models.LayerOverrides(window=2)), (1, models.LayerOverrides(ffn=FFN(width=6))))


def random_params(config):
    """Large random parameters, so that attention is not uniform."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), models.param_shapes(config)
    )


def run(config, tokens=TOKENS, params=None, **inputs):
    params = random_params(config) if params is None else params
    model = config.build()
    return jax.jit(lambda p, tokens: model.apply({"params": p}, tokens, **inputs))(params, tokens)


@pytest.mark.parametrize("pooler", deep(["mean", "max", "first"], "max"))
def test_padding_may_hold_nan(pooler):
    """Tokens and pooled output are those of the text without padding."""
    output = OutputHead(pooler=pooler, num_classes=2)
    config = dataclasses.replace(SMALL, kind="encoder", output=output)
    words = jax.nn.one_hot(TOKENS, 19)
    mask = jnp.arange(7) < 5
    padded = jnp.where(mask[:, None], words, jnp.nan)
    params = random_params(config)

    got = run(config, padded, params, padding_mask=jnp.stack([mask] * 2))
    expected = run(config, words[:, :5], params)
    assert_close(got.logits[:, :5], expected.logits)
    assert_close(got.classes, expected.classes)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        dataclasses.replace(SMALL, layer_types=TYPES),
        dataclasses.replace(SMALL, kind="encoder_decoder", sharing="relaxed:2"),
        dataclasses.replace(SMALL, sharing="cla:2", norm=Norm(position="sandwich")),
    ],
)  # fmt: skip
def test_shapes_are_those_of_the_initial_parameters(config):
    model = config.build()
    inputs = {"source": TOKENS} if config.encoder is not None else {}
    initial = jax.eval_shape(lambda key: model.init(key, TOKENS, **inputs), jax.random.key(0))
    assert initial["params"] == models.param_shapes(config)


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


def test_a_patch_of_init_may_call_another_model():
    other = SMALL.build()
    variables = other.init(jax.random.key(1), TOKENS)
    patch = {"embeddings": lambda x, layer: x + other.apply(variables, TOKENS).logits.sum()}
    init = SMALL.build().init(jax.random.key(0), TOKENS, patch=patch)
    assert jax.tree.map(jnp.shape, init) == jax.tree.map(jnp.shape, variables)


def test_a_config_is_written_as_it_is_read():
    config = ModelConfig(
        kind="encoder", width=32, heads=heads.Wide(num_heads=2, extras=(heads.Sink(),)),
        norm=Norm(kind="rms", eps=1e-6), positions=models.Rotary(base=1e6), sharing="albert",
        layer_types=((2, models.LayerOverrides(window=3)), (1, models.LayerOverrides())),
        output=OutputHead(pooler="mean", num_classes=3), compute=models.Compute(dtype="bfloat16"),
    )  # fmt: skip
    names = {**vars(heads), **vars(models)}
    assert eval(repr(config), names) == config
    assert "ffn" not in repr(config)


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


def test_values_whose_shape_differs_between_layer_types():
    types = ((1, models.LayerOverrides(heads=heads.Standard(num_heads=2))), TYPES[1])
    config = dataclasses.replace(SMALL, layer_types=types)
    captured = run(config, capture=("q", "residual")).captured
    assert captured["residual"].shape == (3, 2, 7, 12)
    each = models.captured_per_layer(captured, "q", config.layer_names)
    assert [q.shape for q in each] == [(2, 7, 2, 6), (2, 7, 3, 4), (2, 7, 2, 6)]


# Extras from outside ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Balanced(heads.Extra):
    """A learnt gate per head, with the loss sum_n gate_n^2; captures the layer index."""

    losses: ClassVar[tuple[str, ...]] = ("balance",)

    def weights(self, layout):
        return {"balance_gate": heads.Weight("attend", out_axes=("num_heads",), constant=1.0)}

    def values(self, layout):
        return {"layer_index": "", "balance": ""}

    def after_attention(self, params, x, heads, call):
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


def test_losses_of_layer_types_and_stacks():
    types = ((1, models.LayerOverrides(window=1)), (1, models.LayerOverrides()))
    config = dataclasses.replace(BALANCED, layer_types=types)
    outputs = run(config, capture=("layer_index", "balance"))
    assert outputs.captured["layer_index"].tolist() == [0, 1, 2, 3]
    assert_close(jnp.sum(outputs.captured["balance"]), outputs.losses["balance"])
    params = random_params(config)
    gates = [params[name]["attention"]["balance_gate"] for name in config.stacks]
    assert_close(outputs.losses["balance"], sum(jnp.sum(g**2) for g in gates))
    both = run(dataclasses.replace(BALANCED, kind="encoder_decoder"), source=TOKENS)
    assert set(both.losses) == {"balance", "cross.balance", "encoder.balance"}


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FFN(width=-1), r"ffn\.width.*at least 0.*-1"),
        (lambda: FFN(activation="swiglu"), r"'swiglu': write 'gated_silu'"),
        (lambda: FFN(activation="swish"), r"ffn\.activation 'swish'.*known: gelu"),
        (lambda: Norm(position="between"), r"norm\.position 'between'.*sandwich"),
        (lambda: models.Dropout(rate=1.0), r"dropout\.rate.*below 1.*1\.0"),
        (lambda: models.Rotary(fraction=2.0), r"positions\.fraction.*at most 1.*2\.0"),
        (lambda: OutputHead(num_classes=3), r"output\.num_classes.*pooler"),
        (lambda: models.Compute(dtype="float16"), r"compute\.dtype 'float16'.*bfloat16"),
        (lambda: ModelConfig(num_heads=8), "unknown keyword 'num_heads'"),
        (lambda: ModelConfig(plan="albert"), "unknown keyword 'plan'"),
        (lambda: ModelConfig(layout="wide"), "unknown keyword 'layout'"),
        (lambda: ModelConfig(hidden_size=8), "unknown keyword 'hidden_size'"),
        (lambda: ModelConfig(depth=8), "unknown keyword 'depth'"),
        (lambda: ModelConfig(n_positions=8), "unknown keyword 'n_positions'"),
        (lambda: ModelConfig(tied=True), "unknown keyword 'tied'"),
        (lambda: FFN(d_model=8), "'d_model'; known: width"),
        (lambda: FFN(d_ff=8), "unknown keyword 'd_ff'"),
        (lambda: Norm("rms"), r"as in Norm\(kind=\.\.\.\), not 'rms'; known: kind, position"),
        (lambda: ModelConfig(window=8), "unknown keyword 'window'"),
        (lambda: ModelConfig(heads="wide"), r"heads must be a Layout.*'wide'"),
        (lambda: ModelConfig(ffn=64), r"ffn must be of type FFN, not 64; write FFN\("),
        (lambda: ModelConfig(attention="xla"), r"'xla'; write Attention\("),
        (lambda: ModelConfig(dropout=0.1), r"0\.1; write Dropout\("),
        (lambda: ModelConfig(positions="rope"), r"'rope'; write .*Rotary\("),
        (lambda: ModelConfig(sharing=(0, 0, 0, 0)), r"write 'albert' or Plan\(attention="),
        (lambda: ModelConfig(width=65), r"width 65 is not divisible"),
        (lambda: ModelConfig(encoder=models.EncoderConfig()), r"encoder is for.*decoder"),
        (lambda: ModelConfig(layer_types=((1, {"init": 1}),)), r"cannot override 'init'.*known"),
        (lambda: ModelConfig(sharing="albrt"), r"albrt.*albert"),
        (lambda: models.Attention(layer_scales=3.0), r"layer_scales must be a tuple.*\(3\.0,\)"),
        (lambda: models.Attention(implementation="flsh"), r"unknown implementation 'flsh'.*dense"),
        (lambda: models.Dropout(places="ffn"), r"dropout\.places must be a tuple.*'ffn'"),
        (lambda: ModelConfig(layer_types=((1, {"full_attention": 3}),)), r"full_attention.*3"),
        (lambda: ModelConfig(layer_types=((1, {"heads": 5}),)), r" 5; write Standard\(num_heads"),
        (lambda: ModelConfig(layer_types=((1, {"sharing": [0]}),)), r"sharing must be.*\[0\]"),
        (
            lambda: ModelConfig(
                kind="encoder_decoder", num_layers=2, sharing=Plan(attention=(0, 1), ffn=(0, 1)),
                encoder=models.EncoderConfig(num_layers=3),
            ),
            r"encoder\.sharing gives.* plan is one for 2 layers, not for 3",
        ),
    ],
)  # fmt: skip
def test_errors_of_specs_name_field_and_value(make, message):
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        make()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Shifted(Positions):
    """Positions from outside the package."""

    shift: int = -2


def test_a_spec_from_outside_states_no_bounds():
    assert Shifted(shift=-5).shift == -5
    with pytest.raises(ValueError, match=r"positions\.shift must be a whole number, not 1\.5"):
        Shifted(shift=1.5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"source": TOKENS}, "source is for kind='encoder_decoder'"),
        ({"head_mask": jnp.ones((2, 3))}, r"head_mask \(2, 3\) must be .*\(3, 3\)"),
        ({"cache": {"k": jnp.ones(3)}}, "config.init_cache"),
        ({"capture": "probs"}, "capture must be a tuple"),
        ({"patch": {"probs": 3}}, "patch of 'probs' must be a function"),
    ],
)  # fmt: skip
def test_errors_of_inputs(inputs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run(SMALL, **inputs)


def test_explain_reports_every_attention():
    config = dataclasses.replace(SMALL, kind="encoder_decoder")
    reports = models.explain_model(config, {"tokens": TOKENS, "source": TOKENS})
    assert {stack: set(parts) for stack, parts in reports.items()} == {
        "encoder_layers": {"self"}, "layers": {"self", "cross"},
    }  # fmt: skip
    assert "dense" in reports["layers"]["cross"]["implementation"]


def test_keys_of_an_earlier_layer_are_shared():
    """A layer under cross-layer attention captures the keys of the layer that made them."""
    plan = Plan(attention=(0, 1, 2), ffn=(0, 1, 2), kv=(0, "@0", 1))
    k = run(dataclasses.replace(SMALL, sharing=plan), capture=("k",)).captured["k"]
    assert (k[0] == k[1]).all()
    assert not (k[1] == k[2]).all()
