"""NNX modules compute what the functions and the Linen modules compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close
from flax import nnx

import attnlab
from attnlab import ModelConfig, heads, models
from attnlab import nnx as modules

TOKENS = jax.random.randint(jax.random.key(3), (2, 5), 0, 13)
CONFIGS = {
    "decoder": ModelConfig(vocab_size=13, width=12, num_layers=3, sharing="cycle:2"),
    "encoder_decoder": ModelConfig(kind="encoder_decoder", vocab_size=13, width=12, num_layers=2),
}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_has_the_parameters_and_outputs_of_linen(kind):
    config = CONFIGS[kind]
    inputs = {"source": TOKENS[:, ::-1]} if config.encoder else {}
    module = modules.Transformer(config, rngs=nnx.Rngs(params=0))
    linen = config.build()
    params = linen.init(nnx.Rngs(params=0).params(), TOKENS, **inputs)["params"]
    equal(modules.arrays(module), params)
    theirs = linen.apply({"params": params}, TOKENS, capture=("probs",), **inputs)
    ours = module(TOKENS, capture=("probs",), **inputs)
    equal((ours.logits, ours.captured), (theirs.logits, theirs.captured))
    back = modules.Transformer(config, params=params)
    equal(modules.arrays(back), params)
    assert set(nnx.state(module, nnx.Param)["params"]) == set(params)


def test_heads_are_the_function():
    layout = heads.Standard(width=12, num_heads=3, biases=("q", "o"))
    module = modules.MultiHeadAttention(layout, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (2, 5, 12))
    expected = attnlab.multi_head_attention(modules.arrays(module), x, layout, is_causal=True)
    np.testing.assert_array_equal(module(x, is_causal=True), expected)


def test_a_step_of_nnx_is_a_step_of_optax():
    config = CONFIGS["decoder"]
    module = modules.Transformer(config, rngs=nnx.Rngs(0))
    before = modules.arrays(module)
    optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        def loss(module):
            return jnp.mean(module(TOKENS).logits ** 2)

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    step(module, optimizer)
    grads = jax.grad(lambda p: jnp.mean(attnlab.run_model(p, TOKENS, config).logits ** 2))(before)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, before, grads)
    near = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(near, modules.arrays(module), expected)


def test_seeds_are_mapped_and_each_is_its_own_model():
    config = CONFIGS["decoder"]

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def make(rngs):
        return modules.Transformer(config, rngs=rngs)

    both = make(nnx.Rngs(0))
    logits = nnx.vmap(lambda module: module(TOKENS).logits)(both)
    params = jax.tree.map(lambda a: a[1], modules.arrays(both))
    assert_close(logits[1], attnlab.run_model(params, TOKENS, config).logits)
    assert not np.allclose(logits[0], logits[1])


def test_dropout_and_decoding_with_a_cache():
    config = ModelConfig(vocab_size=13, width=12, num_layers=2, dropout=models.Dropout(rate=0.5))
    module = modules.Transformer(config, rngs=nnx.Rngs(params=0, dropout=1))
    one, two = (module(TOKENS, deterministic=False).logits for _ in range(2))
    assert not np.allclose(one, two)
    cache = config.init_cache(batch=2, size=5)
    first = module(TOKENS[:, :3], cache=cache)
    second = module(TOKENS[:, 3:], cache=first.cache)
    assert_close(second.logits, module(TOKENS).logits[:, 3:])
    with pytest.raises(ValueError, match="rngs"):
        modules.Transformer(config)
    with pytest.raises(ValueError, match="rngs"):
        modules.Transformer(config, params=modules.arrays(module))(TOKENS, deterministic=False)
