"""Models of equal budget: published widths and head counts, found by the solver."""

import dataclasses
import functools

import pytest

from attnlab import heads
from attnlab.heads import Bilinear, ExtraKeys, Gate, Latent, Standard, TensorProduct, Wide
from attnlab.models import FFN, Norm, cost, specs
from attnlab.models.budget import budget_cost, match_budget, with_layout, with_size
from attnlab.models.config import ModelConfig

MLRA = ModelConfig(
    width=3072, num_layers=24, heads=Standard(num_heads=24, head_dim=128), vocab_size=50304,
    ffn=FFN(width=8192, activation="gated_silu", bias=False), positions=specs.Rotary(),
    norm=Norm(kind="rms"),
)  # fmt: skip
# Zhang et al. 2026, arXiv 2603.02188: heads and the width of the FFN beside them, the multiple of 8
# that is nearest to MHA's 8192. Four more have no layout here: `gla_2` (10048) and `gla_4` (10136)
# have several latents, each read by some of the heads; in `mlra_2` (10048) and `mlra_4` (9880) a
# head sums over keys and values of parts of the latent.
PUBLISHED = {
    "mha": (MLRA.heads, 8192),
    "mqa": (Standard(num_heads=24, head_dim=128, num_kv_heads=1), 10152),
    "gqa": (Standard(num_heads=24, head_dim=128, num_kv_heads=6), 9728),
    "mla": (
        Latent(num_heads=24, head_dim=128, latent_dim=512, query_latent_dim=1536, rotary_dim=64),
        9448,
    ),
    "mfa": (heads.LowRankQuery(num_heads=24, head_dim=256, query_latent_dim=2048), 8024),
    "tpa": (
        TensorProduct(num_heads=24, head_dim=128, query_rank=6, key_rank=2, value_rank=2),
        10760,
    ),
    "gta": (
        heads.GroupedTied(num_heads=24, num_kv_heads=6, head_dim=64, value_dim=128, rotary_dim=64),
        9960,
    ),
}


def without_norms(config):
    """Parameters without norms, as the paper counts."""
    shapes = heads.weight_shapes(config.layout)
    norms = 24 * sum(shape[0] for name, shape in shapes.items() if name.endswith("_norm"))
    return cost.num_parameters(config) - norms - (2 * 24 + 1) * 3072


def test_published_widths():
    """And with them the range of counts that the paper prints."""
    counts = {}
    for name, (layout, width) in PUBLISHED.items():
        config = dataclasses.replace(MLRA, heads=layout)
        found = match_budget(config, MLRA, "parameters", multiple=8)
        assert found.config.ffn.width == width, name
        assert found.cost + found.remainder == cost.num_parameters(MLRA)
        # At most half of 8 columns of three matrices in 24 layers.
        assert abs(found.remainder) <= 24 * 3 * 3072 * 4
        counts[name] = without_norms(found.config)
    assert min(counts.values()) == counts["mqa"] == 2_871_853_056
    assert max(counts.values()) == counts["mfa"] == 2_873_032_704


def assert_nearest(config, reference, what, size="ffn.width", step=1):
    """One step more or less is no nearer. Returns the match, and the size that was solved for."""
    found = match_budget(config, reference, what, size=size, length=7)
    cost = functools.partial(budget_cost, budget=what, length=7)
    assert (found.cost, found.cost + found.remainder) == (cost(found.config), cost(reference))
    solved = functools.reduce(getattr, size.split("."), found.config)
    for value in (solved + step, solved - step):
        if value > 0:
            other = cost(with_size(found.config, size, value))
            assert abs(found.remainder) <= abs(cost(reference) - other)
    return found, solved


SMALL = ModelConfig(width=12, heads=Standard(num_heads=3), num_layers=4, ffn=FFN(width=40))
ONE_KEY = Standard(num_heads=3, num_kv_heads=1)
SOLVED = [
    # heads, budget, size to solve for, its smallest step
    (ONE_KEY, "parameters", "heads.num_heads", 1),
    (Standard(num_heads=4, num_kv_heads=2, head_dim=4), "flops", "heads.num_heads", 2),
    (Latent(num_heads=3, query_latent_dim=None), "parameters", "heads.num_heads", 1),
    (TensorProduct(num_heads=3), "parameters", "heads.num_heads", 1),
    (Latent(num_heads=3), "parameters", "heads.head_dim", 1),
    (ONE_KEY, "cache", "heads.head_dim", 1),
    (heads.Narrow(num_heads=3), "flops", "num_layers", 1),
]


@pytest.mark.parametrize(("layout", "what", "size", "step"), SOLVED)
def test_no_other_size_is_nearer(layout, what, size, step):
    """Sizes that were not solved for stay. The width of the FFN: see the random models."""
    config = dataclasses.replace(SMALL, heads=layout)
    found, solved = assert_nearest(config, SMALL, what, size, step)
    assert solved % step == 0
    assert found.config.ffn == config.ffn
    if size != "num_layers":
        assert found.config.num_layers == config.num_layers
    if size != "heads.head_dim":
        assert found.config.layout.size("head_dim") == config.layout.size("head_dim")


REFUSED = [
    (dict(heads=ONE_KEY), "cache", "ffn.width", "cache do not depend on ffn.width"),
    (dict(sharing="albert"), "parameters", "num_layers", "do not depend on num_layers"),
    (dict(sharing="sandwich"), "parameters", "num_layers", "stop growing with num_layers at"),
    (dict(heads=Wide(num_heads=40)), "flops", "ffn.width", "at ffn.width 1 it costs more"),
    (dict(heads=Bilinear(num_heads=3)), "flops", "heads.head_dim", "has no head_dim: its fi"),
    (dict(heads=ONE_KEY, positions=specs.Rotary()), "flops", "heads.head_dim", "must be even"),
    ({}, "flops", "width", "unknown size to solve for 'width'"),
    ({}, "time", "ffn.width", "unknown budget 'time'"),
]


@pytest.mark.parametrize(("fields", "what", "size", "message"), REFUSED)
def test_what_cannot_be_matched(fields, what, size, message):
    with pytest.raises(ValueError, match=message):
        match_budget(dataclasses.replace(SMALL, **fields), SMALL, what, size=size, length=7)


EXTRA = (ExtraKeys(2), Gate(by="element"))
LATENT = dict(num_heads=3, latent_dim=9, head_dim=4)
FACTORS = dict(num_heads=3, key_rank=3, biases=("factors", "o"))
LAYOUTS = [
    (Latent(**LATENT), heads.LatentAbsorbed(**LATENT)),
    (TensorProduct(**FACTORS), Standard(num_heads=3, biases=("o",))),
    (Standard(num_heads=3, extras=EXTRA), heads.Narrow(num_heads=3, extras=EXTRA)),
]


@pytest.mark.parametrize(("layout", "other"), LAYOUTS)
def test_with_layout_keeps_what_both_layouts_have(layout, other):
    made = with_layout(dataclasses.replace(SMALL, heads=layout), other.name, "albert")
    assert (made.heads, made.sharing) == (other, "albert")
