"""Every exact map, one by one: exact in each situation but those that it names, broken in them.

All in NumPy, head by head: nothing of the code under test computes the functions compared here.
"""

import dataclasses

import numpy as np
import pytest
from conftest import deep
from heads_by_hand import apart, draw, function, inputs_of, spec_of

from attnlab.conversion.convert import regauge
from attnlab.conversion.factors import Refused, diagonalised, split
from attnlab.conversion.maps import MAPS
from attnlab.conversion.measure import Situation, float64
from attnlab.conversion.specs import settled, untied


def one_text(layout, **fields):
    """x, keys and values of one width, and no bias but that of the output."""
    return spec_of(layout, **dict(key_width=None, value_width=None, biases="o") | fields)


def tied(layout, ties):
    """As many key heads as heads where queries are keys; all biases that are there."""
    sizes = {"num_kv_heads": 6 if "q" in ties else 2, "key_width": None, "value_width": None}
    sizes = {} if layout == "narrow" else sizes
    return spec_of(layout, value_dim=4, ties=ties, biases="kqo" if ties == "kv" else "qvo", **sizes)


full = spec_of("standard", num_kv_heads=None, key_width=None, value_width=None)
plain = spec_of("standard", num_kv_heads=None)
bilinear = spec_of("bilinear", num_kv_heads=6, scale=0.4)
# map -> (a spec that it takes, the goal); a map that needs structure, also the way to get it
CASES = {
    "rename": (spec_of("standard"), spec_of("wide")),
    "untie": (spec_of("narrow_tied"), spec_of("narrow")),
    "spread": (spec_of("narrow"), full),
    "fold_down": (spec_of("alt"), full),
    "fold_outer": (spec_of("two_stage"), spec_of("standard")),
    "multiply_scores": (spec_of("standard"), spec_of("bilinear", scale=0.5)),
    "multiply_shared": (spec_of("collaborative"), spec_of("bilinear", scale=8**-0.5)),
    "multiply_values": (bilinear, spec_of("absorbed", scale=0.4)),
    "absorb_latent": (spec_of("latent"), spec_of("latent_absorbed", scale=6**-0.5)),
    "expand_latent": (
        spec_of("latent_absorbed", scale=0.3, query_latent_dim=None),
        spec_of("latent", scale=0.3, query_latent_dim=None),
    ),
    "multiply_queries": (spec_of("low_rank_q", latent_norm=False), spec_of("standard")),
    "multiply_latent": (
        spec_of("latent", latent_norm=False),
        one_text("standard", head_dim=6, num_kv_heads=6),
    ),
    "side_by_side": (
        one_text("standard"),
        spec_of("latent", latent_dim=18, latent_norm=False, query_latent_dim=None, scale=0.5),
    ),
    "factor_latent": (
        one_text("standard"),
        spec_of("latent", latent_dim=7, latent_norm=False, query_latent_dim=None, scale=0.5),
    ),
    "untie_states": (spec_of("grouped_tied"), one_text("standard", head_dim=6)),
    "constant_factors": (
        spec_of("standard", num_kv_heads=6, biases="o"),
        spec_of("tensor", query_rank=6, key_rank=6, value_rank=6),
    ),
    "pad_latent_dim": (
        spec_of("latent", latent_norm=False),
        spec_of("latent", latent_norm=False, latent_dim=9),
    ),
    "pad_ranks": (spec_of("tensor"), spec_of("tensor", query_rank=6, value_rank=5)),
    "identity_outer": (spec_of("standard"), spec_of("two_stage")),
    "identity_down": (spec_of("narrow"), spec_of("alt")),
    "identity_output": (
        spec_of("standard", output=False, out_width=None, biases="qkv"),
        spec_of("standard", out_width=30, biases="qkv"),
    ),
    "identity_keys": (
        bilinear,
        spec_of("standard", num_kv_heads=6, head_dim=10, scale=0.4, biases="qvo"),
    ),
    "identity_values": (
        spec_of("absorbed", scale=0.4),
        spec_of("bilinear", num_kv_heads=2, value_dim=10, scale=0.4),
    ),
    "repeat_heads": (spec_of("standard"), plain),
    "repeat_keys": (spec_of("collaborative"), spec_of("standard", head_dim=8)),
    "block_indicators": (
        plain,
        spec_of("collaborative", num_kv_heads=6, shared_dim=24, scale=0.5),
    ),
    "pad_head_dim": (spec_of("standard"), spec_of("standard", head_dim=6, scale=0.5)),
    "pad_rotary_pairs": (spec_of("standard"), spec_of("standard", head_dim=12, scale=0.5)),
    "pad_value_dim": (spec_of("standard"), spec_of("standard", value_dim=8)),
    "pad_shared_dim": (
        spec_of("collaborative"),
        spec_of("collaborative", shared_dim=10, scale=8**-0.5),
    ),
    "pad_heads": (plain, dataclasses.replace(plain, num_heads=8, num_kv_heads=8)),
    "drop_key_bias": (spec_of("standard"), spec_of("standard", biases="qvo")),
    "add_zero_bias": (spec_of("standard", biases="q"), spec_of("standard")),
    "rescale": (spec_of("standard"), spec_of("standard", scale=0.3)),
    "untie_maps": (
        spec_of("two_stage", value_width=10, value_dim=4, ties="kv", biases="kqo"),
        spec_of("two_stage", value_width=10, value_dim=4),
    ),
    "half_gate": (spec_of("standard"), spec_of("standard", gate="element")),
    "spread_gate": (spec_of("narrow", gate="head"), spec_of("narrow", gate="element")),
    "zero_sink": (spec_of("standard", sink="one"), spec_of("standard", sink="learnt")),
    "never_sink": (spec_of("latent"), spec_of("latent", sink="learnt")),
    "zero_key": (
        spec_of("standard", sink="one", extra_keys=1),
        spec_of("standard", extra_keys=2),
    ),
    "add_norm_bias": (
        spec_of("standard", qk_norm="layer"),
        spec_of("standard", qk_norm="layer", qk_norm_bias=True),
    ),
    "rescale_norms": (
        spec_of("low_rank_q", qk_norm="layer", norm_eps=0.3),
        spec_of("low_rank_q", qk_norm="layer", norm_eps=0.9),
    ),
    # Ties, which are undone first.
    "tie_queries": (tied("narrow", "qk"), untied(tied("narrow", "qk"))),
    "tie_squares": (tied("standard", "qk"), untied(tied("standard", "qk"))),
    "tie_values": (tied("two_stage", "kv"), untied(tied("two_stage", "kv"))),
    "tie_ranges": (tied("low_rank_q", "kv"), untied(tied("low_rank_q", "kv"))),
}
NEEDS_WEIGHTS = {
    "factor_keys": "multiply_scores",
    "factor_values": "multiply_values",
    "diagonalise": "multiply_shared",
    "share_down": "fold_down",
    "cut_chunks": "spread",
    "tie": "untie",
    "share_heads": "repeat_heads",
    "drop_output": "identity_output",
    "drop_zero_bias": "add_zero_bias",
    "factor_queries": "multiply_queries",
    "tie_states": "untie_states",
    "mix_constants": "constant_factors",
    "tie_products": "untie",
    "drop_gate": "half_gate",
    "gather_gate": "spread_gate",
    "drop_sink": "zero_sink",
    "drop_zero_key": "zero_key",
    "drop_norm_bias": "add_norm_bias",
    "drop_key_norm_bias": "add_norm_bias",
    "tie_queries": "untie_maps",
    "tie_squares": "untie_maps",
    "tie_values": "untie_maps",
    "tie_ranges": "untie_maps",
}


