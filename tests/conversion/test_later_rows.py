"""Rows of 2024 and 2025: which heads are latents, tensor products or tied states, and which not."""

import numpy as np
import pytest
from heads_by_hand import draw
from test_convert import check

from attnlab import HeadSpec
from attnlab.conversion.convert import convert


def head(layout, **fields):
    return HeadSpec(layout, **dict(width=12, num_heads=6, head_dim=4, value_dim=3) | fields)


LATENT = dict(latent_norm=False, rotary_dim=2)
RANKS = dict(query_rank=6, biases="a")


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("layout", ["latent", "latent_absorbed"])
def test_standard_grouped_and_multi_query_heads_are_latents(heads, layout):
    """Keys and values beside each other are a latent of K (H + V); maps out of it of 0 and 1."""
    source = head("standard", num_kv_heads=heads)
    target = head(layout, latent_dim=7 * heads, scale=0.5, **LATENT)
    w = draw(source)
    new, maps = check(w, source, target)
    assert maps[0] == "side_by_side"
    assert set(np.unique(new["k"])) == set(np.unique(new["v"])) == {0.0, 1.0}
    assert not new["q_turned"].any()
    larger = head(layout, latent_dim=50, **LATENT)
    assert "pad_latent_dim" in check(w, source, larger)[1]


def test_a_latent_as_wide_as_x_holds_all_heads():
    """Fewer numbers than keys and values have, if their rank is no higher; back by multiplying."""
    source, target = head("standard"), head("latent", latent_dim=12, **LATENT)
    new, maps = check(draw(source), source, target)
    assert maps == ("factor_latent", "rescale")
    assert check(new, target, head("standard", head_dim=6))[1] == ("multiply_latent",)
    small = head("latent", latent_dim=11, **LATENT)
    kept, witness = convert(draw(source), source, small)
    assert kept is None
    assert "factor_latent: [k v] of all heads, 0 has rank 12, beyond 11" in witness.reason or (
        witness.kind == "parameters"
    )


def test_rotary_positions_refuse_the_latent_and_say_why():
    """A rotated key is turned after its map, a latent before: the turn stands between them."""
    source = HeadSpec("standard", 24, 8, num_kv_heads=2, head_dim=4, value_dim=4)
    target = HeadSpec("latent", 24, 8, head_dim=4, value_dim=4, latent_dim=16, **LATENT)
    w = draw(source)
    assert convert(w, source, target)[0] is not None
    new, witness = convert(w, source, target, rotary=True)
    assert new is None
    assert witness.kind == "undecided"
    assert "side_by_side: not with rotary; factor_latent: not with rotary" in witness.reason


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("rotary", [False, True])
def test_standard_grouped_and_multi_query_heads_are_tensor_products(heads, rotary):
    """With constant factors, N of queries and K of keys; turned positions are no hindrance."""
    source = head("standard", num_kv_heads=heads)
    target = head("tensor", key_rank=heads, value_rank=heads, **RANKS)
    w = draw(source)
    new, maps = check(w, source, target, rotary=rotary)
    assert maps == ("constant_factors",)
    np.testing.assert_array_equal(new["q_heads_bias"], 6 * np.eye(6))
    groups = np.repeat(np.eye(heads), 6 // heads, axis=1)
    np.testing.assert_array_equal(new["k_heads_bias"], heads * groups)
    assert not any(new[f"{n}_heads"].any() for n in "qkv")
    more = head("tensor", key_rank=8, value_rank=7, **RANKS)
    assert check(w, source, more, rotary=rotary)[1] == ("constant_factors", "pad_ranks")
    back = "mix_constants", "share_heads"
    assert check(new, target, source, rotary=rotary)[1] == back[: 1 + (heads < 6)]


def test_low_rank_queries_and_tied_states_are_standard_heads():
    low = head("low_rank_q", num_kv_heads=1, query_latent_dim=5, latent_norm=False)
    plain = head("standard", num_kv_heads=1)
    w, maps = check(draw(low), low, plain, rotary=True)
    assert maps == ("multiply_queries",)
    assert check(w, plain, low, rotary=True)[1] == ("factor_queries",)
    tied = head("grouped_tied", num_kv_heads=2, head_dim=3, value_dim=6, rotary_dim=2)
    standard = head("standard", num_kv_heads=2, head_dim=5, value_dim=6)
    w, maps = check(draw(tied), tied, standard)
    assert maps == ("untie_states",)
    assert check(w, standard, tied)[1] == ("tie_states",)
    assert convert(draw(tied), tied, standard, rotary=True)[0] is None
