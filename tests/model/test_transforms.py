"""Every public function under jit, grad, vmap, scan and shard_map, in three precisions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab import HeadSpec, ModelConfig, Plan, masks, positions
from attnlab.model import block
from attnlab.model.block import BlockSpec

SPEC = HeadSpec("standard", width=6, num_heads=3, num_kv_heads=1, value_dim=4, biases="qkvo")
BLOCK = BlockSpec(SPEC, ffn_width=5)
PLAN = Plan(attention=(0, 1, 0), ffn=(0, 0, 1))
MODEL = ModelConfig(
    vocab_size=11, max_len=5, width=6, num_layers=2, num_heads=3, ffn_width=7, plan="albert"
)


def draw(dtype, *shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def tree(dtype, init):
    """Random weights in the shapes that `init(key)` makes."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda a: draw(dtype, *a.shape), shapes)


def init_block(key):
    return {p: f(key) for p, f in block.init_block(BLOCK).items()}


def init_layers(key):
    return attnlab.init_stacked(block.init_block(BLOCK), key, PLAN)


def stack(w, x):
    def block(w, x, state, own, shared):
        return attnlab.transformer_block(w, x, spec=BLOCK).x, state, None

    return attnlab.run_stack(block, w, PLAN, x)[0][0]


def of_module(module, *example):
    """(function of weights and inputs, weights in the module's own dtype)."""
    init = lambda key: module.init(key, *example)["params"]
    return lambda w, x: module.apply({"params": w}, x), init


ATTENTION, INIT_ATTENTION = of_module(attnlab.MultiHeadAttention(SPEC), jnp.ones((1, 5, 6)))
FFN, INIT_FFN = of_module(attnlab.FeedForward(7), jnp.ones((1, 5, 6)))
LAYERS = attnlab.LayerStack(BLOCK, PLAN)
_, INIT_LAYERS = of_module(LAYERS, jnp.ones((1, 5, 6)))
INIT_HEADS = functools.partial(attnlab.init_heads, spec=SPEC)
X = lambda dtype: draw(dtype, 2, 5, 6)

# name -> (function of (weights, batch), weights of a dtype, batch of a dtype)
FUNCTIONS = {
    "dot_product_attention": (
        lambda w, x: attnlab.dot_product_attention(x, x, x * w, is_causal=True),
        lambda dtype: draw(dtype, 4),
        lambda dtype: draw(dtype, 2, 5, 3, 4),
    ),
    "attention_over_edges": (
        lambda w, x: attnlab.attention_over_edges(
            x, x, x * w, jnp.array([0, 1, 2, 4, 0]), jnp.array([1, 1, 0, 3, 4])
        ),
        lambda dtype: draw(dtype, 4),
        lambda dtype: draw(dtype, 2, 5, 3, 4),
    ),
    "attention_fn": (
        lambda w, x: attnlab.adapters.attention_fn(x, x, x * w, mask=masks.causal(5)),
        lambda dtype: draw(dtype, 4),
        lambda dtype: draw(dtype, 2, 5, 3, 4),
    ),
    "project_heads": (
        lambda w, x: attnlab.project_heads(w, x, spec=SPEC)[0],
        lambda dtype: tree(dtype, INIT_HEADS),
        X,
    ),
    "merge_heads": (
        lambda w, x: attnlab.merge_heads(w, x, spec=SPEC),
        lambda dtype: tree(dtype, INIT_HEADS),
        lambda dtype: draw(dtype, 2, 5, 3, 4),
    ),
    "multi_head_attention": (
        lambda w, x: attnlab.multi_head_attention(w, x, spec=SPEC),
        lambda dtype: tree(dtype, INIT_HEADS),
        X,
    ),
    "feed_forward": (
        attnlab.feed_forward,
        lambda dtype: tree(dtype, lambda key: init_block(key)["ffn"]),
        X,
    ),
    "rms_norm": (attnlab.rms_norm, lambda dtype: {"scale": draw(dtype, 6)}, X),
    "run_layers": (
        lambda w, x: attnlab.run_layers(w, PLAN, x, spec=BLOCK).x,
        lambda dtype: tree(dtype, init_layers),
        X,
    ),
    "layer_norm": (
        attnlab.layer_norm,
        lambda dtype: {"scale": draw(dtype, 6), "bias": draw(dtype, 6)},
        X,
    ),
    "transformer_block": (
        lambda w, x: attnlab.transformer_block(w, x, spec=BLOCK)[0],
        lambda dtype: tree(dtype, init_block),
        X,
    ),
    "run_stack": (stack, lambda dtype: tree(dtype, init_layers), X),
    "rotate": (
        lambda w, x: positions.rotate(x * w, positions.rotary_angles(jnp.arange(5), 4)),
        lambda dtype: draw(dtype, 4),
        lambda dtype: draw(dtype, 2, 5, 3, 4),
    ),
    "MultiHeadAttention": (ATTENTION, lambda dtype: tree(dtype, INIT_ATTENTION), X),
    "FeedForward": (FFN, lambda dtype: tree(dtype, INIT_FFN), X),
    "LayerStack": (
        lambda w, x: LAYERS.apply({"params": w}, x)[0],
        lambda dtype: tree(dtype, INIT_LAYERS),
        X,
    ),
}
NOT_OF_ARRAYS = {  # tables, specs, counts; what makes weights; what takes tokens (below)
    "BACKENDS", "LAYOUTS", "PLANS", "HeadSpec", "Layout", "ModelConfig", "Plan", "masks",
    "positions", "explain", "applied_parameters", "unique_parameters", "flops_per_token",
    "init_heads", "init_stacked", "Decoder", "Encoder", "contraction_orders", "explain_heads",
    "init_cache", "prefill", "generate", "stream", "adapters", "convert", "plan_names",
    "explain_model", "permute_heads", "regauge", "truncate", "EncoderDecoder", "Outputs",
}  # fmt: skip


