"""Models of equal budget: published widths and head counts, found by the solver."""

import dataclasses

import pytest

from attnlab import ModelConfig, unique_parameters
from attnlab.heads.old.cost import head_parameters
from attnlab.model.match import BUDGETS, SOLVED, match, under_layout

MLRA = ModelConfig(
    width=3072, num_layers=24, num_heads=24, vocab_size=50304, ffn_width=8192, head_dim=128,
    activation="gated_silu", positions="rotary", norm_kind="rms", norm_bias=False, ffn_bias=False,
    attention_biases="",
)  # fmt: skip
# Zhang et al. 2026, arXiv 2603.02188: heads and the width of the feed-forward part beside them,
# the multiple of 8 that is nearest to MHA's 8192.
WIDTHS = {
    "mha": (dict(), 8192),
    "mqa": (dict(num_kv_heads=1), 10152),
    "gqa": (dict(num_kv_heads=6), 9728),
    "mla": (dict(layout="latent", latent_dim=512, query_latent_dim=1536, rotary_dim=64), 9448),
    "mfa": (dict(layout="low_rank_q", head_dim=256, query_latent_dim=2048), 8024),
    "tpa": (dict(layout="tensor", query_rank=6, key_rank=2, value_rank=2), 10760),
    "gta": (
        dict(layout="grouped_tied", num_kv_heads=6, head_dim=64, value_dim=128, rotary_dim=64),
        9960,
    ),
}
# And those that no layout says, with the reason.
UNSAID = {
    "gla_2": (10048, "2 latents of 256, each read by half of the heads: `latent` has one"),
    "gla_4": (10136, "4 latents of 128, each read by a quarter of the heads"),
    "mlra_2": (10048, "a head sums over keys and values of parts of the latent"),
    "mlra_4": (9880, "a head sums over keys and values of parts of the latent"),
}


def matrices(config):
    """Parameters without norms, as the paper counts."""
    norms = 24 * sum(s[0] for n, s in config.heads.shapes.items() if n.endswith("_norm"))
    return unique_parameters(config) - norms - (2 * 24 + 1) * 3072


def test_published_widths():
    """All eleven are named; seven are found, and with them the range of counts that is printed."""
    assert len(WIDTHS) + len(UNSAID) == 11
    found = {
        name: match(dataclasses.replace(MLRA, **fields), MLRA, "parameters", multiple=8)
        for name, (fields, _) in WIDTHS.items()
    }
    assert {n: f.config.ffn_width for n, f in found.items()} == {
        n: width for n, (_, width) in WIDTHS.items()
    }
    counts = {name: matrices(one.config) for name, one in found.items()}
    assert min(counts.values()) == counts["mqa"] == 2_871_853_056
    assert max(counts.values()) == counts["mfa"] == 2_873_032_704
    for one in found.values():  # at most half of 8 columns of three matrices in 24 layers
        assert abs(one.left) <= 24 * 3 * 3072 * 4
        assert one.cost + one.left == unique_parameters(MLRA)


# Zhang et al. 2025, arXiv 2501.06425, Table 10: width, heads of MHA, MQA and GQA-2, parameters.
HEADS = [
    (768, 12, 23, 22, 2_359_296), (1024, 16, 31, 30, 4_194_304),
    (1280, 20, 39, 38, 6_553_600), (1600, 25, 49, 48, 10_240_000),
]  # fmt: skip


@pytest.mark.parametrize(("width", "each", "multi_query", "grouped", "count"), HEADS)
def test_published_numbers_of_heads(width, each, multi_query, grouped, count):
    """Of 64 numbers each, to the number; nothing is left over."""
    standard = ModelConfig(
        width=width, num_heads=each, head_dim=64, attention_biases="", num_layers=1
    )
    assert head_parameters(standard.heads) == count
    for shared, heads in ((1, multi_query), (2, grouped)):
        config = dataclasses.replace(standard, num_kv_heads=shared, num_heads=shared)
        found = match(config, standard, "parameters", by="num_heads")
        assert (found.config.num_heads, found.left) == (heads, 0)
        assert head_parameters(found.config.heads) == count


SMALL = ModelConfig(width=12, num_heads=3, num_layers=4, ffn_width=40, attention_biases="")
ARMS = {
    "heads keep their width": (dict(num_kv_heads=1), "parameters", "num_heads"),
    "whole groups": (dict(num_heads=4, num_kv_heads=2, head_dim=4), "flops", "num_heads"),
    "of a latent": (dict(layout="latent", query_latent_dim=None), "parameters", "num_heads"),
    "of factors": (dict(layout="tensor"), "parameters", "num_heads"),
    "all of a latent head": (dict(layout="latent"), "parameters", "head_dim"),
    "a cache": (dict(num_kv_heads=1), "cache", "head_dim"),
    "layers": (dict(layout="narrow"), "flops", "num_layers"),
}