def apply(name, w, spec, goal):
    """One map, to the goal."""
    assert goal in MAPS[name].reach(spec, goal), f"{name} does not reach the goal"
    with float64():
        return {n: np.asarray(a) for n, a in MAPS[name].weights(w, spec, goal).items()}


def prepared(name, **fields):
    """Weights that the map takes, their spec, and the goal."""
    spec, goal = case_of(name)
    spec, goal = (dataclasses.replace(a, **fields) for a in (spec, goal))
    qk_norm, w = spec.qk_norm, draw(spec)
    if name in NEEDS_WEIGHTS:
        w, spec, goal = apply(NEEDS_WEIGHTS[name], w, spec, goal), goal, spec
        drops = name in ("drop_zero_bias", "mix_constants") or goal.ties
        goal = settled(goal, biases=goal.biases if drops else spec.biases)
    rng = np.random.default_rng(3)
    if name == "factor_latent":
        few = rng.normal(size=(12, 7)) @ rng.normal(size=(7, 12))
        w |= {n: np.tensordot(few, w[n], 1) for n in "kv"}
    if name == "drop_output":
        w = changed(w, spec, vo=rng.normal(size=(2, 5, 5)))
    if name == "tie_products":
        bases = dict(qk=rng.normal(size=(6, 4, 4)), vo=rng.normal(size=(6, 5, 5)))
        if not qk_norm:
            w = changed(w, spec, **bases)
        w["k_bias"] = rng.normal(size=w["k_bias"].shape)
    if name == "drop_key_norm_bias":
        w["k_norm_bias"] = rng.normal(size=w["k_norm_bias"].shape)
    if name == "tie_queries" and not qk_norm:
        times = np.tile(rng.uniform(0.5, 2, size=(6, 1, 2)), 2)  # of both numbers of a pair
        w |= {"k": w["k"] / times, "k_bias": w["k_bias"] / times[:, 0]}
        w |= {"extra_k": w["extra_k"] / times[:, 0]} if "extra_k" in w else {}
    heads = spec.sizes["K"]
    if name in ("tie_squares", "tie_ranges") and not qk_norm:
        w = changed(w, spec, qk=rng.normal(size=(heads, 4, 4)))
    if name == "tie_ranges" or (name == "tie_values" and not (spec.gate or spec.extra_keys)):
        w = changed(w, spec, vo=rng.normal(size=(heads, 4, 4)))
    if name in ("tie_squares", "tie_ranges"):
        w["k_bias"] = rng.normal(size=w["k_bias"].shape)
    return w, spec, goal


