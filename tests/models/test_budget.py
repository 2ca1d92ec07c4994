"""Models of equal budget: published widths, and the same sizes as the old solver."""

import dataclasses

import pytest
from conftest import diagonal
from test_accounting import SMALL as OLD_SMALL
from test_accounting import with_layout as old_with_layout
from test_match import ARMS, HEADS, MLRA, SMALL, WIDTHS

from attnlab import LAYOUTS, plan_names
from attnlab.heads import Bilinear, ExtraKeys, Gate, Latent, Standard, TensorProduct, Wide
from attnlab.model.as_models import as_config
from attnlab.model.match import match
from attnlab.models import budget, specs
from attnlab.models.budget import match_budget, with_layout
from attnlab.models.config import ModelConfig

SIZES = {
    "ffn_width": "ffn.width",
    "num_heads": "heads.num_heads",
    "head_dim": "heads.head_dim",
    "num_layers": "num_layers",
}


@pytest.mark.parametrize("name", WIDTHS)
def test_published_widths(name):
    """Zhang et al. 2026, arXiv 2603.02188: FFNs beside heads of seven layouts."""
    fields, width = WIDTHS[name]
    reference = as_config(MLRA)
    config = as_config(dataclasses.replace(MLRA, **fields))
    found = match_budget(config, reference, "parameters", multiple=8)
    assert found.config.ffn.width == width
    assert found.cost + found.remainder == budget.num_parameters(reference)


@pytest.mark.parametrize(("width", "each", "multi_query", "grouped", "count"), HEADS)
def test_published_numbers_of_heads(width, each, multi_query, grouped, count):
    """Zhang et al. 2025, arXiv 2501.06425, Table 10."""
    layout = Standard(num_heads=each, head_dim=64)
    standard = ModelConfig(width=width, heads=layout, num_layers=1)
    for shared, heads in ((1, multi_query), (2, grouped)):
        few = dataclasses.replace(layout, num_kv_heads=shared, num_heads=shared)
        config = dataclasses.replace(standard, heads=few)
        found = match_budget(config, standard, "parameters", size="heads.num_heads")
        assert (found.config.heads.num_heads, found.remainder) == (heads, 0)


@pytest.mark.parametrize("name", ARMS)
def test_same_sizes_as_the_old_solver(name):
    fields, what, by = ARMS[name]
    before = dataclasses.replace(SMALL, **fields)
    old = match(before, SMALL, what, by=by, length=7)
    new = match_budget(as_config(before), as_config(SMALL), what, size=SIZES[by], length=7)
    assert (new.cost, new.remainder) == (old.cost, old.left)
    assert new.config.ffn == as_config(old.config).ffn
    assert new.config.num_layers == old.config.num_layers
    assert new.config.heads.num_heads == old.config.num_heads
    assert new.config.layout.size("value_dim") == as_config(old.config).layout.size("value_dim")


@pytest.mark.parametrize(
    ("layout", "plan", "what"), diagonal(LAYOUTS, plan_names(), ["parameters", "flops"])
)
def test_same_widths_as_the_old_solver(layout, plan, what):
    reference = dataclasses.replace(OLD_SMALL, ffn_width=300)
    before = old_with_layout(layout, plan=plan)
    old = match(before, reference, what, length=11)
    new = match_budget(as_config(before), as_config(reference), what, length=11)
    assert (new.config, new.remainder) == (as_config(old.config), old.left)


def test_a_cache_is_matched_by_heads_by_default():
    model = ModelConfig(num_layers=3)
    wide = match_budget(dataclasses.replace(model, heads=Wide(num_heads=4)), model, "cache")
    assert (wide.config.heads.num_heads, wide.remainder) == (1, 0)
    same = match_budget(model, model, "cache")
    assert same.config == model


REFERENCE = ModelConfig(
    width=12, heads=Standard(num_heads=3), num_layers=4, ffn=specs.FFN(width=40)
)
ONE_KEY = Standard(num_heads=3, num_kv_heads=1)


@pytest.mark.parametrize(
    ("fields", "what", "size", "message"),
    [
        (dict(heads=ONE_KEY), "cache", "ffn.width", "cache do not depend on ffn.width"),
        (dict(sharing="albert"), "parameters", "num_layers", "do not depend on num_layers"),
        (dict(sharing="sandwich"), "parameters", "num_layers", "stop growing with num_layers at"),
        (dict(heads=Wide(num_heads=40)), "flops", "ffn.width", "at ffn.width 1 it costs more"),
        (dict(heads=Bilinear(num_heads=3)), "flops", "heads.head_dim", "has no head_dim: its fi"),
        (
            dict(heads=ONE_KEY, positions=specs.Rotary()),
            "flops",
            "heads.head_dim",
            "head_dim 1 must be even",
        ),
        ({}, "flops", "width", "unknown size to solve for 'width'"),
        ({}, "time", "ffn.width", "unknown budget 'time'"),
    ],
)
def test_what_cannot_be_matched(fields, what, size, message):
    with pytest.raises(ValueError, match=message):
        match_budget(dataclasses.replace(REFERENCE, **fields), REFERENCE, what, size=size, length=7)


def test_with_layout_keeps_what_both_layouts_have():
    latent = Latent(num_heads=3, latent_dim=9, head_dim=4, latent_norm=False)
    config = dataclasses.replace(REFERENCE, heads=latent)
    plain = with_layout(config, "standard", "albert")
    assert plain.heads == Standard(num_heads=3, head_dim=4)
    assert plain.sharing == "albert"
    assert with_layout(config, "latent_absorbed", "separate").heads.latent_dim == 9
    factors = TensorProduct(num_heads=3, key_rank=3, biases=("factors", "o"))
    config = dataclasses.replace(REFERENCE, heads=factors)
    assert with_layout(config, "standard", "separate").heads == Standard(num_heads=3, biases=("o",))
    extras = (ExtraKeys(2), Gate(by="element"))
    config = dataclasses.replace(REFERENCE, heads=Standard(num_heads=3, extras=extras))
    assert with_layout(config, "narrow", "albert").heads.extras == extras
