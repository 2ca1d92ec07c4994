"""Drawings say what the code does: what a head reads, how many weights, who shares them."""

import math
import re
from collections import defaultdict
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from attnlab import LAYOUTS, PLANS, project_heads
from attnlab.heads import init, num_parameters
from attnlab.sharing.named_plans import parse_plan
from experiments import atlas
from experiments.drawing.layouts import NAMES, layout_drawing
from experiments.drawing.plans import drawn_plans, plan_drawing


def marks(svg, data):
    """What the marks that have this fact say of themselves."""
    found = ElementTree.fromstring(svg).iter()
    return [mark.attrib for mark in found if f"data-{data}" in mark.attrib]


def layout_of(name, **fields):
    return LAYOUTS[name](width=64, num_heads=4, **fields)


def test_they_are_what_the_code_makes():
    files = {path.name: path.read_text() for path in (ROOT / "docs/drawings").iterdir()}
    assert files == atlas.drawings(), "stale: run python -m experiments.atlas"
    pages = "".join(
        (ROOT / "docs/reference" / page).read_text() for page in ("layouts.md", "plans.md")
    )
    assert [name for name in files if f"](../drawings/{name})" not in pages] == []


@pytest.mark.parametrize("layout", NAMES)
def test_matrices_of_one_colour_once_have_the_parameters_of_the_layout(layout):
    """Norms are not drawn, so those that can be left out are, and the scale of another is added."""
    latent = hasattr(LAYOUTS[layout], "latent_norm")
    sets = {
        (m["data-weight"], m["fill"]): (float(m["data-reads"]) or 1) * int(m["data-makes"])
        for m in marks(layout_drawing(layout), "weight")
    }
    made = layout_of(layout, **({"latent_norm": False} if latent else {}))
    norm = made.weights().get("head_norm")  # one scale for each of its values
    undrawn = math.prod(made.size(axis) for axis in norm.makes) if norm else 0
    assert sum(sets.values()) + undrawn == num_parameters(made)


def test_a_head_reads_what_is_filled():
    """By the gradient of its query with respect to x."""
    direct = ("standard", "wide", "narrow", "narrow_tied", "bilinear")
    weights = {one: init(jax.random.key(0), layout_of(one)) for one in direct}

    @jax.jit
    def slopes(weights, x):
        query = lambda x, one: project_heads(weights[one], x[None, None], layout_of(one))[0]
        return {one: jax.jacobian(query)(x, one)[0, 0] for one in direct}

    for layout, slope in slopes(weights, jnp.ones(64)).items():
        reads = np.abs(slope).sum(1) > 0  # head, column of x
        svg = layout_drawing(layout)
        first = marks(svg, "weight")[0]["data-weight"]
        drawn = np.zeros_like(reads)
        bars = marks(svg, "from")[:4]
        matrices = [m for m in marks(svg, "weight") if m["data-weight"] == first]
        for head, (bar, matrix) in enumerate(zip(bars, matrices, strict=True)):
            start = int(bar["data-from"])
            drawn[head, start : start + int(matrix["data-reads"])] = True
        np.testing.assert_array_equal(drawn, reads, layout)


@pytest.mark.parametrize("file", drawn_plans())
def test_cells_have_the_groups_and_arrows_lead_to_what_is_read(file):
    plan = parse_plan(drawn_plans()[file], 6)
    svg = plan_drawing(drawn_plans()[file])
    groups, colours = defaultdict(dict), defaultdict(set)
    for m in marks(svg, "group"):
        groups[m["data-sublayer"]][int(m["data-layer"])] = int(m["data-group"])
        colours[m["data-sublayer"]].add(m["fill"])
    for part in plan:
        own = {i: s for i, s in enumerate(plan[part]) if isinstance(s, int)}
        assert groups[part] == own
        assert len(colours[part]) == plan.num_groups[part]
    arrows = {int(m["data-reader"]): int(m["data-source"]) for m in marks(svg, "reader")}
    assert arrows == {i: j for i, j in enumerate(plan.kv_sources) if i != j}


def test_every_plan_that_differs_is_drawn():
    drawn = {parse_plan(text, 6) for text in drawn_plans().values()}
    few = {"relaxed": 2}
    counted = [f"{n}:{few.get(n, 3)}" if r.takes_count else n for n, r in PLANS.items()]
    assert {parse_plan(name, 6) for name in counted} < drawn
    assert len(drawn) == len(drawn_plans())


def test_letters_have_the_ink_of_the_page():
    for svg in atlas.drawings().values():
        colours = re.findall(r'<text[^>]* fill="(.*?)"', svg)
        assert set(colours) <= {"#16191d"}  # on a coloured cell
        assert "prefers-color-scheme:dark" in svg