def changed(w, spec, **bases):
    """In other bases, even of values that a gate sees."""
    bare = dataclasses.replace(spec, gate=None)
    new = regauge({n: w[n] for n in bare.shapes}, bare, **bases)
    return w | {n: np.asarray(a) for n, a in new.items()}


def case_of(name):
    """Where it has none, that of the way to the weights that it needs."""
    return CASES[name] if name in CASES else CASES[NEEDS_WEIGHTS[name]]


SITUATIONS = {
    "plain": (Situation(), {}),
    "rotary": (Situation(rotary=True), {}),
    "cap": (Situation(logits_soft_cap=2.0), {}),
    "layer": (Situation(), {"qk_norm": "layer"}),
    "rms": (Situation(), {"qk_norm": "rms"}),
    "sink": (Situation(), {"sink": "learnt"}),
    "element": (Situation(), {"gate": "element"}),
    "extra": (Situation(), {"extra_keys": 2}),
}


def may_have(spec, fields):
    """Has its layout a place for them, and is no bias of a norm of another kind there?"""
    try:
        dataclasses.replace(spec, **fields)
    except ValueError:
        return False
    return True


def test_every_map_has_a_case():
    assert CASES.keys() | NEEDS_WEIGHTS.keys() == MAPS.keys()


@pytest.mark.parametrize("situation", deep(SITUATIONS, "plain", "rotary", "cap", "layer", "rms"))
@pytest.mark.parametrize("name", MAPS)
def test_a_map_is_exact_unless_it_says_what_breaks_it(name, situation):
    around, fields = SITUATIONS[situation]
    case = case_of(name)
    if set(fields) & set(MAPS[name].changes) or not all(may_have(a, fields) for a in case):
        return
    w, spec, goal = prepared(name, **fields)
    try:
        new = apply(name, w, spec, goal)
    except Refused:
        assert MAPS[name].conditional
        assert around.forbids(MAPS[name].breaks, spec)
        return
    broken = around.forbids(MAPS[name].breaks, spec)
    if {n: a.shape for n, a in new.items()} != goal.shapes:
        assert broken  # the norm's own scale has another width
        return
    inputs = inputs_of(spec)
    mask = np.random.default_rng(1).random((5, 7)) < 0.6
    mask[2] = False
    difference = apart(
        function(new, goal, inputs, around, mask), function(w, spec, inputs, around, mask)
    )
    if broken:
        assert difference > 1e-3
    else:
        assert difference < 1e-12


