"""ALiBi, offsets of learned positions, and rates scaled by YaRN, by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from attnlab import heads
from attnlab.heads.positions import read_scaling, rotary_angles
from attnlab.models import FFN, Compute, ModelConfig
from attnlab.models.specs import Alibi, Learned, Rotary
from attnlab.transforms import remove_heads

SMALL = ModelConfig(
    vocab_size=7, width=8, num_layers=1, ffn=FFN(width=0), heads=heads.Standard(num_heads=2)
)


def test_alibi_takes_the_slope_times_the_distance_from_the_scores():
    """Of two heads the slopes are 2^-4 and 2^-8; equal tokens have equal scores without it."""
    config = dataclasses.replace(SMALL, positions=Alibi())
    params, ids = random_params(config), jnp.array([[3, 3, 3]])
    seen = config.build().apply({"params": params}, ids, capture=("probs",)).captured
    for head, slope in enumerate((2**-4, 2**-8)):
        each = np.exp(-slope * np.array([2, 1, 0]))
        np.testing.assert_allclose(seen["probs"][0, 0, head, 2], each / each.sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="slopes depend on the number of heads"):
        remove_heads(config, params, {0: [1]})


def test_an_offset_skips_the_first_rows_of_the_table():
    plain = dataclasses.replace(SMALL, max_len=5)
    moved = dataclasses.replace(plain, positions=Learned(offset=2))
    params, ids = random_params(plain), jnp.array([[1, 2, 3]])
    table = jnp.concatenate([jnp.full((2, 8), 9.0), params["positions"]])
    expected = plain.build().apply({"params": params}, ids).logits
    got = moved.build().apply({"params": params | {"positions": table}}, ids).logits
    np.testing.assert_array_equal(got, expected)


def test_yarn_keeps_fast_rates_and_divides_slow_ones():
    """Of 16 numbers at base 16 in 64 positions, beta 4 and 1: the ramp goes from i = 5 to 14."""
    rates = 16.0 ** (-np.arange(8) / 8)
    index = [16 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(16)) for turns in (4, 1)]
    low, high = math.floor(index[0]), math.ceil(index[1])
    part = np.clip((np.arange(8) - low) / (high - low), 0, 1)
    got = rotary_angles(jnp.array([1]), 16, base=16.0, scaling=read_scaling("yarn:4,4,1,64"))[0]
    np.testing.assert_allclose(got, rates * (1 - part) + rates / 4 * part, rtol=1e-5)
    assert got[0] == 1
    assert got[-1] < rates[-1]


def test_dynamic_scaling_changes_nothing_up_to_its_length():
    angles = rotary_angles(jnp.arange(4), 8, scaling=read_scaling("dynamic:2,64"))
    np.testing.assert_array_equal(angles, rotary_angles(jnp.arange(4), 8))


def test_a_model_in_bfloat16_tells_positions_beyond_256_apart():
    """What a head attends to is that of the float32 model: a shift by one of 600 moves it."""
    fields = {"width": 8, "num_layers": 1, "max_len": 600, "positions": Rotary(), "vocab_size": 5}
    config = ModelConfig(**fields, heads=heads.Standard(num_heads=1), ffn=FFN(width=4))
    params = random_params(config)
    tokens = jnp.full((1, 600), 3)

    def probs(dtype):
        model = dataclasses.replace(config, compute=Compute(dtype=dtype)).build()
        return model.apply({"params": params}, tokens, capture=("probs",)).captured["probs"][0]

    ours, exact = (np.asarray(probs(dtype), float) for dtype in ("bfloat16", "float32"))
    np.testing.assert_allclose(ours[0, 0, 599], exact[0, 0, 599], atol=0.1 * exact[0, 0, 599].max())
