"""Public functions under jit, grad, vmap, scan and shard_map, in three precisions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, two_devices
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab import heads, masks
from attnlab.models import (
    FFN,
    Compute,
    LayerSpec,
    Learned,
    ModelConfig,
    ModelInputs,
    Rotary,
    init_layer,
)
from attnlab.models.ffn import init_ffn
from attnlab.sharing import Plan

LAYOUT = heads.Standard(
    width=6, num_heads=3, num_kv_heads=1, value_dim=4, biases=("q", "k", "v", "o")
)
SPEC = LayerSpec(heads=LAYOUT, ffn=FFN(width=5))
PLAN = Plan(attention=(0, 1, 0), ffn=(0, 0, 1))
MODEL = ModelConfig(
    vocab_size=11, max_len=5, width=6, num_layers=2, heads=heads.Standard(num_heads=3, head_dim=4),
    ffn=FFN(width=7), sharing="albert", positions=Rotary(),
)  # fmt: skip


def draw(dtype, *shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def tree(dtype, init):
    """Random weights in the shapes that `init(key)` makes."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda a: draw(dtype, *a.shape), shapes)


def init_sublayers(key):
    return {name: init(key) for name, init in init_layer(SPEC).items()}


def init_model(key):
    return MODEL.build().init(key, jnp.ones((1, 5), int))["params"]


def hidden(params, x):
    config = dataclasses.replace(MODEL, compute=Compute(dtype=x.dtype.name))
    return attnlab.run_model(params, x, config).hidden


def init_heads(key):
    return heads.init(key, LAYOUT)


def module(built, output=lambda made: made):
    """(function of weights and inputs, init) of a Flax module."""
    example = jnp.ones((1, 5, 6))
    return (
        lambda params, x: output(built.apply({"params": params}, x)),
        lambda key: built.init(key, example)["params"],
    )


def init_factors(key):
    return jnp.ones(4)


QKV, INPUTS, MIXTURES = (2, 5, 3, 4), (2, 5, 6), (2, 5, 11)
ATTENTION, INIT_ATTENTION = module(attnlab.MultiHeadAttention(LAYOUT))
FEED_FORWARD, INIT_FFN = module(attnlab.FeedForward(FFN(width=7)))
LAYERS, INIT_LAYERS = module(attnlab.LayerStack(SPEC, PLAN), lambda made: made.x)
EDGES = attnlab.masks.Edges(jnp.array([0, 1, 2, 4, 0]), jnp.array([1, 1, 0, 3, 4]))


# name -> (function of (weights, batch), init of the weights, shape of the batch)
FUNCTIONS = {
    "dot_product_attention": (
        lambda w, x: attnlab.dot_product_attention(x, x, x * w, is_causal=True), init_factors, QKV
    ),
    "attention over edges": (
        lambda w, x: attnlab.dot_product_attention(x, x, x * w, mask=EDGES), init_factors, QKV
    ),
    "attention_fn": (
        lambda w, x: attnlab.adapters.attention_fn(x, x, x * w, mask=masks.causal(5)),
        init_factors, QKV,
    ),
    "multi_head_attention": (
        lambda w, x: attnlab.multi_head_attention(w, x, LAYOUT), init_heads, INPUTS
    ),
    "feed_forward": (
        lambda w, x: attnlab.feed_forward(w, x, FFN(width=5)),
        lambda key: init_ffn(key, 6, FFN(width=5)), INPUTS,
    ),
    "transformer_layer": (
        lambda w, x: attnlab.transformer_layer(w, x, SPEC).x, init_sublayers, INPUTS
    ),
    "MultiHeadAttention": (ATTENTION, INIT_ATTENTION, INPUTS),
    "FeedForward": (FEED_FORWARD, INIT_FFN, INPUTS),
    "LayerStack": (LAYERS, INIT_LAYERS, INPUTS),
    "run_model": (hidden, init_model, MIXTURES),
}  # fmt: skip


def call_of(name, dtype):
    """A function with its weights and its batch."""
    run, init, shape = FUNCTIONS[name]
    return run, tree(dtype, init), draw(dtype, *shape)


def all_transforms(run, w, x):
    """Results of `run` under each transformation, all of them per batch row."""
    mesh, rows = two_devices(), jax.tree.map(lambda a: a[:, None], x)
    return {
        "plain": run(w, x),
        "vmap": jax.vmap(run, (None, 0))(w, rows)[:, 0],
        "scan": jax.lax.scan(lambda carry, row: (carry, run(w, row)), None, rows)[1][:, 0],
        "shard_map": jax.shard_map(
            run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
        )(w, x),
    }


@pytest.mark.parametrize("dtype", deep(["float32", "bfloat16", "float64"], "float32"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transformations(name, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    run, w, x = call_of(name, dtype)

    @jax.jit
    def everything(w, x):
        gradients = jax.grad(lambda w, x: jnp.sum(run(w, x) ** 2), (0, 1))(w, x)
        return all_transforms(run, w, x), gradients

    results, gradients = everything(w, x)
    for result in results.values():
        assert_close(result, results["plain"])
    for gradient, leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves((w, x)), strict=True):
        assert gradient.shape == leaf.shape
        assert np.isfinite(np.asarray(gradient, np.float64)).all()
    assert np.abs(np.asarray(gradients[1], np.float64)).max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_precision_is_kept(name, dtype, request):
    """Of the result and of every gradient."""
    if dtype == "float64":
        request.getfixturevalue("x64")
    run, *arrays = call_of(name, dtype)
    value = lambda w, x: (jnp.sum(run(w, x)), run(w, x))
    found = jax.eval_shape(jax.grad(value, (0, 1), True), *arrays)
    assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype(dtype)}


def by_rows(run):
    """`run(params, tokens)` with the rows of tokens on two devices, by the default `shard_map`."""
    return jax.shard_map(run, mesh=two_devices(), in_specs=(P(), P("data")), out_specs=P("data"))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("plan", ["separate", "cla:2"])
def test_arrays_that_a_call_makes_inside_shard_map(plan, padded):
    """Buffers of shared keys and values, and a cache."""
    config = dataclasses.replace(MODEL, num_layers=4, sharing=plan)
    params = tree("float32", lambda key: config.build().init(key, jnp.ones((1, 5), int))["params"])
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 0]])

    def logits(params, tokens, cache=None):
        inputs = ModelInputs(padding_mask=tokens != 0 if padded else None, cache=cache)
        found = attnlab.run_model(params, tokens, config, inputs).logits
        return jnp.where((tokens != 0)[..., None], found, 0)

    def decoded(params, tokens):
        return logits(params, tokens, config.init_cache(len(tokens), 5))

    @jax.jit
    def run(*given):
        return logits(*given), by_rows(logits)(*given), by_rows(decoded)(*given)

    whole, split, cached = run(params, tokens)
    assert_close(split, whole)
    assert_close(cached, whole, loosen=10)


def test_weights_of_numpy_may_be_closed_over():
    """Also by a compiled function that is given positions."""
    config = dataclasses.replace(MODEL, positions=Learned())
    shapes = jax.eval_shape(lambda: config.build().init(jax.random.key(0), jnp.ones((1, 5), int)))
    params = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes)
    inputs = ModelInputs(positions=np.arange(3))
    run = lambda tokens: attnlab.run_model(params, tokens, config, inputs).logits
    assert jax.eval_shape(run, jnp.ones((2, 3), int)).shape == (2, 3, 11)