@pytest.mark.parametrize("name", [n for n in NEEDS_WEIGHTS if n != "tie_products"])
def test_a_map_that_needs_weights_refuses_others(name):
    _, spec, goal = prepared(name)
    with pytest.raises(Refused):
        apply(name, draw(spec, seed=4), spec, goal)


def test_a_latent_as_wide_as_keys_and_values_have_a_rank():
    spec, goal = CASES["factor_latent"]
    with pytest.raises(Refused, match=r"\[k v\] of all heads, 0 has rank 12, beyond 7"):
        apply("factor_latent", draw(spec), spec, goal)


def test_tied_products_refuse_scores_and_values_that_differ():
    spec, goal = spec_of("narrow", value_dim=2), spec_of("narrow_tied", value_dim=2)
    w = apply("untie", draw(goal), goal, spec)
    other = draw(spec, seed=4)
    with pytest.raises(Refused, match="scores of the heads differ"):
        apply("tie_products", w | {"q": other["q"]}, spec, goal)
    with pytest.raises(Refused, match="value map of all heads, 0 has rank 3, beyond 2"):
        apply("tie_products", w | {"v": other["v"]}, spec, goal)


def test_tied_products_without_an_output_map_need_equal_values():
    tied, narrow = (spec_of(a, output=False, out_width=None, biases="qv") for a in
                    ("narrow_tied", "narrow"))  # fmt: skip
    w = apply("untie", draw(tied), tied, narrow)
    w |= {n: regauge(w, narrow, qk=draw(narrow)["q"][:, :1] * np.eye(4))[n] for n in w}
    new = apply("tie_products", w, narrow, tied)
    inputs = inputs_of(narrow)
    assert apart(function(new, tied, inputs), function(w, narrow, inputs)) < 1e-12
    with pytest.raises(Refused, match="the values of the heads differ"):
        apply("tie_products", w | {"v": 2 * draw(narrow)["v"]}, narrow, tied)


def test_split_decides_the_rank_as_numpy_does():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(3, 9, 4)) @ rng.normal(size=(3, 4, 7))
    left, right = split(a, 4, "matrix")
    assert apart(left @ right, a) < 1e-13
    a[1] += 1e-9 * rng.normal(size=(9, 7))
    with pytest.raises(
        Refused, match=r"matrix 1 has rank 7, beyond 4: its singular value 5 is .*e"
    ):
        split(a, 4, "matrix")


def test_diagonalised_finds_equal_eigenvalues_and_refuses_complex_ones():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(6, 5)), rng.normal(size=(7, 5))
    mix = rng.normal(size=(3, 5))
    mix[:, 1] = 2 * mix[:, 0]  # a double eigenvalue
    a = np.einsum("mR,NR,nR->Nmn", q, mix, k)
    left, m, right = diagonalised(a, 5)
    assert apart(np.einsum("mR,NR,nR->Nmn", left, m, right), a) < 1e-12
    for seed in range(20):  # LAPACK takes some of these for pairs of complex ones
        rng = np.random.default_rng(seed)
        q, k = rng.normal(size=(8, 8)), rng.normal(size=(9, 8))
        mix = np.repeat(rng.normal(size=(3, 4)), 2, axis=1)
        a = np.einsum("mR,NR,nR->Nmn", q, mix, k)
        left, m, right = diagonalised(a, 8)
        assert apart(np.einsum("mR,NR,nR->Nmn", left, m, right), a) < 1e-11
    turn = np.array([[[1.0, 0], [0, 1]], [[0, 1], [-1, 0]]])
    with pytest.raises(Refused, match="imaginary part"):
        diagonalised(turn, 2)
    row = np.array([[[1.0, 0], [0, 0]], [[0, 1], [0, 0]]])
    with pytest.raises(Refused, match=r"dimensions 1 and 2 .* eigenvectors do not tell"):
        diagonalised(row, 2)
