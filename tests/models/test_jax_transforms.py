"""Public functions under jit, grad, vmap, scan and shard_map, in three precisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, shape, two_devices
from jax.sharding import PartitionSpec as P
from random_models import random_like, random_params
from test_models import SMALL, change

import attnlab
from attnlab import heads, masks, models
from attnlab.models import FFN, LayerSpec, ModelInputs
from attnlab.models.ffn import init_ffn
from attnlab.sharing import Plan

LAYOUT = heads.Standard(
    width=6, num_heads=3, num_kv_heads=1, value_dim=4, biases=("q", "k", "v", "o")
)
SPEC = LayerSpec(heads=LAYOUT, ffn=FFN(width=5))
PLAN = Plan(attention=(0, 1, 0), ffn=(0, 0, 1))
MODEL = change(SMALL, sharing="albert", positions=models.Rotary())


def shapes(init, *inputs):
    """Of the weights that `init(key, *inputs)` makes."""
    return jax.eval_shape(init, jax.random.key(0), *inputs)


def hidden(params, x):
    config = change(MODEL, compute=models.Compute(dtype=x.dtype.name))
    return attnlab.run_model(params, x, config).hidden


def module(built, output=lambda made: made):
    """(function of weights and inputs, shapes of the weights) of a Flax module."""
    made = shapes(built.init, jnp.ones((1, 5, 6)))["params"]
    return lambda params, x: output(built.apply({"params": params}, x)), made


QKV, INPUTS, MIXTURES = (2, 5, 3, 4), (2, 5, 6), (2, 5, 19)
FACTORS = shape(4)
EDGES = attnlab.masks.Edges(jnp.array([0, 1, 2, 4, 0]), jnp.array([1, 1, 0, 3, 4]))


# name -> (function of (weights, batch), shapes of the weights, shape of the batch)
FUNCTIONS = {
    "dot_product_attention": (
        lambda w, x: attnlab.dot_product_attention(x, x, x * w, is_causal=True), FACTORS, QKV
    ),
    "attention over edges": (
        lambda w, x: attnlab.dot_product_attention(x, x, x * w, mask=EDGES), FACTORS, QKV
    ),
    "attention_fn": (
        lambda w, x: attnlab.adapters.attention_fn(x, x, x * w, mask=masks.causal(5)), FACTORS, QKV
    ),
    "multi_head_attention": (
        lambda w, x: attnlab.multi_head_attention(w, x, LAYOUT),
        shapes(lambda key: heads.init(key, LAYOUT)), INPUTS,
    ),
    "feed_forward": (
        lambda w, x: attnlab.feed_forward(w, x, SPEC.ffn),
        shapes(lambda key: init_ffn(key, 6, SPEC.ffn)), INPUTS,
    ),
    "transformer_layer": (
        lambda w, x: attnlab.transformer_layer(w, x, SPEC).x,
        {name: shapes(init) for name, init in models.init_layer(SPEC).items()}, INPUTS,
    ),
    "MultiHeadAttention": (*module(attnlab.MultiHeadAttention(LAYOUT)), INPUTS),
    "FeedForward": (*module(attnlab.FeedForward(FFN(width=7))), INPUTS),
    "LayerStack": (*module(attnlab.LayerStack(SPEC, PLAN), lambda made: made.x), INPUTS),
    "run_model": (hidden, models.param_shapes(MODEL), MIXTURES),
}  # fmt: skip


def call_of(name, dtype, request):
    """A function with its weights and its batch."""
    if dtype == "float64":
        request.getfixturevalue("x64")
    run, weights, batch = FUNCTIONS[name]
    return run, *(random_like(a, dtype=dtype) for a in (weights, shape(*batch)))


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
    run, w, x = call_of(name, dtype, request)

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
    run, *arrays = call_of(name, dtype, request)
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
    config = change(MODEL, num_layers=4, sharing=plan)
    params = random_params(config)
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
    config = change(MODEL, positions=models.Learned())
    params = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), models.param_shapes(config))
    inputs = ModelInputs(positions=np.arange(3))
    run = lambda tokens: attnlab.run_model(params, tokens, config, inputs).logits
    assert jax.eval_shape(run, jnp.ones((2, 3), int)).shape == (2, 3, 19)
