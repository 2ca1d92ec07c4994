"""Proofs that one set of heads is not another, each with a number found by hand."""

import dataclasses

import numpy as np
import pytest
from heads_by_hand import apart, draw, function, inputs_of, spec_of

from attnlab import HeadSpec
from attnlab.conversion.convert import convert, permute_heads, regauge
from attnlab.conversion.factors import count_minors
from attnlab.conversion.witness import Witness


def refused(w, source, target, **options):
    new, witness = convert(w, source, target, **options)
    assert new is None
    assert isinstance(witness, Witness)
    return witness


def spec(layout, **fields):
    return HeadSpec(layout, **dict(width=12, num_heads=4) | fields)


# Ranks.


def test_scores_of_a_higher_rank():
    wide = spec("standard", head_dim=5, value_dim=3, biases="q")
    for layout in ("standard", "alt", "two_stage"):
        target = spec(layout, head_dim=4, value_dim=3, biases="q")
        witness = refused(draw(wide), wide, target)
        assert (witness.kind, witness.found, witness.allowed) == ("rank", 5, 4)
        assert "the scores of a head have rank 5, the target's at most 4" in witness.reason


def test_the_singular_value_that_is_too_many():
    wide, small = spec("wide", value_dim=3), spec("standard", head_dim=3)
    w = draw(wide)
    values = np.linalg.svd(w["q"][:, 0] @ w["k"][:, 0].T * 12**-0.5, compute_uv=False)
    witness = refused(w, wide, small)
    assert witness.what == "score matrix of head 0"
    assert f"(singular value 4: {values[3]:.2g}, largest {values[0]:.2g})" in witness.reason


def test_one_head_of_high_rank_among_low_ones():
    wide, small = spec("standard", head_dim=5, value_dim=3), spec("standard", value_dim=3)
    w = draw(wide)
    w["q"][:, [0, 1, 3], 3:] = 0
    witness = refused(w, wide, small)
    assert (witness.what, witness.found) == ("score matrix of head 2", 5)
    w["q"][:, 2, 3:] = 0
    assert convert(w, wide, small)[0] is not None


def test_values_of_a_higher_rank():
    wide, small = spec("standard", value_dim=5, biases="v"), spec("standard", biases="v")
    witness = refused(draw(wide), wide, small)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 5, 3)
    assert "values" in witness.reason


def test_a_head_of_high_rank_may_be_two_of_low_rank():
    """So the rank of one head's values is no proof against a target with more heads."""
    one, two = HeadSpec("standard", 8, 1, value_dim=4), HeadSpec("standard", 8, 2, head_dim=8,
                                                                  value_dim=2)  # fmt: skip
    w = draw(one)
    split = {n: np.repeat(w[n], 2, axis=1) for n in "qk"}
    split |= {"v": w["v"].reshape(8, 2, 2), "o": w["o"].reshape(2, 2, 8)}
    inputs = inputs_of(one)
    assert apart(function(split, two, inputs), function(w, one, inputs)) < 1e-13
    assert refused(w, one, two).kind == "undecided"


def test_more_heads_than_the_target_has():
    source = spec("standard", head_dim=2, value_dim=2)
    target = spec("standard", num_heads=3, head_dim=12, value_dim=12)
    w = draw(source)
    witness = refused(w, source, target)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 4, 3)
    assert "4 heads differ, the target has 3" in witness.reason
    # Two that attend alike are one.
    for name in "qk":
        w[name][:, 3] = w[name][:, 1]
    assert refused(w, source, target).kind == "undecided"


@pytest.mark.parametrize("layout", ["standard", "bilinear"])
def test_heads_that_cannot_share(layout):
    each, group = (spec_of(layout, num_kv_heads=k, scale=0.5, biases="vo") for k in (6, 3))
    witness = refused(draw(each), each, group)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 10, 5)
    assert "head 0 shares with none" in witness.reason


def test_heads_that_share_in_another_order_are_not_proved_apart():
    group = spec_of("standard", num_kv_heads=3, biases="vo")
    each = dataclasses.replace(group, num_kv_heads=6)
    w, _ = convert(draw(group), group, each)
    mixed = permute_heads(w, each, [0, 2, 4, 1, 3, 5])
    assert refused(mixed, each, group).kind in ("undecided", "parameters")
    assert convert(permute_heads(mixed, each, [0, 3, 1, 4, 2, 5]), each, group)[0] is not None


def test_a_head_of_alt_reads_as_many_directions_as_a_chunk_has():
    witness = refused(draw(spec("standard")), spec("standard"), spec("alt"))
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 9, 3)


