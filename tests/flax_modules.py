"""Flax's attention modules with large random weights, and what they give."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# B=2 T=5 S=7, inputs of width 6 (queries), 10 (keys) and 9 (values), N=4 H=3, O=11


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def random_like(tree, seed=1):
    """The same tree with random leaves; zeros would hide biases."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [draw(*a.shape, seed=seed + i) for i, a in enumerate(leaves)]
    )


@functools.cache
def linen_params(module, *widths):
    shapes = jax.eval_shape(
        lambda key: module.init(key, *(jnp.ones((1, 3, w)) for w in widths), deterministic=True),
        jax.random.key(0),
    )
    return random_like(shapes["params"])


def value_and_grads(run, *arrays):
    """Output, and all gradients as one vector: that of a key bias is zero but for rounding."""

    def loss(*arrays):
        out = run(*arrays)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    numbers = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))(*arrays)
    return out, jnp.concatenate([jnp.ravel(g) for g in jax.tree.leaves(grads)]).astype(out.dtype)


def padding_mask():
    """Ragged rows, none of them empty: there Flax's own attention is right."""
    mask = np.random.default_rng(2).random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


CAUSAL = np.tri(5, dtype=bool)[None, None]


LINEN = nn.MultiHeadDotProductAttention
WIDE = functools.partial(LINEN, 4, qkv_features=12, out_features=11)


NNX = functools.partial(nnx.MultiHeadAttention, 4, 6, 12, 11, decode=False)
HAS = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
TAKES_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters


def nnx_module(**options):
    module = NNX(rngs=nnx.Rngs(0), **options)
    nnx.update(module, random_like(nnx.state(module, nnx.Param)))
    return module
