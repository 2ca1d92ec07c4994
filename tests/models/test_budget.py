"""Models of equal budget: published widths and head counts, found by the solver."""

import dataclasses

import numpy as np
import pytest

from attnlab import heads
from attnlab.heads import Bilinear, ExtraKeys, Gate, Latent, Standard, TensorProduct, Wide
from attnlab.models import FFN, Norm, cost, specs
from attnlab.models.budget import match_budget, with_layout, with_size
from attnlab.models.config import ModelConfig

MLRA = ModelConfig(
    width=3072,
    num_layers=24,
    heads=Standard(num_heads=24, head_dim=128),
    vocab_size=50304,
    ffn=FFN(width=8192, activation="gated_silu", bias=False),
    positions=specs.Rotary(),
    norm=Norm(kind="rms"),
)
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


# Zhang et al. 2025, arXiv 2501.06425, Table 10: width, heads of MHA, MQA and GQA-2, parameters.
COSTS = {
    "parameters": lambda config: cost.num_parameters(config),
    "flops": lambda config: cost.flops_per_token(config, 11),
    "cache": lambda config: cost.cache_bytes_per_token(config),
}


def size_at(config, path):
    first, _, rest = path.partition(".")
    return size_at(getattr(config, first), rest) if rest else getattr(config, first)


SMALL = ModelConfig(width=12, heads=Standard(num_heads=3), num_layers=4, ffn=FFN(width=40))
SOLVED = {
    "heads keep their width": (Standard(num_heads=3, num_kv_heads=1), "parameters", "num_heads"),
    "whole groups": (Standard(num_heads=4, num_kv_heads=2, head_dim=4), "flops", "num_heads"),
    "of a latent": (Latent(num_heads=3, query_latent_dim=None), "parameters", "num_heads"),
    "of factors": (TensorProduct(num_heads=3), "parameters", "num_heads"),
    "all of a latent head": (Latent(num_heads=3), "parameters", "head_dim"),
    "a cache": (Standard(num_heads=3, num_kv_heads=1), "cache", "head_dim"),
}


@pytest.mark.parametrize("name", SOLVED)
def test_no_size_of_the_heads_is_nearer(name):
    """One step more or less is no nearer; sizes that were not solved for stay."""
    layout, what, field = SOLVED[name]
    size = f"heads.{field}"
    config = dataclasses.replace(SMALL, heads=layout)
    found = match_budget(config, SMALL, what, size=size, length=11)
    step = (getattr(layout, "num_kv_heads", None) or 1) if field == "num_heads" else 1
    spent = COSTS[what]
    solved = size_at(found.config, size)
    before = config.layout.size("head_dim")
    for value in (solved + step, solved - step):
        if value > 0:
            other = with_size(found.config, size, value)
            assert abs(found.remainder) <= abs(spent(SMALL) - spent(other))
    assert found.config.ffn == config.ffn
    assert found.config.num_layers == config.num_layers
    if field == "num_heads":
        assert found.config.layout.size("head_dim") == before
        assert solved % step == 0


def test_layers_are_solved_for():
    narrow = dataclasses.replace(SMALL, heads=heads.Narrow(num_heads=3))
    found = match_budget(narrow, SMALL, "flops", size="num_layers", length=11)
    for step in (-1, 1):
        other = dataclasses.replace(found.config, num_layers=found.config.num_layers + step)
        left = COSTS["flops"](SMALL) - COSTS["flops"](other)
        assert abs(found.remainder) <= abs(left)


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


def test_with_layout_takes_names():
    """And prints no arrays where it is given parameters."""
    with pytest.raises(TypeError, match="layout") as caught:
        with_layout(ModelConfig(), {"q": np.ones((99, 99))}, "wide")
    assert len(str(caught.value)) < 200