def test_every_public_name_is_here():
    assert set(FUNCTIONS) - {"rotate", "attention_fn"} | NOT_OF_ARRAYS == set(attnlab.__all__)


def all_transforms(run, w, x):
    """Results of `run` under each transform, all of them per batch row."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    rows = jax.tree.map(lambda a: a[:, None], x)
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
def test_transforms(name, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    run, weights, batch = FUNCTIONS[name]
    w, x = weights(dtype), batch(dtype)

    @jax.jit
    def everything(w, x):
        grads = jax.grad(lambda w, x: jnp.sum(run(w, x) ** 2), (0, 1))(w, x)
        return all_transforms(run, w, x), grads

    results, grads = everything(w, x)
    for result in results.values():
        assert result.dtype == dtype
        assert_close(result, results["plain"])
    for grad, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves((w, x)), strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        assert np.isfinite(np.asarray(grad, np.float64)).all()
    assert np.abs(np.asarray(grads[1], np.float64)).max() > 0


@pytest.mark.parametrize("dtype", deep(["bfloat16", "float64"], "bfloat16"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_precision_is_kept(name, dtype, request):
    """Of the result and of every gradient."""
    if dtype == "float64":
        request.getfixturevalue("x64")
    run, weights, batch = FUNCTIONS[name]
    arrays = weights(dtype), batch(dtype)
    seen = jax.eval_shape(
        jax.grad(lambda w, x: (jnp.sum(run(w, x)), run(w, x)), (0, 1), True), *arrays
    )
    assert {a.dtype for a in jax.tree.leaves(seen)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", deep(["float32", "bfloat16", "float64"], "float32"))
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_models(kind, dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    model = dataclasses.replace(MODEL, kind=kind, dtype=dtype).build()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 5)))
    w = tree(
        "float64" if dtype == "float64" else "float32", lambda k: model.init(k, tokens)["params"]
    )
    run = lambda w, tokens: model.apply({"params": w}, tokens)
    results = jax.jit(functools.partial(all_transforms, run))(w, tokens)
    for result in results.values():
        assert result.dtype == ("float64" if dtype == "float64" else "float32")
        assert_close(result, results["plain"], loosen=1000 if dtype == "bfloat16" else 1)
    grads = jax.jit(jax.grad(lambda w: jnp.sum(run(w, tokens) ** 2)))(w)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_fresh_weights_in_any_precision(x64):
    for dtype in ("float32", "bfloat16", "float64"):
        make = jax.jit(lambda key, dtype=dtype: attnlab.init_heads(key, SPEC, dtype=dtype))
        assert {a.dtype for a in make(jax.random.key(0)).values()} == {jnp.dtype(dtype)}
    many = jax.vmap(lambda key: attnlab.init_heads(key, SPEC))(
        jax.random.split(jax.random.key(0), 3)
    )
    assert many["q"].shape == (3, 6, 3, 2)


def test_masks_and_tables_under_jit():
    lengths = jnp.array([2, 0])
    for make in (
        lambda n: masks.combine(masks.causal(3), masks.padding(n, 3)),
        lambda n: masks.segments(n[:, None] * jnp.arange(3)),
        lambda n: masks.from_edges(n, n, 3),
        lambda n: positions.sinusoidal(3, 4),
    ):
        np.testing.assert_allclose(jax.jit(make)(lengths), make(lengths), atol=1e-6)