@pytest.mark.parametrize("name", ARMS)
def test_the_nearest_there_is(name):
    """One step more or less is no nearer; sizes that were not solved for stay."""
    fields, budget, by = ARMS[name]
    config = dataclasses.replace(SMALL, **fields)
    found = match(config, SMALL, budget, by=by, length=7)
    step = found.config.num_kv_heads or 1 if by == "num_heads" else 1
    for value in (getattr(found.config, by) + step, getattr(found.config, by) - step):
        other = dataclasses.replace(found.config, **{by: value}) if value else found.config
        left = BUDGETS[budget](SMALL, 7) - BUDGETS[budget](other, 7)
        assert abs(found.left) <= abs(left)
        assert other == found.config or left != found.left
    if by == "num_heads":
        assert found.config.heads.sizes["H"] == config.heads.sizes["H"]
        assert found.config.num_heads % step == 0
    same = [f for f in SOLVED if f not in (by, "head_dim")]
    assert [getattr(found.config, f) for f in same] == [getattr(config, f) for f in same]


def test_a_cache_is_matched_by_heads_where_nothing_is_told():
    """Four heads of D / 4 keep keys and values of 2 D numbers a layer, so does one wide head."""
    model = ModelConfig(width=64, num_heads=4, num_layers=3)
    wide = match(dataclasses.replace(model, layout="wide"), model, "cache")
    assert (wide.config.num_heads, wide.cost, wide.left) == (1, 3 * 2 * 64 * 4, 0)
    narrow = dataclasses.replace(model, layout="narrow")
    assert match(narrow, model, "cache").config == narrow
    assert BUDGETS["cache"](dataclasses.replace(model, kind="encoder"), 1) == 0


@pytest.mark.parametrize(
    ("fields", "budget", "by", "message"),
    [
        (dict(num_kv_heads=1), "cache", "ffn_width", "cache do not depend on ffn_width"),
        (dict(plan="albert"), "parameters", "num_layers", "do not depend on num_layers"),
        (dict(plan="sandwich"), "parameters", "num_layers", "stop growing with num_layers at"),
        (dict(layout="wide", num_heads=40), "flops", "ffn_width", "at ffn_width 1 it costs more"),
        (dict(positions="rotary", num_kv_heads=1), "flops", "head_dim", "head_dim 1 must be even"),
        ({}, "flops", "width", "unknown size to solve for 'width'"),
        ({}, "time", "ffn_width", "unknown budget 'time'"),
    ],
)
def test_what_cannot_be_matched(fields, budget, by, message):
    with pytest.raises(ValueError, match=message):
        match(dataclasses.replace(SMALL, **fields), SMALL, budget, by=by, length=7)


def test_a_reference_keeps_the_sizes_that_its_layout_has():
    """So that an arm of `latent` or `tensor` is matched to standard heads by flag."""
    latent = dataclasses.replace(
        SMALL, layout="latent", latent_dim=9, head_dim=4, latent_norm=False
    )
    plain = under_layout(latent, "standard", "albert")
    assert plain == dataclasses.replace(SMALL, plan="albert", head_dim=4)
    assert under_layout(latent, "latent_absorbed", "separate").latent_dim == 9
    factors = dataclasses.replace(SMALL, layout="tensor", key_rank=3, attention_biases="ao")
    plain = under_layout(factors, "standard", "separate")
    assert plain == dataclasses.replace(SMALL, attention_biases="o")


def test_a_reference_keeps_what_stands_beside_its_layout_or_is_refused():
    """Keys that no input has have weights: a reference without them is another model."""
    extra = dataclasses.replace(SMALL, extra_keys=2, gate="element")
    assert under_layout(extra, "narrow", "albert") == dataclasses.replace(
        extra, layout="narrow", plan="albert"
    )
    with pytest.raises(ValueError, match=r"layout 'latent' takes no extra_keys.*leave it out"):
        under_layout(extra, "latent", "separate")


def test_queries_that_are_keys_are_multiplied_out_once():
    """So their layer has the FLOPs that W_K's make up for in a wider feed-forward part."""
    tied = dataclasses.replace(SMALL, ties="qk", plan="cla:2")
    alone = dataclasses.replace(SMALL, plan="cla:2")
    layers, width = 4, 12
    saved = 2 * 2 * width * width  # in the two layers that make keys
    assert BUDGETS["flops"](alone, 7) - BUDGETS["flops"](tied, 7) == saved
    found = match(tied, alone, "flops", length=7)
    assert found.config.ffn_width == 40 + saved // (layers * 2 * 2 * width)
    assert found.left == 0
