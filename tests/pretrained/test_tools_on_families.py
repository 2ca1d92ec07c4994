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
from attnlab.models import Compute, model_values
from attnlab.sharing import Plan
from attnlab.transforms import change_plan, remove_heads

# A decoder with grouped heads, one with windows and soft caps, experts; encoders of text and
# images, layers that the format shares, encoder-decoders.
PLANS = {
    **dict.fromkeys(("llama", "gemma2", "mixtral", "modernbert", "dinov2", "bart"), "albert"),
    **dict.fromkeys(("bert", "albert"), "ffn_only"),
    "t5": Plan(attention=(0, 1), ffn=(0, 0), cross=(0, 1)),
}
"""Family -> the plan that its layers get, or those of its decoder alone."""


@pytest.fixture(params=deep(PLANS, "gemma2", "dinov2", "bart", "t5"))
def family(request):
    return request.param


@pytest.fixture
def loaded(family, tmp_path):
    """(config, params, tokens, the other arguments of a call)"""
    config, tensors, given, _ = split(FAMILIES[family])
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
    removed, fewer, _ = remove_heads(config, params, which, by="layer", **others)
    assert removed.heads.num_heads == config.heads.num_heads - size
    got = hidden(removed, fewer, tokens, **options)
    np.testing.assert_allclose(got, patched, rtol=1e-4, atol=1e-4)


def test_shared_and_fine_tuned(family, loaded, tmp_path):
    """Layers of a type share the mean of their weights; a step against the gradient takes the
    outputs nearer to others. The folder has each layer's copy where its format cannot say that they
    share, and sharing is found again where it is looked for."""
    config, params, tokens, options = loaded
    target = hidden(config, params, tokens, **options)[::-1]
    shared, fewer = change_plan(config, params, PLANS[family])

    @jax.jit
    def loss(weights):
        return jnp.mean(jnp.square(hidden(shared, weights, tokens, **options) - target))

    before, gradient = jax.value_and_grad(loss)(fewer)
    norm = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
    tuned = jax.tree.map(lambda a, g: a - 0.01 * before / norm * g, fewer, gradient)
    assert loss(tuned) < before
    pretrained.save(tmp_path / "tuned", shared.build(), tuned)
    model, again = pretrained.load(tmp_path / "tuned")
    got = hidden(model.config, again, tokens, **options)
    np.testing.assert_allclose(got, hidden(shared, tuned, tokens, **options), rtol=1e-5, atol=1e-5)
    if config.layer_types:
        return  # of layers of several types it is not looked for
    half = Compute(dtype="bfloat16")
    found, once = pretrained.load(tmp_path / "tuned", detect_sharing=True, compute=half)
    jax.tree.map(np.testing.assert_array_equal, once, tuned)
    assert (found.config.plan, found.config.compute) == (shared.plan, half)
    if config.encoder is not None:
        assert found.config.encoder_model.plan == shared.encoder_model.plan
