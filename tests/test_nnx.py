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
IMAGES = models.Images(height=6, width=9, channels=2, patch_height=3, patch_width=3)
SMALL = {"vocab_size": 13, "width": 12, "num_layers": 2}
CONFIGS = {
    "decoder": ModelConfig(**SMALL | {"num_layers": 3}, sharing="cycle:2"),
    "encoder_decoder": ModelConfig(**SMALL, kind="encoder_decoder"),
    "images": ModelConfig(
        **SMALL | {"vocab_size": IMAGES.num_features}, kind="encoder", max_len=IMAGES.num_tokens,
        embedding=models.Embedding(images=IMAGES),
        output=models.OutputHead(kind="none", pooler="first", num_classes=3),
    ),
}  # fmt: skip


def inputs_of(config):
    """The first input of a model, and the others."""
    if config.embedding.images is not None:
        return jax.random.normal(jax.random.key(4), (2, 6, 9, 2)), {}
    return TOKENS, {"source": TOKENS[:, ::-1]} if config.encoder else {}


def loss_of(outputs):
    return jnp.mean((outputs.classes if outputs.logits is None else outputs.logits) ** 2)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_has_the_parameters_and_outputs_of_linen(kind):
    config = CONFIGS[kind]
    tokens, inputs = inputs_of(config)
    module = modules.Transformer(config, rngs=nnx.Rngs(params=0))
    linen = config.build()
    params = linen.init(nnx.Rngs(params=0).params(), tokens, **inputs)["params"]
    equal(modules.arrays(module), params)
    theirs = linen.apply({"params": params}, tokens, capture=("probs",), **inputs)
    equal(module(tokens, capture=("probs",), **inputs), theirs)
    back = modules.Transformer(config, params=params)
    equal(modules.arrays(back), params)
    assert set(nnx.state(module, nnx.Param)["params"]) == set(params)


def test_heads_are_the_function():
    layout = heads.Standard(width=12, num_heads=3, biases=("q", "o"))
    module = modules.MultiHeadAttention(layout, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (2, 5, 12))
    expected = attnlab.multi_head_attention(modules.arrays(module), x, layout, is_causal=True)
    np.testing.assert_array_equal(module(x, is_causal=True), expected)


@pytest.mark.parametrize("kind", ["decoder", "images"])
def test_a_step_of_nnx_is_a_step_of_optax(kind):
    config = CONFIGS[kind]
    tokens, _ = inputs_of(config)
    module = modules.Transformer(config, rngs=nnx.Rngs(0))
    before = modules.arrays(module)
    optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        def loss(module):
            return loss_of(module(tokens))

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    step(module, optimizer)
    grads = jax.grad(lambda params: loss_of(attnlab.run_model(params, tokens, config)))(before)
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
