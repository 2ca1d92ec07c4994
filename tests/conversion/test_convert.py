"""The same function in another layout: ways, certificates, other orders and bases, low rank."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads_by_hand import apart, draw, function, inputs_of, spec_of

from attnlab import HeadSpec, init_heads
from attnlab.conversion.convert import Certificate, convert, permute_heads, regauge, truncate
from attnlab.conversion.measure import Situation
from attnlab.heads.old.spec import absorption

grouped, each = spec_of("standard"), spec_of("standard", num_kv_heads=None)
ROTARY = Situation(rotary=True)


def floats(w):
    return {name: np.asarray(a, np.float64) for name, a in w.items()}


def measure(w, source, new, target, situation=Situation()):  # noqa: B008
    inputs = inputs_of(source)
    return apart(
        function(floats(new), target, inputs, situation), function(w, source, inputs, situation)
    )


def check(w, source, target, **options):
    """Converted, certified, and the same by hand."""
    new, certificate = convert(w, source, target, **options)
    assert isinstance(certificate, Certificate), certificate
    assert max(certificate.forward, certificate.gradient) < 1e-12
    assert {name: a.shape for name, a in new.items()} == target.shapes
    assert measure(w, source, new, target, Situation(**options)) < 1e-12
    return floats(new), certificate.maps


def spec(layout, **fields):
    return HeadSpec(layout, **dict(width=12, num_heads=4, out_width=10) | fields)


@pytest.mark.parametrize(
    ("source", "target", "maps"),
    [
        (spec("narrow", biases="qkvo"), spec("narrow", biases="qkvo"), ()),
        (
            spec("narrow_tied", biases="qkvo", scale=0.3),
            spec("absorbed", biases="qvo"),
            ("untie", "spread", "multiply_scores", "multiply_values", "rescale"),
        ),
        (
            spec("narrow", output=False, out_width=None, biases="kv"),
            spec("wide", out_width=None, biases="kv"),
            ("spread", "rename", "identity_output", "pad_head_dim", "pad_value_dim", "rescale"),
        ),
        (
            spec("collaborative", num_kv_heads=2, key_width=7, value_width=9, biases="qvo"),
            spec("standard", key_width=7, value_width=9, head_dim=12, value_dim=3, biases="qvo"),
            ("repeat_keys", "repeat_heads"),
        ),
        (
            spec("alt", head_dim=2, value_dim=3, biases="qo"),
            spec("collaborative", shared_dim=9, biases="qko"),
            ("fold_down", "block_indicators", "pad_shared_dim", "add_zero_bias", "rescale"),
        ),
        (
            spec("standard", num_heads=6, num_kv_heads=2, head_dim=2, biases="k"),
            spec("collaborative", num_heads=6, num_kv_heads=2, value_dim=2),
            ("drop_key_bias", "repeat_heads", "block_indicators", "share_heads", "rescale"),
        ),
        (
            spec("absorbed", key_width=7, value_width=9, biases="v"),
            spec("standard", key_width=7, value_width=9, head_dim=8, value_dim=11, biases="v"),
            ("identity_values", "identity_keys", "pad_head_dim", "pad_value_dim", "rescale"),
        ),
    ],
    ids=lambda a: a.layout if isinstance(a, HeadSpec) else "",
)
def test_ways(source, target, maps):
    _, taken = check(draw(source), source, target)
    assert sorted(taken) == sorted(maps)


def test_weights_of_low_rank_come_back_to_smaller_heads():
    """In a basis of their own, with keys and values of a group that only look different."""
    small = spec_of("standard", biases="qvo")
    wide = spec_of("wide", num_kv_heads=6, head_dim=10, value_dim=10, biases="qvo")
    w, _ = check(draw(small), small, wide)
    rng = np.random.default_rng(5)
    hidden = floats(
        regauge(w, wide, qk=rng.normal(size=(6, 10, 10)), vo=rng.normal(size=(6, 10, 10)))
    )
    _, maps = check(hidden, wide, small)
    assert {"multiply_scores", "multiply_values", "factor_values", "factor_keys"} < set(maps)


def test_block_diagonal_and_equal_heads_are_found_from_standard():
    tied = spec("narrow_tied", biases="qkvo")
    standard = spec("standard", biases="qkvo")
    w, _ = check(draw(tied), tied, standard)
    _, maps = check(w, standard, tied)
    assert maps == ("cut_chunks", "tie")


def tiny(layout, **fields):
    return HeadSpec(layout, **dict(width=4, num_heads=2, out_width=3) | fields)


def test_rotary_positions_allow_a_multiple_of_the_head_width():
    two, four, six = (tiny("standard", head_dim=h, value_dim=3, biases="qk") for h in (2, 4, 6))
    _, maps = check(draw(two), two, six, rotary=True)
    assert maps == ("pad_rotary_pairs", "rescale")
    assert convert(draw(four), four, six, rotary=True)[0] is None


@pytest.mark.parametrize(
    ("source", "target", "options", "dimensions"),
    [
        (tiny("standard"), tiny("bilinear"), dict(rotary=True), None),
        (tiny("standard", qk_norm="rms"), tiny("wide", qk_norm="rms"), {}, None),
        (tiny("standard", qk_norm="layer"), tiny("standard"), {}, None),
        # What the key bias of a head of width 2 adds under a soft cap: 2 dimensions a head.
        (tiny("standard", biases="k"), tiny("standard"), dict(logits_soft_cap=3.0), 4),
        (tiny("standard", biases="k"), tiny("standard"), dict(rotary=True), 4),
    ],
)
def test_refusals(source, target, options, dimensions):
    new, witness = convert(draw(source), source, target, **options)
    assert new is None
    if dimensions:
        assert witness.kind == "parameters"
        assert witness.found - witness.allowed == dimensions


def test_weights_keep_their_dtype_and_the_flag_stays():
    source, target = spec("narrow"), spec("bilinear")
    for dtype in (jnp.float32, jnp.bfloat16):
        w = init_heads(jax.random.key(0), source, dtype=dtype)
        new, certificate = convert(w, source, target, key=jax.random.key(3))
        assert {a.dtype for a in new.values()} == {jnp.dtype(dtype)}
        assert certificate.forward < 1e-12
    assert not jax.config.jax_enable_x64
    assert {a.dtype for a in convert(draw(source), source, target)[0].values()} == {
        np.dtype("float64")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(q=np.ones((12, 3))),
            r"weight 'q' is of shape \(12, 3\), expected is D N H = \(12, 4, 3\)",
        ),
        (dict(o=None), r"weight 'o' is missing, expected is N V O = \(4, 3, 10\)"),
        (
            dict(q_bias=np.ones((4, 3))),
            r"weight 'q_bias' is of shape \(4, 3\), expected is no such",
        ),
        (dict(k=np.full((12, 4, 3), np.nan)), "weight 'k' holds NaN"),
    ],
)
def test_weights_that_do_not_fit(change, message):
    w = {n: a for n, a in (draw(spec("standard")) | change).items() if a is not None}
    for call in (convert, truncate, permute_heads, regauge):
        arguments = {convert: [spec("wide")], truncate: [2], permute_heads: [[0, 1, 2, 3]]}
        with pytest.raises(ValueError, match=message):
            call(w, spec("standard"), *arguments.get(call, []))


@pytest.mark.parametrize("name", ["width", "key_width", "value_width", "out_width"])
def test_other_inputs_are_no_other_layout(name):
    other = spec("standard", **{"head_dim": 3, name: 8})
    with pytest.raises(ValueError, match="give both specs the same widths"):
        convert(draw(spec("standard")), spec("standard"), other)


# Other orders of the heads.


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("standard", [3, 5, 4, 0, 2, 1]),
        ("two_stage", [2, 0, 1, 4, 3, 5]),
        ("collaborative", [3, 5, 4, 0, 2, 1]),
        ("bilinear", [3, 5, 4, 0, 2, 1]),
        ("alt", [3, 1, 0, 4, 2, 5]),
        ("absorbed", [3, 1, 0, 4, 2, 5]),
    ],
)
def test_the_order_of_the_heads_does_not_matter(layout, order):
    one = spec_of(layout)
    w = draw(one)
    new = floats(permute_heads(w, one, order))
    assert measure(w, one, new, one) < 1e-13
    assert measure(w, one, new, one, Situation(rotary=True, logits_soft_cap=2.0)) < 1e-13
    name = "qk" if "qk" in w else "q_bias" if layout == "alt" else "o"
    axis = 1 if name == "qk" else 0
    np.testing.assert_array_equal(new[name], np.take(w[name], order, axis))


def test_orders_that_are_refused():
    with pytest.raises(ValueError, match="splits heads that share keys and values; keep each 3"):
        permute_heads(draw(grouped), grouped, [3, 1, 0, 4, 2, 5])
    with pytest.raises(ValueError, match=r"each of 0\.\.5 once"):
        permute_heads(draw(each), each, [0, 1, 2, 3, 4, 4])
    for layout in ("narrow", "narrow_tied"):
        with pytest.raises(ValueError, match="its chunk of x"):
            permute_heads(draw(spec_of(layout)), spec_of(layout), [1, 0, 2, 3, 4, 5])
    without = spec("standard", output=False, out_width=None)
    with pytest.raises(ValueError, match="its chunk of the output"):
        permute_heads(draw(without), without, [1, 0, 2, 3])


# Other bases.

RNG = np.random.default_rng(8)
TURNS = np.array([[[a, -b], [b, a]] for a, b in RNG.normal(size=(2, 2))])  # 2 pairs
COMMUTES = np.einsum("pij,pq->ipjq", TURNS, np.eye(2)).reshape(4, 4)


@pytest.mark.parametrize("layout", ["standard", "two_stage", "narrow", "narrow_tied", "alt"])
@pytest.mark.parametrize("per_head", [False, True])
def test_other_bases_are_the_same_function(layout, per_head):
    one = spec_of(layout)
    heads = {"standard": 2, "two_stage": 2, "narrow_tied": 1}.get(layout, 6)
    shape = (heads,) if per_head else ()
    w = draw(one)
    qk, vo = RNG.normal(size=(*shape, 4, 4)), RNG.normal(size=(*shape, 5, 5))
    new = floats(regauge(w, one, qk=qk, vo=vo))
    assert apart(new["q"], w["q"]) > 0.1
    assert apart(new["v"], w["v"]) > 0.1
    assert measure(w, one, new, one) < 1e-11
    assert measure(w, one, new, one, ROTARY) > 0.01


@pytest.mark.parametrize("layout", ["collaborative", "bilinear"])
def test_values_alone_have_a_basis(layout):
    one = spec_of(layout)
    w = draw(one)
    new = floats(regauge(w, one, vo=RNG.normal(size=(2, 5, 5))))
    assert measure(w, one, new, one) < 1e-12
    with pytest.raises(ValueError, match="no q and k per head"):
        regauge(w, one, qk=np.eye(4))


def test_bases_that_commute_with_rotary_positions():
    w = draw(grouped)
    new = floats(regauge(w, grouped, qk=COMMUTES, rotary=True))
    assert measure(w, grouped, new, grouped, ROTARY) < 1e-12
    with pytest.raises(ValueError, match="does not commute with rotary"):
        regauge(w, grouped, qk=RNG.normal(size=(4, 4)), rotary=True)


def test_bases_that_are_refused():
    w, six = draw(grouped), RNG.normal(size=(6, 4, 4))
    with pytest.raises(ValueError, match="the same for all heads of one k head"):
        regauge(w, grouped, qk=six)
    same = np.repeat(six[:2], 3, axis=0)
    expected, got = regauge(w, grouped, qk=six[:2]), regauge(w, grouped, qk=same)
    np.testing.assert_array_equal(got["q"], expected["q"])
    with pytest.raises(
        ValueError, match=r"vo has shape \(4, 4\); layout 'standard' takes \(5, 5\)"
    ):
        regauge(w, grouped, vo=np.eye(4))
    normed = spec("standard", qk_norm="rms")
    with pytest.raises(ValueError, match="sees the basis"):
        regauge(draw(normed), normed, qk=np.eye(3))
    absorbed = spec("absorbed")
    with pytest.raises(ValueError, match="no v and o per head"):
        regauge(draw(absorbed), absorbed, vo=np.eye(3))
    tied = HeadSpec("grouped_tied", width=6, num_heads=2)
    with pytest.raises(ValueError, match="values of layout 'grouped_tied' are its keys"):
        regauge(draw(tied), tied, vo=np.eye(3))


def test_bases_of_maps_that_are_one():
    """A key that is the value too has the basis of the output map; one that is the query, its."""
    one = spec("standard", ties="qk")
    w = draw(one)
    new = floats(regauge(w, one, vo=RNG.normal(size=(3, 3))))
    apart_maps = absorption(one)[0]
    both = apart_maps.weights(w), apart_maps.weights(new)
    assert measure(both[0], apart_maps.spec, both[1], apart_maps.spec) < 1e-11
    for ties, argument in (("qk", "qk"), ("kv", "qk"), ("kv", "vo"), ("qkv", "vo")):
        one = spec("standard", ties=ties, extra_keys=2)
        with pytest.raises(ValueError, match=f"leave {argument} out"):
            regauge(draw(one), one, **{argument: np.eye(3)})


# Low rank.


@pytest.mark.parametrize("layout", ["bilinear", "standard", "narrow", "collaborative"])
def test_truncation_is_the_nearest_of_its_rank(layout):
    one = spec_of(layout, biases="vo")
    w = draw(one)
    bilinear = spec_of("bilinear", num_kv_heads=6, key_width=one.key_width, biases="vo",
                       value_width=one.value_width, scale=one.score_scale)  # fmt: skip
    scores = floats(convert(w, one, bilinear)[0])["qk"]
    for rank in (1, 2):
        new, cost = truncate(w, one, rank)
        assert cost.spec.sizes["H"] == rank
        low = np.einsum("DNH,ENH->DNE", new["q"], new["k"])
        for n in range(6):
            u, s, vt = np.linalg.svd(scores[:, n])
            assert apart(low[:, n], (u[:, :rank] * s[:rank]) @ vt[:rank]) < 1e-12
            kept = np.linalg.norm(scores[:, n] - low[:, n]) / np.linalg.norm(scores[:, n])
            np.testing.assert_allclose(cost.score_error[n], kept, rtol=1e-9, atol=1e-14)
        if layout != "narrow" or rank == 1:
            assert 1e-3 < cost.output_difference < 10


def test_truncation_at_full_rank_costs_nothing():
    w = draw(grouped)
    new, cost = truncate(w, grouped, 4)
    assert max(*cost.score_error, cost.output_difference) < 1e-12
    assert measure(w, grouped, new, cost.spec) < 1e-12


def test_float32_products_are_not_of_low_rank_but_nearly():
    standard, bilinear = spec("standard"), spec("bilinear")
    w, _ = convert(init_heads(jax.random.key(0), standard), standard, bilinear)
    new, witness = convert(w, bilinear, standard)
    assert new is None
    assert witness.kind == "rank"
    new, cost = truncate(w, bilinear, 3)
    assert 1e-9 < cost.score_error.max() < 1e-6
    assert new["q"].dtype == jnp.float32


def test_truncations_that_are_refused():
    with pytest.raises(ValueError, match="rank must be at least 1"):
        truncate(draw(each), each, 0)
    for other, reason in (
        (spec("absorbed"), "not layout 'absorbed'"),
        (spec("standard", qk_norm="rms"), "no qk_norm"),
        (spec("standard", extra_keys=2), "no extra_keys, which are in the basis"),
        (spec("narrow", sink="learnt", biases="k"), "no key bias, which a sink sees"),
    ):
        with pytest.raises(ValueError, match=f"needs plain scores q k\\^T: {reason}"):
            truncate(draw(other), other, 2)


# What is published: DESIGN's variants V1 to V9.


def test_a_rotation_of_the_residual_stream_is_absorbed_by_standard_heads_alone():
    """With weights R^T q, R^T k, R^T v, o R; narrow heads depend on the basis."""
    one = HeadSpec("standard", 12, 4)
    w, (x, y, z) = draw(one), inputs_of(one)
    turn = np.linalg.qr(RNG.normal(size=(12, 12)))[0]
    rotated = {n: np.einsum("ij,jNH->iNH", turn.T, w[n]) for n in "qkv"} | {"o": w["o"] @ turn}
    expected = function(w, one, (x, y, z)) @ turn
    assert apart(function(rotated, one, (x @ turn, y @ turn, z @ turn)), expected) < 1e-12
    narrow = HeadSpec("narrow", 12, 4)
    blocks, _ = convert(draw(narrow), narrow, one)
    turned = {n: np.einsum("ij,jNH->iNH", turn.T, blocks[n]) for n in "qkv"}
    back, witness = convert(turned | {"o": blocks["o"] @ turn}, one, narrow)
    assert back is None
    assert witness.kind == "permutation"


def test_zero_padding_rescales_q_by_the_root_of_the_head_widths():
    """V1 lies in V5 for d_p >= s: Bhojanapalli et al. 2020."""
    small, large = HeadSpec("standard", 12, 4), HeadSpec("standard", 12, 4, head_dim=7)
    w = draw(small)
    new, _ = check(w, small, large)
    np.testing.assert_allclose(new["q"][..., :3], w["q"] * np.sqrt(7 / 3), rtol=1e-14)
    np.testing.assert_array_equal(new["k"][..., 3:], 0)


def test_bilinear_is_the_product_of_queries_and_keys():
    one, v9 = HeadSpec("standard", 12, 4), HeadSpec("bilinear", 12, 4, scale=3**-0.5)
    w = draw(one)
    new, _ = check(w, one, v9)
    for n in range(4):
        np.testing.assert_allclose(new["qk"][:, n], w["q"][:, n] @ w["k"][:, n].T, atol=1e-14)
