"""The layout atlas says what the code says."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import LAYOUTS, capture, multi_head_attention
from attnlab.heads import cache_bytes_per_token, num_parameters, weight_shapes
from attnlab.heads.cost import flops_per_token
from experiments import atlas
from experiments.atlas import LETTERS, NAMES


def value(formula, layout):
    """A sum of products of letters and numbers, by Python's own arithmetic."""
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    used = {}
    for axis, letter in LETTERS.items():
        if letter in code and hasattr(layout, axis):
            used.setdefault(letter, layout.size(axis))
    return eval(code, {"T": 7, **used})


SIZES = {
    "head_dim": 5, "value_dim": 9, "shared_dim": 10, "latent_dim": 7, "query_latent_dim": 13,
    "rotary_dim": 2, "query_rank": 3, "key_rank": 4, "value_rank": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_formulas_give_the_counts_of_the_code(name):
    """At sizes that all differ, not only at those on the page."""
    known = {field.name for field in dataclasses.fields(LAYOUTS[name])}
    fields = {axis: size for axis, size in SIZES.items() if axis in known}
    if name == "grouped_tied":  # a part of the value is rotated
        fields |= {"head_dim": 6, "value_dim": 8}
    layout = LAYOUTS[name](width=12, num_heads=4, out_width=11, **fields)
    text = atlas.section(layout)
    line = lambda name: re.search(rf"\| {name} \| (.*?) (?:=|numbers)", text)[1]
    assert value(line("parameters"), layout) == num_parameters(layout)
    assert value(line("FLOPs per token"), layout) == flops_per_token(layout, 7)
    assert 4 * value(line("cache"), layout) == cache_bytes_per_token(layout)


@pytest.mark.parametrize("name", NAMES)
def test_rank_bounds_are_reached(name, x64):
    """By the scores of 40 random texts' tokens, more than any size."""
    layout = LAYOUTS[name](width=12, num_heads=4)
    rng = np.random.default_rng(0)
    w = {n: jnp.asarray(rng.normal(size=shape)) for n, shape in weight_shapes(layout).items()}
    x, y = (jnp.asarray(rng.normal(size=(1, 40, 12))) for _ in "xy")
    names = ("q", "k")
    _, values = capture(multi_head_attention, w, x, layout, y, names=names)
    q, k = (values[name] for name in names)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("BTNH,BSNH->NTS", q, k)
    assert set(np.linalg.matrix_rank(scores)) == {atlas.rank(layout)}
