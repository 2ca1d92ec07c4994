"""An encoder with another number of heads than the decoder beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, product_flops

from attnlab import ModelConfig, flops_per_token, transforms, unique_parameters

BOTH = ModelConfig(
    kind="encoder_decoder",
    vocab_size=11,
    max_len=9,
    width=12,
    num_layers=1,
    encoder_layers=2,
    num_heads=3,
    encoder_heads=4,
    head_dim=6,
    ffn_width=10,
    positions="relative",
    relative_buckets=8,
    relative_distance=9,
)
SOURCE, TARGET = jnp.array([[3, 1, 4, 1, 5, 9, 2]]), jnp.array([[2, 7, 1, 8, 2, 8, 1]])


def draw(config, *texts):
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), *texts)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)


def test_the_encoder_is_one_that_stands_alone():
    params = draw(BOTH, SOURCE, TARGET)
    assert params["layers"]["cross"]["q"].shape == (1, 12, 3, 6)
    assert params["encoder_layers"]["attention"]["q"].shape == (2, 12, 4, 6)
    assert params["encoder_relative_bias"].shape == (8, 4)
    alone = dataclasses.replace(
        BOTH, kind="encoder", num_layers=2, encoder_layers=None, num_heads=4, encoder_heads=None
    )
    own = {n.removeprefix("encoder_"): a for n, a in params.items() if n.startswith("encoder_")}
    own["embedding"] = params["embedding"]

    @jax.jit
    def run(params, own):
        options = dict(return_outputs=True, show=("encoder.scores",))
        seen = BOTH.build().apply({"params": params}, SOURCE, TARGET, **options)
        return seen, alone.build().apply({"params": own}, SOURCE, return_outputs=True)

    seen, expected = run(params, own)
    assert_close(seen.encoded, expected.last)
    assert seen.shown["encoder.scores"].shape == (2, 1, 4, 7, 7)


def test_what_is_counted_and_listed():
    trace = lambda p: BOTH.build().apply({"params": p}, SOURCE, TARGET)
    params = draw(BOTH, SOURCE, TARGET)
    assert unique_parameters(BOTH) == sum(a.size for a in jax.tree.leaves(params))
    assert product_flops(jax.make_jaxpr(trace)(params).jaxpr) == 7 * flops_per_token(BOTH, 7)
    found, again = transforms.detect_sharing(BOTH, params)
    assert found.encoder_heads == 4
    assert unique_parameters(found) == sum(a.size for a in jax.tree.leaves(again))
    shared, fewer = transforms.change_plan(BOTH, params, "albert", merge="aligned")
    assert fewer["encoder_layers"]["attention"]["q"].shape == (1, 12, 4, 6)
    assert unique_parameters(shared) == sum(a.size for a in jax.tree.leaves(fewer))
    assert dataclasses.replace(BOTH, encoder_heads=3) == dataclasses.replace(
        BOTH, encoder_heads=None
    )


def test_what_needs_one_number_says_so():
    params = draw(BOTH, SOURCE, TARGET)
    with pytest.raises(ValueError, match=r"encoder has 4 heads, the decoder 3, .* use head gates"):
        transforms.remove_heads(BOTH, params, {0: [1]})
    for fields, message in (
        (dict(share_encoder=True), "both stacks have the same heads; leave encoder_heads out"),
        (dict(encoder_heads=5, head_dim=None), r"encoder_heads=5: .*not divisible by 5"),
        (dict(encoder_heads=0), "encoder_heads must be a whole number of at least 1"),
        (dict(kind="decoder", encoder_layers=None), "are for kind='encoder_decoder'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(BOTH, **fields)