@pytest.mark.parametrize(
    ("num_heads", "shared_dim", "found"),
    [(3, 8, 9), (3, 6, 9), (2, 6, 7), (3, 5, 6)],
)
def test_collaborative_heads_are_a_tensor_of_low_rank(num_heads, shared_dim, found):
    """Three generic 6 x 6 matrices: rank 9 at least. Two: 6 if their quotient is real."""
    bilinear = HeadSpec("bilinear", 6, num_heads)
    target = HeadSpec("collaborative", 6, num_heads, shared_dim=shared_dim)
    w = draw(bilinear, seed=1)
    witness = refused(w, bilinear, target)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", found, shared_dim)
    if num_heads == 2:
        eigenvalues = np.linalg.eigvals(w["qk"][:, 0] @ np.linalg.inv(w["qk"][:, 1]))
        assert np.abs(eigenvalues.imag).max() > 0.1
        w["qk"][:, 0] = w["qk"][:, 0] @ w["qk"][:, 0].T @ w["qk"][:, 1]
        w["qk"][:, 1] = np.eye(6) @ w["qk"][:, 1]
        assert convert(w, bilinear, target)[0] is not None


def test_states_read_fewer_directions_than_keys():
    source, target = spec("standard"), spec("grouped_tied")
    w = draw(source)
    witness = refused(w, source, target)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 12, 4 * 2 + 2)
    # In 10 directions it is no proof, and there may be one: the keys are then tied to nothing.
    few = np.random.default_rng(0).normal(size=(12, 10)) @ np.eye(10, 12)
    w["k"] = np.tensordot(few, w["k"], 1)
    assert refused(w, source, target).what != witness.what


def test_products_of_rank_one_have_few_minors():
    """Tied states are no 12 products of three vectors, though they read 12 and 10 directions."""
    rng = np.random.default_rng(0)
    q, mix, k = (rng.normal(size=a) for a in ((7, 5), (3, 5), (6, 5)))
    products = np.einsum("aR,NR,eR->Nae", np.linalg.qr(q)[0][:5], mix, k)
    assert count_minors(products) == 5 * 4 // 2
    assert count_minors(rng.normal(size=(3, 5, 6))) == 5 * 6 // 2
    source, target = spec("grouped_tied"), spec("collaborative")
    witness = refused(draw(source), source, target)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 13, 12)
    assert "independent minors of their sums, at most 66 in the target" in witness.reason
    target = spec("collaborative", shared_dim=16, value_dim=3)
    assert convert(draw(source), source, target)[0] is not None


# Larger texts.


@pytest.mark.parametrize(
    ("source", "target", "rule"),
    [
        ("standard", "tensor", "gives 4 times the output"),
        ("tensor", "standard", "gives 2 times the output"),
        ("latent", "tensor", "gives 4 times the output"),
        ("tensor", "latent", "the target's output stays bounded"),
        ("standard", "low_rank_q", "the target's queries are bounded"),
        ("low_rank_q", "standard", "queries of 2 x and keys of y/2"),
    ],
)
def test_scores_and_values_that_grow_otherwise(source, target, rule):
    one, two = spec(source), spec(target)
    w = draw(one)
    witness = refused(w, one, two)
    assert (witness.kind, rule in witness.reason) == ("linearity", True)
    assert witness.found > 1e-3
    x, y, z = inputs_of(one)
    values = lambda t: function(w, one, (x, y, t * z))
    moved = values(2) - values(0) - {"2": 2, "4": 4}.get(rule[6:7], 1) * (values(1) - values(0))
    plain, scaled = values(1), function(w, one, (2 * x, y / 2, z))
    if target == "low_rank_q":
        assert apart(scaled, plain) < 1e-12
        assert apart(function(w, one, (x, 0 * y, z)), plain) > 1e-3
    else:
        assert apart(scaled, plain) > 1e-3 or np.abs(moved).max() > 1e-3


def test_texts_of_another_size_are_no_proof_where_nothing_shows_it():
    """Values that go nowhere, and a norm that is left out."""
    one, two = spec("tensor"), spec("standard")
    w = draw(one)
    w["o"] = 0 * w["o"]
    assert refused(w, one, two).kind != "linearity"
    one, two = spec("low_rank_q", latent_norm=False), spec("standard", head_dim=5, value_dim=6)
    assert refused(draw(one), one, two).kind == "rank"
    with_bias = spec("tensor", biases="a", query_rank=4, key_rank=3, value_rank=3)
    assert refused(draw(spec("standard")), spec("standard"), with_bias).kind != "linearity"
    assert refused(draw(with_bias), with_bias, spec("tensor")).kind == "linearity"


# Chunks.


