"""The layout atlas says what the code says."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from attnlab import LAYOUTS, HeadSpec, project_heads
from attnlab.heads.old.cost import cache_bytes_per_token, head_flops, head_parameters
from attnlab.heads.old.spec import FIELDS
from experiments import atlas
from experiments.drawing import arrows


def test_the_page_is_what_the_code_makes():
    assert atlas.PATH.relative_to(ROOT).as_posix() == "docs/layouts.md"
    assert atlas.PATH.read_text() == atlas.page(), "stale: run python -m experiments.atlas"


def value(formula, spec):
    """A sum of products of letters and numbers, by Python's own arithmetic."""
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return eval(code, {"T": 7, **spec.sizes})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_give_the_counts_of_the_code(layout):
    """At sizes that all differ, not only at those on the page."""
    letters = LAYOUTS[layout].letters
    sizes = {"H": 5, "V": 9, "R": 10, "M": 7, "P": 2, "X": 3, "Y": 4, "Z": 1}
    fields = {FIELDS[a]: size for a, size in sizes.items() if a in letters}
    spec = HeadSpec(layout, width=12, num_heads=4, out_width=11, **fields)
    text = atlas.section(layout)
    line = lambda name: re.search(rf"\| {name} \| (.*?) (?:=|numbers)", text)[1]
    assert value(line("parameters"), spec) == head_parameters(spec)
    assert value(line("FLOPs per token"), spec) == head_flops(spec, 7)
    assert 4 * value(line("cache"), spec) == cache_bytes_per_token(spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_bounds_are_reached(layout, x64):
    """By the scores of 40 random texts' tokens, more than any size."""
    spec = arrows.SMALL[layout]
    rng = np.random.default_rng(0)
    w = {n: jnp.asarray(rng.normal(size=a)) for n, a in spec.shapes.items()}
    texts = (jnp.asarray(rng.normal(size=(1, 40, 12))) for _ in "xy")
    q, k, _ = project_heads(w, *texts, spec=spec)
    k = np.repeat(k, 4 // k.shape[2], axis=2)
    scores = np.einsum("BTNH,BSNH->NTS", q, k)
    assert set(np.linalg.matrix_rank(scores)) == {atlas.rank(spec)}


def test_every_layout_has_its_equation_and_its_source():
    for row in LAYOUTS.values():
        assert "q_n = " in row.equation
        assert row.source in atlas.link(row.source)
        assert "](https://" in atlas.link(row.source) or "section 3.2.2, with" in row.source
