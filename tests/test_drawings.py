"""The drawings of docs/ say what the code does: what a head reads, how many weights, who shares
them."""

import math
import re
from collections import defaultdict
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from attnlab import LAYOUTS, PLANS
from attnlab.heads import init, num_parameters
from attnlab.sharing.plan import parse_plan

DRAWINGS = {p.stem: p.read_text() for p in sorted((ROOT / "docs" / "drawings").glob("*.svg"))}
NAMES = [name.removeprefix("layout_") for name in DRAWINGS if name.startswith("layout_")]
PLAN_OF = {
    name: re.search("<title>(.*): weights of six layers", svg)[1]
    for name, svg in DRAWINGS.items()
    if name.startswith("plan_")
}


def marks(name, data):
    """The attributes of the marks that have this data."""
    found = ElementTree.fromstring(DRAWINGS[name]).iter()
    return [mark.attrib for mark in found if f"data-{data}" in mark.attrib]


def layout_of(name, **fields):
    return LAYOUTS[name](width=64, num_heads=4, **fields)


def test_every_layout_and_plan_has_one_and_each_is_on_a_page():
    assert set(NAMES) == {n for n, c in LAYOUTS.items() if c.__module__.startswith("attnlab.")}
    counted = {
        n: f"{n}:{2 if n == 'relaxed' else 3}" for n, row in PLANS.items() if row.takes_count
    }
    drawn = [parse_plan(text, 6) for text in PLAN_OF.values()]
    assert len(set(drawn)) == len(drawn)
    assert {parse_plan(counted.get(name, name), 6) for name in PLANS} < set(drawn)
    pages = [ROOT / "docs" / "reference" / page for page in ("layouts.md", "plans.md")]
    text = "".join(page.read_text() for page in pages)
    assert [name for name in DRAWINGS if f"](../drawings/{name}.svg)" not in text] == []


@pytest.mark.parametrize("layout", NAMES)
def test_matrices_of_one_colour_once_have_the_parameters_of_the_layout(layout):
    """Norms are not drawn, so those that can be left out are, and the scale of another is added."""
    latent = hasattr(LAYOUTS[layout], "latent_norm")
    sets = {
        (m["data-weight"], m["fill"]): (float(m["data-reads"]) or 1) * int(m["data-makes"])
        for m in marks(f"layout_{layout}", "weight")
    }
    made = layout_of(layout, **({"latent_norm": False} if latent else {}))
    norm = made.weights().get("head_norm")  # one scale for each of its values
    undrawn = math.prod(made.size(axis) for axis in norm.out_axes) if norm else 0
    assert sum(sets.values()) + undrawn == num_parameters(made)


def test_a_head_reads_what_is_filled():
    """By the gradient of its query with respect to x."""
    direct = ("standard", "wide", "narrow", "narrow_tied", "bilinear")
    weights = {one: init(jax.random.key(0), layout_of(one)) for one in direct}

    @jax.jit
    def slopes(weights, x):
        def query(x, name):
            layout, w = layout_of(name), weights[name]
            return layout.project_q(w, layout.prepare(w, x[None, None]), lambda a: a)

        return {one: jax.jacobian(query)(x, one)[0, 0] for one in direct}

    for layout, slope in slopes(weights, jnp.ones(64)).items():
        reads = np.abs(slope).sum(1) > 0  # head, column of x
        drawn = np.zeros_like(reads)
        bars = marks(f"layout_{layout}", "from")[:4]
        matrices = marks(f"layout_{layout}", "weight")[:4]  # those of the queries
        for head, (bar, matrix) in enumerate(zip(bars, matrices, strict=True)):
            start = int(bar["data-from"])
            drawn[head, start : start + int(matrix["data-reads"])] = True
        np.testing.assert_array_equal(drawn, reads, layout)


@pytest.mark.parametrize("name", PLAN_OF)
def test_cells_have_the_groups_and_arrows_lead_to_what_is_read(name):
    plan = parse_plan(PLAN_OF[name], 6)
    groups, colours = defaultdict(dict), defaultdict(set)
    for m in marks(name, "group"):
        groups[m["data-sublayer"]][int(m["data-layer"])] = int(m["data-group"])
        colours[m["data-sublayer"]].add(m["fill"])
    for part in plan:
        assert groups[part] == {i: s for i, s in enumerate(plan[part]) if isinstance(s, int)}
        assert len(colours[part]) == plan.num_groups[part]
    arrows = {int(m["data-reader"]): int(m["data-source"]) for m in marks(name, "reader")}
    assert arrows == {i: j for i, j in enumerate(plan.kv_sources) if i != j}