@pytest.mark.parametrize("layout", ["standard", "alt", "bilinear"])
def test_heads_that_read_more_than_their_chunk(layout):
    source, target = spec(layout, value_dim=3), spec("narrow", value_dim=3)
    w = draw(source)
    witness = refused(w, source, target)
    assert witness.kind == "permutation"
    assert witness.found > 1e-3
    one, two = inputs_of(source), [a[::-1] for a in inputs_of(source)]
    swap = lambda a, b: [np.concatenate([y[..., :3], x[..., 3:]], -1) for x, y in zip(a, b)]  # noqa: B905
    f = lambda a: function(w, source, a)
    missed = f(swap(one, two)) + f(swap(two, one)) - f(one) - f(two)
    assert np.abs(missed).max() > 1e-3


def test_heads_under_rotary_positions_read_more_than_their_chunk():
    source, target = spec("standard", head_dim=4), spec("narrow", head_dim=4)
    assert refused(draw(source), source, target, rotary=True).kind == "permutation"


def test_one_projection_commutes_with_permuting_the_chunks():
    """V4 without W_O does, exactly; V3 does not."""
    tied, narrow = (spec(a, output=False) for a in ("narrow_tied", "narrow"))
    w = draw(narrow)
    witness = refused(w, narrow, tied)
    assert witness.kind == "permutation"
    order = [3, 0, 1, 2]
    turn = lambda a: a.reshape(2, -1, 4, 3)[:, :, order].reshape(a.shape)
    inputs = inputs_of(narrow)

    def misses(w, one):
        plain = turn(function(w, one, inputs))
        return apart(function(w, one, [turn(a) for a in inputs]), plain)

    assert misses(draw(tied), tied) < 1e-14
    assert misses(w, narrow) > 0.1
    assert 0.1 < witness.found < 10


def test_chunks_that_commute_are_not_proved_apart():
    """One projection, in bases that turn with the positions: the same function, no map known."""
    tied, narrow = (HeadSpec(a, 8, 2, output=False, biases="qk") for a in ("narrow_tied", "narrow"))
    w, _ = convert(draw(tied), tied, narrow)
    turns = np.array([[[a, -b], [b, a]] for a, b in np.random.default_rng(0).normal(size=(4, 2))])
    bases = np.einsum("npij,pq->nipjq", turns.reshape(2, 2, 2, 2), np.eye(2)).reshape(2, 4, 4)
    w = regauge(w, narrow, qk=bases, rotary=True)
    assert refused(w, narrow, tied, rotary=True).kind in ("undecided", "parameters")


def test_heads_that_differ_on_the_same_chunk():
    tied, narrow = spec("narrow_tied", biases="kv"), spec("narrow", biases="kv")
    w = draw(narrow)
    witness = refused(w, narrow, tied)
    assert (witness.kind, witness.what) == ("permutation", "probabilities of equal chunks")
    # A head whose output goes nowhere may have any scores: no proof.
    w, _ = convert(draw(tied), tied, narrow)
    w["q"][2], w["o"][2] = 5.0, 0.0
    assert refused(w, narrow, tied).kind != "permutation"


# Biases.


@pytest.mark.parametrize(
    ("letter", "layout"),
    [
        ("q", "standard"),
        ("v", "standard"),
        ("o", "standard"),
        ("v", "narrow"),
        ("q", "collaborative"),
    ],
)
def test_a_bias_that_shows(letter, layout):
    source, target = (spec(layout, biases=b) for b in ("qvo", "qvo".replace(letter, "")))
    w = draw(source)
    witness = refused(w, source, target)
    assert (witness.kind, witness.what) == ("bias", f"{letter}_bias")
    if letter == "o":
        np.testing.assert_allclose(witness.found, np.abs(w["o_bias"]).max(), rtol=1e-12)
    w[f"{letter}_bias"][:] = 0
    assert convert(w, source, target)[0] is not None


# Dimensions.


def test_rotary_heads_have_a_smaller_gauge():
    """2 dimensions per pair of q and k leave the function alone, and V x V of v and o."""
    source, target = (HeadSpec("standard", 4, 2, head_dim=h, value_dim=1) for h in (4, 2))
    witness = refused(draw(source), source, target, rotary=True)
    assert witness.kind == "parameters"
    count = lambda h: 2 * (2 * 4 * h + 8) - 2 * (h + 1)  # per head: q and k, v and o
    assert (witness.found, witness.allowed) == (count(4), count(2))


def test_what_is_not_known_is_said():
    source, target = (HeadSpec("wide", 40, 2, qk_norm=kind) for kind in ("rms", "layer"))
    witness = refused(draw(source), source, target)
    assert witness.kind == "undecided"
    assert np.isnan(witness.found)
    assert "no map of MAPS applies and no proof is known" in witness.reason
