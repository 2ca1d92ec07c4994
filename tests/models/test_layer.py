"""One layer and its parts against Flax's own modules and the definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from random_models import random_like
from scipy.special import erf

from attnlab import Plan, heads, layer_norm, models, multi_head_attention, rms_norm
from attnlab.models import FFN, FeedForward, LayerSpec, LayerStack, ModelConfig, MultiHeadAttention
from attnlab.models.ffn import dropout, ffn_shapes
from attnlab.models.specs import Activation, NormPosition

HEADS = heads.Standard(width=6, num_heads=2)
SPEC = LayerSpec(heads=HEADS, ffn=FFN(width=10), is_causal=True)
PLAN = Plan(attention=(0, 1), ffn=(0, 1))
WIDE = heads.Wide(width=6, num_heads=2)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(spec):
    inits, key = models.init_layer(spec), jax.random.key(0)
    return random_like({name: jax.eval_shape(init, key) for name, init in inits.items()})


def own(params):
    """The weights of heads without the norms beside them."""
    return {name: a for name, a in params.items() if not isinstance(a, dict)}


def test_a_layer_of_attention_alone():
    """FFN of width 0: no weight, no norm, no value. The output of attention is scaled, its bias
    too."""
    layout = dataclasses.replace(HEADS, biases=("o",))
    spec = LayerSpec(heads=layout, ffn=FFN(width=0), attention=models.Attention(output_scale=3.0))
    params, x = make(spec), draw(2, 5, 6, seed=9)
    assert params["ffn"] == {}
    a = params["attention"]
    expected = x + 3 * multi_head_attention(own(a), layer_norm(a["norm"], x), layout)
    assert_close(models.transformer_layer(params, x, spec).x, expected)
    config = ModelConfig(ffn=FFN(width=0), num_layers=2, sharing="albert")
    assert set(models.param_shapes(config)["layers"]) == {"attention"}


@pytest.mark.parametrize("position", NormPosition.__args__)
def test_cross_attention_comes_between(position):
    cross = heads.Standard(width=6, num_heads=3)
    spec = dataclasses.replace(SPEC, norm=models.Norm(position=position, kind="rms"), cross=cross)
    params, x, source = make(spec), draw(2, 5, 6, seed=9), draw(2, 4, 6, seed=8)
    mask = jnp.asarray(np.arange(4) < 3)[None, None, None]
    inputs = models.LayerInputs(source=models.Source(source, mask))
    steps = {
        "attention": lambda w, y: multi_head_attention(own(w), y, HEADS, is_causal=True),
        "cross": lambda w, y: multi_head_attention(own(w), y, cross, source, mask=mask),
        "ffn": lambda w, y: models.feed_forward(own(w), y, SPEC.ffn),
    }

    @jax.jit
    def both(params, x):
        y = x
        for sublayer, f in steps.items():
            w = params[sublayer]
            if position == "after":
                y = y + rms_norm(w["norm_after"], f(w, y), eps=1e-5)
                continue
            if position == "pre_ffn" and sublayer == "attention":
                y = y + f(w, y)
                continue
            norm = params["attention"]["norm"] if position == "parallel_one" else w["norm"]
            normed = rms_norm(norm, x if position.startswith("parallel") else y, eps=1e-5)
            if position.startswith("post"):
                y = rms_norm(w["norm"], y + f(w, y), eps=1e-5)
            elif position == "sandwich":
                y = y + rms_norm(w["norm_after"], f(w, normed), eps=1e-5)
            else:
                y = y + f(w, normed)
        return models.transformer_layer(params, x, spec, inputs).x, y

    assert_close(*both(params, x))


@pytest.mark.parametrize("std", [None, 0.7])
def test_initial_scales(std):
    """Those of what writes into the residual stream by the depth of each stack."""
    config = ModelConfig(
        kind="encoder_decoder", num_layers=1, encoder=models.EncoderConfig(num_layers=8),
        init=models.Init(std=std, residual="depth"),
    )  # fmt: skip
    tokens = jnp.ones((1, 2), int)
    params = jax.jit(config.build().init)(jax.random.key(0), tokens, source=tokens)["params"]
    for stack, depth in (("layers", 2**-0.5), ("encoder_layers", 0.25)):
        attention, ffn = params[stack]["attention"], params[stack]["ffn"]
        for a, fan_in, scale in (
            (attention["q"], 64, 1), (attention["o"], 64, depth), (ffn["up"], 64, 1),
            (ffn["down"], 256, depth),
        ):  # fmt: skip
            np.testing.assert_allclose(jnp.std(a), scale * (std or fan_in**-0.5), rtol=0.03)
        np.testing.assert_array_equal(ffn["norm"]["scale"], 1)


# FFN, dropout, modules ----------------------------------------------------------------------------


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", Activation.__args__)
def test_ffn_by_hand(activation, bias):
    spec = FFN(width=5, activation=activation, bias=bias)
    shapes = ffn_shapes(3, spec).items()
    params = {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes)}
    x = draw(2, 4, 3, seed=9)
    got = jax.jit(lambda w, x: models.feed_forward(w, x, spec))(params, x)
    w = {name: np.asarray(a) for name, a in params.items()}

    def dense(name, x):
        return x @ w[name] + w.get(f"{name}_bias", 0)

    f = ACTIVATIONS[activation.removeprefix("gated_")]
    hidden = dense("up", np.asarray(x))
    is_gated = activation.startswith("gated_")
    hidden = f(dense("gate", np.asarray(x))) * hidden if is_gated else f(hidden)
    assert_close(got, jnp.asarray(dense("down", hidden), jnp.float32))
    assert ("up_bias" in w) == bias


def test_dropout_keeps_the_mean_and_needs_a_key():
    x = jnp.ones((100, 100))
    dropped = dropout(x, 0.2, jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, 1.25}
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)
    assert dropout(x, 0.2, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_options_of_a_module_and_of_its_call():
    """Those of the call take precedence."""
    module, x = MultiHeadAttention(HEADS, dropout_rate=0.5), draw(2, 5, 6)
    variables = module.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"pass rngs=\{'dropout': key\}"):
        module.apply(variables, x, deterministic=False)
    with pytest.raises(ValueError, match="nonsense"):
        module.apply(variables, x, implementation="nonsense")
    own = {"dropout_rate": 0.9, "dropout_key": jax.random.key(1)}
    call = {"deterministic": False, "rngs": {"dropout": jax.random.key(2)}, **own}
    expected = multi_head_attention(variables["params"]["heads"], x, HEADS, **own)
    assert_close(module.apply(variables, x, **call), expected)
    with pytest.raises(ValueError, match="a width of at least 1, not 0"):
        FeedForward(FFN(width=0)).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="ffn must be of type FFN, not 7"):
        FeedForward(7).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="num_heads"):
        MultiHeadAttention(num_heads=4)


def run_stack(params, x, **options):
    layers = {"layers": models.LayersOfType(params=params, plan=PLAN, spec=SPEC)}
    return models.run_layers(layers, ["layers"] * 2, x, **options)


MODULES = {
    # name -> module, what it computes, options, a module of other parameters, the error for these
    "heads": (
        MultiHeadAttention(HEADS, dropout_rate=0.5),
        lambda w, x, **options: multi_head_attention(w["heads"], x, HEADS, **options),
        {"is_causal": True}, MultiHeadAttention(WIDE), r"'heads/k' has shape \(6, 2, 6\)",
    ),
    "FFN": (
        FeedForward(FFN(width=7), dropout_rate=0.5),
        lambda w, x: models.feed_forward(w["ffn"], x, FFN(width=7)), {},
        FeedForward(FFN(width=8)), r"'ffn/down' has shape \(8, 6\)",
    ),
    "stack": (
        LayerStack(SPEC, PLAN), run_stack, {"capture": ("probs", "residual")},
        LayerStack(SPEC, Plan(attention=(0, 0), ffn=(0, 1))), "layers/attention/k.*change_plan",
    ),
    "model": (
        ModelConfig().build(), lambda w, x: models.run_model(w, x, ModelConfig()), {},
        ModelConfig(width=60).build(), r"'embedding' has shape \(256",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_own_parameters_and_call_the_functions(name):
    """They refuse those of another module, what is no parameters, and unknown options."""
    module, function, options, other, message = MODULES[name]
    key, x = jax.random.key(0), draw(2, 5, 6)
    x = jnp.abs(x[..., 0]).astype(int) if name == "model" else x
    variables = jax.jit(module.init)(key, x)
    got = module.apply(variables, x, **options)
    assert_close(got, function(variables["params"], x, **options))
    another = jax.tree.map(lambda a: jnp.zeros(a.shape), jax.eval_shape(other.init, key, x))
    for given, part in (
        (another, message),
        *((one, r"takes \{'params': params\}") for one in (another["params"], x, {"params": x})),
        ({"params": another}, "'params': params"),
        ({"params": {}}, "is missing"),
    ):
        with pytest.raises(ValueError, match=part):
            module.apply(given, x)
    with pytest.raises(TypeError, match="training"):
        module.init(key, x, training=True)
    if name != "heads":
        with pytest.raises(TypeError, match="training"):
            module.apply(variables, x, training=True)
