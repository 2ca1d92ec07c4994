"""What works on one model works on published ones of every form: capture, patch, heads removed,
layers shared and fine-tuned."""

import jax
import jax.numpy as jnp
import numpy as np
import peer_outputs
import pytest
from conftest import deep
from goldens import FAMILIES, split, write

from attnlab import pretrained
from attnlab.models import model_values
from attnlab.transforms import change_plan, remove_heads

# A decoder with grouped heads, one with windows and soft caps, experts; encoders of text and
# images, an encoder-decoder.
NAMES = ["llama", "gemma2", "mixtral", "modernbert", "dinov2", "bart"]


@pytest.fixture(params=deep(NAMES, "gemma2", "dinov2", "bart"))
def loaded(request, tmp_path):
    """(config, params, tokens, the other arguments of a call)"""
    config, tensors, given, _ = split(FAMILIES[request.param])
    model, params = pretrained.load(write(tmp_path / "folder", config, tensors))
    tokens, options = peer_outputs.inputs(model.config, given)
    return model.config, params, tokens, {n: a for n, a in options.items() if a is not None}


def hidden(config, params, tokens, **options):
    return config.build().apply({"params": params}, tokens, **options).hidden


def test_a_head_removed_is_a_head_patched_with_zeros(loaded):
    """The first key head of every attention."""
    config, params, tokens, options = loaded
    size = config.heads.num_heads // (config.heads.num_kv_heads or config.heads.num_heads)

    def zero(value, layer):
        return value.at[:, :, :size].set(0)

    names = {"heads", "cross.heads", "encoder.heads"} & set(model_values(config))
    patched = hidden(config, params, tokens, patch=dict.fromkeys(names, zero), **options)
    assert np.abs(hidden(config, params, tokens, **options) - patched).max() > 1e-3
    if config.layer_types:
        return  # heads of layers of several types are masked, not removed
    which = dict.fromkeys(range(config.num_layers), tuple(range(size)))
    others = {} if config.encoder is None else {"cross": which, "encoder": which}
    removed, fewer, _ = remove_heads(config, params, which, **others)
    assert removed.heads.num_heads == config.heads.num_heads - size
    got = hidden(removed, fewer, tokens, **options)
    np.testing.assert_allclose(got, patched, rtol=1e-4, atol=1e-4)


def test_like_albert_and_fine_tuned(loaded, tmp_path):
    """All layers of a type share the mean of their weights; a step against the gradient takes the
    outputs nearer to those of the model as it was; the folder has each layer's copy."""
    config, params, tokens, options = loaded
    shared, fewer = change_plan(config, params, "albert")
    count = sum(a.size for a in jax.tree.leaves(params))
    assert sum(a.size for a in jax.tree.leaves(fewer)) < count
    target = hidden(config, params, tokens, **options)

    @jax.jit
    def loss(weights):
        return jnp.mean(jnp.square(hidden(shared, weights, tokens, **options) - target))

    before, gradient = jax.value_and_grad(loss)(fewer)
    norm = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
    step = 0.01 * before / norm
    tuned = jax.tree.map(lambda a, g: a - step * g, fewer, gradient)
    assert loss(tuned) < before
    pretrained.save(tmp_path / "tuned", shared.build(), tuned)
    model, again = pretrained.load(tmp_path / "tuned")
    got = hidden(model.config, again, tokens, **options)
    np.testing.assert_allclose(got, hidden(shared, tuned, tokens, **options), rtol=1e-5, atol=1e-5)
