"""What training in bfloat16 keeps in float32, by the programs themselves; and that it is finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import dot_product_attention, heads
from attnlab.data import DataSizes
from attnlab.heads.linear import over_tokens
from attnlab.models import FFN, Attention, Compute, ModelConfig, OutputHead, param_shapes
from attnlab.models.ffn import dense
from attnlab.training import OptimizerConfig, TrainConfig, make_optimizer
from attnlab.training.objectives import OBJECTIVES
from attnlab.training.step import init_state, train_step

# Batch and length divide no other size, so that an axis of tokens is known by its size.
MODEL = ModelConfig(
    vocab_size=19, max_len=11, width=16, num_layers=2, heads=heads.Standard(num_heads=2),
    ffn=FFN(width=20, activation="relu"), compute=Compute(dtype="bfloat16"),
    output=OutputHead(kind="own", bias=True, soft_cap=5.0),
)  # fmt: skip
BATCH, LENGTH = 7, 11
# Other test files register layouts of their own.
LAYOUTS = [n for n, cls in heads.LAYOUTS.items() if cls.__module__.startswith("attnlab.")]
TOKENS = {BATCH, LENGTH, BATCH * LENGTH}
IN_FLOAT32 = {"exp", "log", "sqrt", "rsqrt", "div", "reduce_max", "square", "integer_pow"}


def layout_of(name):
    return heads.LAYOUTS[name](num_heads=2)


def step_of(config, optimizer="adamw"):
    """A step and its arguments, by shape."""
    model, sizes = config.build(), DataSizes(config.vocab_size, LENGTH)
    objective = OBJECTIVES["causal_lm"].bind(sizes)
    transform = make_optimizer(TrainConfig(optimizer=OptimizerConfig(name=optimizer))).transform
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH + 1), "int32")}
    start = functools.partial(init_state, model, objective, transform, batch)
    return functools.partial(train_step, model, objective, transform), (start, batch)


def equations(jaxpr):
    """Those that hold no others, wherever they stand."""
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda a: hasattr(a, "eqns"))
        inner = [getattr(a, "jaxpr", a) for a in leaves if hasattr(a, "eqns")]
        if not inner:
            yield equation
        for body in inner:
            yield from equations(body)


@pytest.mark.parametrize("implementation", deep(["dense", "blockwise"], "dense"))
@pytest.mark.parametrize("layout", deep(LAYOUTS, "narrow", "standard", "wide"))
def test_what_stays_in_float32(layout, implementation):
    """Weights, moments, softmax, norms and loss; products of tokens read bfloat16."""
    attention = Attention(implementation=implementation)
    config = dataclasses.replace(MODEL, heads=layout_of(layout), attention=attention)
    step, (start, batch) = step_of(config)
    state = jax.eval_shape(start, 0)
    kinds = {a.dtype for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)}
    assert kinds == {jnp.dtype("float32")}
    logits = lambda p: config.build().apply({"params": p}, jnp.zeros((2, 5), int)).logits
    assert jax.eval_shape(logits, state.params).dtype == "float32"

    both = 0
    for equation in equations(jax.make_jaxpr(step)(state, batch, 0).jaxpr):
        arrays = [v.aval for v in equation.invars]
        floats = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
        name, out = equation.primitive.name, equation.outvars[0].aval
        narrow = [a.dtype == jnp.bfloat16 for a in floats]
        if name == "dot_general":
            assert len(set(narrow)) == 1, f"a product of two dtypes: {equation}"
            of_tokens = any(TOKENS & set(a.shape) for a in arrays)
            assert any(narrow) or not of_tokens, equation  # else weights with weights
            both += all(narrow)
        elif name == "reduce_sum" and any(narrow):
            assert TOKENS & set(out.shape), f"a sum over tokens in bfloat16: {equation}"
        elif name in IN_FLOAT32 and arrays[-1].shape:  # a division by one number is a scale
            assert not any(narrow), equation
    assert both >= 20  # forward and backward


@pytest.mark.parametrize("name", ["up", "m"])
def test_sums_over_tokens_are_exact(name):
    """Gradients of what broadcasts over 16,384 tokens; in bfloat16 they were 1 to 3 % off."""
    seed = np.random.default_rng(0).normal(size=(4, 4096, 8)).astype(np.float32) + 0.3
    seed = jnp.asarray(seed, jnp.bfloat16)
    x, w = jnp.ones_like(seed), {"up": jnp.eye(8), "up_bias": jnp.zeros(8)}
    if name == "up":
        run, at = (lambda b: dense(w | {"up_bias": b}, "up", x)), jnp.zeros(8)
    else:
        run, at = (lambda m: over_tokens(jnp.multiply, x, m)), jnp.ones(8)
    got = jax.jit(jax.grad(lambda a: jnp.sum(run(a).astype(jnp.float32) * seed)))(at)
    expected = np.asarray(seed, np.float64).sum((0, 1))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_weights_of_bfloat16_are_trained_in_float32():
    """As `pretrained.load(param_dtype="bfloat16")` gives them."""
    _, (start, _) = step_of(MODEL)
    narrow = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.bfloat16), param_shapes(MODEL))
    state = jax.eval_shape(lambda: start(0, narrow))
    kinds = {a.dtype for a in jax.tree.leaves((state.params, state.opt_state))}
    assert kinds == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_long_texts_are_finite(layout):
    """4096 tokens in bfloat16, weights three times as large as those of a start."""
    config = dataclasses.replace(MODEL, heads=layout_of(layout), max_len=4096, num_layers=1)
    model, rng = config.build(), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 19, (1, 4096)))
    draw = lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype)
    params = jax.tree.map(draw, param_shapes(config))

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = model.apply({"params": params}, tokens).logits
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    value, grads = loss(params)
    assert np.isfinite(value)
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.isfinite(grad).all(), path
        # A key bias adds the same to all scores of a row: the softmax cannot see it.
        assert np.any(grad) or "k_bias" in str(path), path


def test_derivatives_of_every_kind_in_bfloat16():
    """Forward-mode, reverse-mode and second ones, beside those of float32."""
    draw = lambda i: np.random.default_rng(i).normal(size=(2, 5, 3, 4))
    arrays = [jnp.asarray(draw(i), jnp.bfloat16) for i in range(3)]

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, is_causal=True, implementation="dense")
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    def all_of(*qkv):
        slope = lambda *qkv: jnp.sum(jax.grad(loss)(*qkv).astype(jnp.float32))
        forward = jax.jvp(loss, qkv, tuple(map(jnp.ones_like, qkv)))[1]
        return jax.grad(loss, (0, 1, 2))(*qkv), forward, jax.grad(slope)(*qkv)

    narrow, wide = (
        jax.jit(all_of)(*(a.astype(dtype) for a in arrays)) for dtype in ("bfloat16", "float32")
    )
    rounded = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    assert_close(rounded(narrow), rounded(wide))
