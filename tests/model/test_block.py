"""One layer against Flax's own modules and the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import (
    HeadSpec,
    ModelConfig,
    feed_forward,
    layer_norm,
    multi_head_attention,
    rms_norm,
    transformer_block,
    unique_parameters,
)
from attnlab.model.block import NORMS, BlockSpec, init_block


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(spec):
    parts = init_block(spec)
    shapes = jax.eval_shape(lambda key: {p: f(key) for p, f in parts.items()}, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [draw(*a.shape, seed=i) for i, a in enumerate(leaves)])


@pytest.mark.parametrize("norm", NORMS)
def test_order_of_norm_and_residual(norm):
    spec = BlockSpec(HeadSpec("standard", 6, 2), ffn_width=10, norm=norm, is_causal=True)
    w, x = make(spec), draw(2, 5, 6, seed=9)
    ran = jax.jit(lambda w, x: transformer_block(w, x, spec=spec, return_probs=True))(w, x)
    got, probs = ran.x, ran.shown["probs"]

    def f(w, y):
        return multi_head_attention(w, y, spec=spec.heads, is_causal=True)

    a, b = w["attention"], w["ffn"]
    if norm.startswith("pre"):
        y = x + f(a, layer_norm(a["norm"], x))
        y = y + feed_forward(b, layer_norm(b["norm"], y))
    elif norm == "sandwich":
        y = x + layer_norm(a["norm_after"], f(a, layer_norm(a["norm"], x)))
        y = y + layer_norm(b["norm_after"], feed_forward(b, layer_norm(b["norm"], y)))
    elif norm == "parallel":
        y = f(a, layer_norm(a["norm"], x)) + feed_forward(b, layer_norm(b["norm"], x)) + x
    else:
        y = layer_norm(a["norm"], x + f(a, x))
        y = layer_norm(b["norm"], y + feed_forward(b, y))
    assert_close(got, y)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
    assert not np.triu(probs, 1).any()


def test_a_layer_of_attention_alone():
    """Without a feed-forward part there is nothing of it: no weight, no norm, no value; what
    attention writes is multiplied by the gain, its bias too."""
    spec = BlockSpec(HeadSpec("standard", 6, 2, biases="o"), ffn_width=0, attention_gain=3.0)
    w, x = make(spec), draw(2, 5, 6, seed=9)
    assert w["ffn"] == {}
    got = transformer_block(w, x, spec=spec).x
    a = w["attention"]
    assert_close(got, x + 3 * multi_head_attention(a, layer_norm(a["norm"], x), spec=spec.heads))
    with pytest.raises(ValueError, match="unknown value 'ffn_in'"):
        transformer_block(w, x, spec=spec, show=("ffn_in",))
    model = ModelConfig(ffn_width=0, num_layers=2, plan="albert")
    made = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    assert set(made["layers"]) == {"attention"}
    assert sum(a.size for a in jax.tree.leaves(made)) == unique_parameters(model)


def test_a_scale_counted_from_one():
    """Weights of 0 are an RMS norm that changes no size; so it starts, in a layer and its heads."""
    heads = HeadSpec("standard", 6, 2, qk_norm="rms_plus_one")
    kind = dict(norm="sandwich", norm_kind="rms_plus_one", norm_bias=False)
    spec = BlockSpec(heads, ffn_width=10, **kind)
    started = {part: init(jax.random.key(0)) for part, init in init_block(spec).items()}
    for norm in (started["ffn"]["norm_after"]["scale"], started["attention"]["q_norm"]):
        assert not np.any(norm)
    w, x = make(spec), draw(2, 5, 6, seed=9)
    from_zero = lambda path, a: a + 1 if "norm" in str(path) else a
    moved = jax.tree_util.tree_map_with_path(from_zero, w)
    plain = spec._replace(norm_kind="rms", heads=dataclasses.replace(heads, qk_norm="rms"))
    got, expected = (
        jax.jit(functools.partial(transformer_block, spec=s))(weights, x).x
        for s, weights in ((spec, w), (plain, moved))
    )
    assert_close(got, expected)


@pytest.mark.parametrize("norm", NORMS)
def test_cross_attention_comes_between(norm):
    spec = BlockSpec(
        HeadSpec("standard", 6, 2),
        ffn_width=10,
        norm=norm,
        norm_kind="rms",
        norm_bias=False,
        is_causal=True,
        cross=HeadSpec("standard", 6, 3),
    )
    w, x, context = make(spec), draw(2, 5, 6, seed=9), draw(2, 4, 6, seed=8)
    hidden = jnp.asarray(np.arange(4) < 3)[None, None, None]

    def run(w, x):
        options = dict(spec=spec, context_mask=hidden, return_probs=True)
        return transformer_block(w, x, context, **options)

    ran = jax.jit(run)(w, x)
    got, probs, cross_probs = ran.x, ran.shown["probs"], ran.shown["cross.probs"]
    steps = {
        "attention": lambda w, y: multi_head_attention(w, y, spec=spec.heads, is_causal=True),
        "cross": lambda w, y: multi_head_attention(w, y, context, spec=spec.cross, mask=hidden),
        "ffn": feed_forward,
    }
    y = x
    for part, f in steps.items():
        norm_of = lambda y, part=part: rms_norm(w[part]["norm"], y, eps=1e-5)
        if norm.startswith("post"):
            y = norm_of(y + f(w[part], y))
        elif norm == "sandwich":
            y = y + rms_norm(w[part]["norm_after"], f(w[part], norm_of(y)), eps=1e-5)
        else:
            y = y + f(w[part], norm_of(x if norm == "parallel" else y))
    assert_close(got, y)
    assert probs.shape == (2, 2, 5, 5)
    assert cross_probs.shape == (2, 3, 5, 4)
    assert not cross_probs[..., 3].any()


def test_dropout_acts_where_it_is_told():
    """Of the outputs of the sublayers: one place alone is neither both nor none."""
    x, results = draw(2, 5, 6, seed=9), []
    for places in ((), ("attention",), ("ffn",), ("attention", "ffn")):
        spec = BlockSpec(
            HeadSpec("standard", 6, 2), ffn_width=10, dropout_rate=0.5, dropout_places=places
        )
        w = make(spec)
        run = jax.jit(lambda k, s=spec: transformer_block(w, x, spec=s, dropout_key=k)[0])  # noqa: B023
        results.append(run(jax.random.key(0)))
    assert_close(results[0], transformer_block(w, x, spec=spec)[0])
    for i, a in enumerate(results):
        assert all(np.abs(a - b).max() > 0.01 for b in results[:i])


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate", "ffn_dropout_rate"])
def test_each_dropout_acts(rate):
    spec = BlockSpec(HeadSpec("standard", 6, 2), ffn_width=10, **{rate: 0.5})
    w, x = make(spec), draw(2, 5, 6, seed=9)
    run = jax.jit(lambda key: transformer_block(w, x, spec=spec, dropout_key=key)[0])
    plain = transformer_block(w, x, spec=spec)[0]
    one, two = run(jax.random.key(0)), run(jax.random.key(1))
    assert np.abs(one - plain).max() > 0.01
    assert np.abs(one - two).max() > 0.01


def test_initial_scales():
    spec = BlockSpec(HeadSpec("standard", 64, 4), ffn_width=256)
    make_one = jax.jit(
        lambda key: {p: f(key) for p, f in init_block(spec, residual_scale=0.5).items()}
    )
    w = make_one(jax.random.key(0))
    expected = {"up": 64**-0.5, "down": 0.5 * 256**-0.5}
    for name, std in expected.items():
        np.testing.assert_allclose(jnp.std(w["ffn"][name]), std, rtol=0.03)
    np.testing.assert_allclose(jnp.std(w["attention"]["o"]), 0.5 * 64**-0.5, rtol=0.03)
    np.testing.assert_allclose(jnp.std(w["attention"]["q"]), 64**-0.5, rtol=0.03)
    np.testing.assert_array_equal(w["ffn"]["norm"]["scale"], np.ones(64))
