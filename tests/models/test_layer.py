"""One layer and its parts against Flax's own modules and the definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from scipy.special import erf

from attnlab import Plan, capture, heads, layer_norm, models, multi_head_attention, rms_norm
from attnlab.models import FFN, FeedForward, LayerSpec, LayerStack, ModelConfig, MultiHeadAttention
from attnlab.models.ffn import dropout, ffn_shapes
from attnlab.models.specs import Activation, NormPosition

HEADS = heads.Standard(width=6, num_heads=2)
SPEC = LayerSpec(heads=HEADS, ffn=FFN(width=10), is_causal=True)
PLAN = Plan(attention=(0, 1), ffn=(0, 1))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(spec):
    inits = models.init_layer(spec)
    shapes = jax.eval_shape(lambda key: {p: f(key) for p, f in inits.items()}, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [draw(*a.shape, seed=i) for i, a in enumerate(leaves)])


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
    shapes = models.param_shapes(config)
    assert set(shapes["layers"]) == {"attention"}
    assert sum(a.size for a in jax.tree.leaves(shapes)) == models.num_parameters(config)


@pytest.mark.parametrize("position", NormPosition.__args__)
def test_cross_attention_comes_between(position):
    cross = heads.Standard(width=6, num_heads=3)
    spec = dataclasses.replace(SPEC, norm=models.Norm(position=position, kind="rms"), cross=cross)
    params, x, source = make(spec), draw(2, 5, 6, seed=9), draw(2, 4, 6, seed=8)
    mask = jnp.asarray(np.arange(4) < 3)[None, None, None]
    inputs = models.LayerInputs(source=models.Source(source, mask))
    names = ("probs", "cross.probs")
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
        return capture(models.transformer_layer, params, x, spec, inputs, names=names), y

    (outputs, values), expected = both(params, x)
    assert_close(outputs.x, expected)
    assert values["probs"].shape == (2, 2, 5, 5)
    assert values["cross.probs"].shape == (2, 3, 5, 4)
    assert not values["cross.probs"][..., 3].any()


def test_initial_scales():
    spec = LayerSpec(heads=heads.Standard(width=64, num_heads=4), ffn=FFN(width=256))
    inits = models.init_layer(spec, residual_scale=0.5)
    params = jax.jit(lambda key: {p: f(key) for p, f in inits.items()})(jax.random.key(0))
    expected = {("ffn", "up"): 64**-0.5, ("ffn", "down"): 0.5 * 256**-0.5,
                ("attention", "o"): 0.5 * 64**-0.5, ("attention", "q"): 64**-0.5}  # fmt: skip
    for (sublayer, name), std in expected.items():
        np.testing.assert_allclose(jnp.std(params[sublayer][name]), std, rtol=0.03)
    np.testing.assert_array_equal(params["ffn"]["norm"]["scale"], np.ones(64))
    config = models.ModelConfig(
        kind="encoder_decoder", num_layers=1, encoder=models.EncoderConfig(num_layers=8),
        init=models.Init(std=1.0, residual="depth"),
    )  # fmt: skip
    tokens = jnp.ones((1, 2), int)
    params = jax.jit(config.build().init)(jax.random.key(0), tokens, source=tokens)["params"]
    for stack, std in (("layers", 2**-0.5), ("encoder_layers", 0.25)):  # each by its own depth
        np.testing.assert_allclose(jnp.std(params[stack]["attention"]["o"]), std, rtol=0.03)


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


def test_modules_own_parameters_and_call_the_functions():
    layout = heads.Standard(width=12, num_heads=3, biases=("q", "k", "v", "o"))
    x, module = draw(2, 5, 12), MultiHeadAttention(layout, dropout_rate=0.5)
    params = module.init(jax.random.key(0), x)["params"]
    got = module.apply({"params": params}, x, is_causal=True)
    assert_close(got, multi_head_attention(params["heads"], x, layout, is_causal=True))
    with pytest.raises(ValueError, match=r"pass rngs=\{'dropout': key\}"):
        module.apply({"params": params}, x, deterministic=False)
    with pytest.raises(ValueError, match="nonsense"):
        module.apply({"params": params}, x, implementation="nonsense")
    own = {"dropout_rate": 0.9, "dropout_key": jax.random.key(1)}
    got = module.apply(
        {"params": params}, x, deterministic=False, rngs={"dropout": jax.random.key(2)}, **own
    )
    assert_close(got, multi_head_attention(params["heads"], x, layout, **own))
    module = FeedForward(FFN(width=7), dropout_rate=0.5)
    params = module.init(jax.random.key(0), x)["params"]
    assert params["ffn"]["up"].shape == (12, 7)
    with pytest.raises(ValueError, match="a width of at least 1, not 0"):
        FeedForward(FFN(width=0)).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="ffn must be of type FFN, not 7"):
        FeedForward(7).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="num_heads"):
        MultiHeadAttention(num_heads=4)
    assert_close(
        module.apply({"params": params}, x), models.feed_forward(params["ffn"], x, FFN(width=7))
    )
    module, x = LayerStack(SPEC, PLAN), draw(2, 5, 6)
    params, names = module.init(jax.random.key(0), x)["params"], ("probs", "residual")
    layers = {"layers": models.LayersOfType(params=params, plan=PLAN, spec=SPEC)}
    got = module.apply({"params": params}, x, capture=names)
    assert_close(got, models.run_layers(layers, ["layers"] * 2, x, capture=names))


ALBERT = Plan(attention=(0, 0), ffn=(0, 0))
OTHERS = {
    "heads": (
        MultiHeadAttention(heads.Wide(width=6, num_heads=2)), MultiHeadAttention(HEADS),
        r"'heads/k' has shape \(6, 2, 3\)",
    ),
    "FFN": (FeedForward(FFN(width=7)), FeedForward(FFN(width=8)), r"'ffn/down' has shape \(8, 6\)"),
    "plan": (LayerStack(SPEC, ALBERT), LayerStack(SPEC, PLAN), "change_plan"),
    "stack": (
        LayerStack(SPEC, PLAN),
        LayerStack(dataclasses.replace(SPEC, heads=heads.Wide(width=6, num_heads=2)), PLAN),
        "layers/attention/k",
    ),
    "model": (ModelConfig().build(), ModelConfig(width=60).build(), r"'embedding' has shape \(256"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_modules_refuse_weights_of_another_and_what_is_no_weights(name):
    module, other, message = OTHERS[name]
    x = jnp.ones((1, 5), int) if name == "model" else jnp.ones((1, 5, 6))
    shapes = jax.eval_shape(other.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda a: jnp.zeros(a.shape), shapes)
    params = variables["params"]
    for given, part in (
        (variables, message),
        (params, r"takes \{'params': params\}"),
        ({"params": variables}, "'params': params"),
        ({"params": {}}, "is missing"),
    ):
        with pytest.raises(ValueError, match=part):
            module.apply(given, x)
    with pytest.raises(TypeError, match="training"):
        module.init(jax.random.key(0), x, training=True)
    if name != "heads":
        with pytest.raises(TypeError, match="training"):
            module.apply(variables, x, training=True)
