"""Gates, sinks, extra keys, ties and norms of q and k: which are the same function, and why not."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from heads_by_hand import apart, draw, function, inputs_of, spec_of
from test_convert import ROTARY, check, floats, measure
from test_witness import refused

from attnlab import LAYOUTS, HeadSpec, multi_head_attention
from attnlab.conversion.convert import convert, permute_heads, regauge
from attnlab.conversion.factors import Refused
from attnlab.conversion.fields import NEVER
from attnlab.conversion.maps import MAPS
from attnlab.conversion.specs import untied

RNG = np.random.default_rng(4)


def tiny(layout="standard", **fields):
    return HeadSpec(layout, **dict(width=6, num_heads=2) | fields)


# Every gate, sink, key and tie in one way.


WAYS = {
    "ties and a sink": (
        tiny("narrow", ties="qk", biases="qvo", sink="one"),
        tiny(gate="element", sink="learnt", biases="kqvo"),
        ("untie_maps", "spread", "half_gate", "zero_sink"),
    ),
    "grouped ties": (
        tiny("two_stage", num_kv_heads=1, ties="kv", biases="k", gate="head"),
        tiny("low_rank_q", ties="kv", biases="k", head_dim=3, query_latent_dim=6,
             latent_norm=False, gate="element"),
        ("untie_maps", "fold_outer", "factor_queries", "spread_gate", "tie_values"),
    ),
    "without an output": (
        tiny("narrow_tied", output=False, sink="one", extra_keys=1),
        tiny("narrow", output=False, sink="learnt", extra_keys=2, gate="head"),
        ("untie", "half_gate", "zero_key", "never_sink"),
    ),
    "norms": (
        tiny(qk_norm="layer", norm_eps=0.2, scale=0.3),
        tiny(qk_norm="layer", norm_eps=0.7, qk_norm_bias=True),
        ("rescale", "add_norm_bias", "rescale_norms"),
    ),
    "a norm with a bias": (
        tiny(qk_norm="layer", qk_norm_bias=True),
        tiny(qk_norm="layer", qk_norm_bias=True, scale=0.3),
        ("rescale",),
    ),
    "counted from one": (
        tiny(qk_norm="rms_plus_one"), tiny(qk_norm="rms_plus_one", scale=0.3), ("rescale",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", deep(WAYS, "ties and a sink", "norms", "a norm with a bias"))
def test_ways(name):
    source, target, maps = WAYS[name]
    taken = check(draw(source), source, target)[1]
    assert sorted(taken) == sorted(maps)


# Ties.


def test_queries_are_keys_where_scores_are_squares():
    """q = k P: W_K P W_K^T is a W W^T exactly where P is symmetric with no negative eigenvalue."""
    source, target = tiny(biases="v"), tiny(biases="v", ties="qk")
    w, half = draw(source), RNG.normal(size=(2, 3, 3))
    square = half @ half.swapaxes(1, 2)
    times = lambda p: w | {"q": np.einsum("dnh,nhk->dnk", w["k"], p)}
    new, maps = check(times(square), source, target)
    assert maps == ("tie_squares",)
    for n in range(2):
        scores = w["k"][:, n] @ square[n] @ w["k"][:, n].T
        np.testing.assert_allclose(new["q"][:, n] @ new["q"][:, n].T, scores, atol=1e-12)
    signs = square - 2 * np.linalg.eigvalsh(square)[1, 1] * np.eye(3)  # of head 1 one is left
    signs[0] = square[0]
    witness = refused(times(signs), source, target)
    assert (witness.kind, witness.what) == ("symmetry", "score matrix of head 1")
    scores = w["k"][:, 1] @ signs[1] @ w["k"][:, 1].T
    least = np.linalg.eigvalsh(scores)[0] / np.abs(scores).max()
    np.testing.assert_allclose(witness.found, least, rtol=1e-9)
    witness = refused(times(half), source, target)
    scores = w["k"][:, 0] @ half[0] @ w["k"][:, 0].T
    lacking = np.abs(scores - scores.T).max() / np.abs(scores).max()
    np.testing.assert_allclose(witness.found, lacking, rtol=1e-9)
    assert witness.kind == "symmetry"


def test_values_are_keys_where_both_read_the_same_directions():
    """Queries and outputs of any basis; one direction more is one too many."""
    target = HeadSpec("standard", 8, 4, num_kv_heads=2, head_dim=4, ties="kv", biases="k")
    source = untied(target)
    w = floats(convert(draw(target), target, source)[0])
    bases = dict(qk=RNG.normal(size=(2, 4, 4)), vo=RNG.normal(size=(2, 4, 4)))
    hidden = floats(regauge(w, source, **bases)) | {"k_bias": RNG.normal(size=(2, 4))}
    assert check(hidden, source, target)[1] == ("tie_ranges",)
    # Where positions turn the keys, their basis is that of the values.
    assert convert(hidden, source, target, rotary=True)[0] is None
    values = floats(regauge(w, source, vo=bases["vo"]))
    assert check(values, source, target)[1] == ("tie_values",)
    hidden["v"][:, 0] += np.outer(RNG.normal(size=8), RNG.normal(size=4))
    witness = refused(hidden, source, target)
    assert (witness.kind, witness.found, witness.allowed) == ("rank", 5, 4)
    assert witness.what == "[A^T, W_V W_O] of head 0"


@pytest.mark.slow
def test_under_rotary_positions_queries_are_keys_pair_by_pair():
    target = tiny(head_dim=4, ties="qk", biases="q")
    source = untied(target)
    w = floats(convert(draw(target), target, source)[0])
    times = np.tile(RNG.uniform(0.5, 2, size=(2, 2)), 2)
    for name in ("k", "k_bias"):
        w[name] = w[name] * times
    new, certificate = convert(w, source, target, rotary=True)
    assert certificate.maps == ("tie_queries",)
    assert max(certificate.forward, certificate.gradient) < 1e-12
    assert measure(w, source, new, target, ROTARY) < 1e-12
    w["k"][:, 0, 0] *= 1.01
    assert convert(w, source, target, rotary=True)[0] is None


# Shares of a row.


def test_a_share_that_no_sink_of_zero_gives():
    """By hand, of one head: (S + 1) / (S + e^s) at S = 1 and S = 3, where a plain head has 1."""
    plain, one, learnt = (HeadSpec("standard", 3, 1, sink=s) for s in (None, "one", "learnt"))
    w = draw(learnt) | {"sink": np.array([0.7])}
    share = lambda s: (s + 1) / (s + np.exp(0.7))
    witness = refused(w, learnt, one)
    assert witness.kind == "mass"
    np.testing.assert_allclose(witness.found, abs(share(3) / share(1) - 1), rtol=1e-9)
    assert refused(w, learnt, plain).kind == "mass"
    bare = {n: a for n, a in w.items() if n != "sink"}
    witness = refused(bare, plain, one)
    np.testing.assert_allclose(witness.found, 1 / 3, rtol=1e-9)  # 2 and 4/3
    assert check(w | {"sink": np.zeros(1)}, learnt, one)[1] == ("drop_sink",)


def test_a_sink_that_no_row_sees_is_none_and_never_learns():
    plain, learnt = tiny(), tiny(sink="learnt")
    w = {n: jnp.asarray(a, jnp.float32) for n, a in draw(plain).items()}
    new, certificate = convert(w, plain, learnt)
    assert (certificate.forward, certificate.gradient) == (0, 0)
    assert (np.asarray(new["sink"]) == np.float32(NEVER)).all()
    x = jnp.asarray(RNG.normal(size=(1, 5, 6)), jnp.float32)

    @jax.jit
    def run(w, new):
        out = lambda w, spec: multi_head_attention(w, x, spec=spec, is_causal=True)
        moved = jax.grad(lambda new: jnp.sum(out(new, learnt) ** 2))(new)
        return out(w, plain), out(new, learnt), moved["sink"]

    expected, got, moved = run(w, new)
    np.testing.assert_array_equal(got, expected)
    assert not moved.any()


def test_extra_keys_of_zero_are_sinks():
    """Two of them, one of which is learnt into a sink: log(e^s + 1)."""
    two, learnt = tiny(extra_keys=2), tiny(extra_keys=1, sink="learnt")
    w = draw(two)
    assert convert(w, two, learnt)[0] is None
    for name in ("extra_k", "extra_v"):
        w[name][0] = 0
    new, maps = check(w, two, learnt)
    assert maps == ("drop_zero_key", "zero_sink")
    for name in ("extra_k", "extra_v"):
        w[name][:] = 0
    new, maps = check(w, two, tiny(sink="learnt"))
    assert maps == ("drop_zero_key", "drop_zero_key")
    np.testing.assert_allclose(new["sink"], np.log(2))


def test_half_a_gate_is_none_in_every_layout():
    """What it multiplies is doubled, once: in the output maps, in the values where there are none,
    and not where those are keys."""
    doubled = []
    for layout, output in itertools.product(LAYOUTS, (True, False)):
        letters = HeadSpec.bias_letters(layout, output)
        fields = dict(biases=letters) | ({} if output else dict(output=False, out_width=None))
        try:
            source = spec_of(layout, **fields)
        except ValueError:  # made of output maps
            continue
        w, target = draw(source), dataclasses.replace(source, gate="head")
        try:
            new = MAPS["half_gate"].weights(w, source, target)
        except Refused:
            assert (layout, output) == ("grouped_tied", False)
            continue
        inputs = inputs_of(source)
        expected = function(w, source, inputs)
        assert apart(function(new, target, inputs), expected) < 1e-13
        doubled.append(layout)
        back = MAPS["drop_gate"].weights(new, target, source)
        assert all(np.array_equal(back[name], w[name]) for name in w)
    assert len(doubled) == 2 * len(LAYOUTS) - 2


def test_gates_move_what_one_key_gives_in_as_many_directions():
    for gate, found in (("head", 2), ("element", 6)):
        source = tiny(gate=gate, sink="learnt")
        witness = refused(draw(source), source, tiny(sink="learnt"))
        assert (witness.kind, witness.found, witness.allowed) == ("gate", found, 0)
    witness = refused(draw(source), source, tiny(gate="head", sink="learnt"))
    assert (witness.kind, witness.found, witness.allowed) == ("gate", 6, 2)


def test_a_sink_sees_the_key_bias():
    """So the product of q and k is another function with one, and not without."""
    for biases, exact in (("k", False), ("q", True)):
        source, target = (
            tiny(a, sink="one", biases=b) for a, b in (("standard", biases), ("bilinear", "q"))
        )
        new, found = convert(draw(source), source, target)
        assert (new is not None) == exact, found


@pytest.mark.slow
def test_what_extra_keys_can_say_is_not_denied():
    """A value bias beside a sink is an extra key of zero whose value is minus that bias, and an
    output bias: no proof against it may hold, though no map is known."""
    source = tiny(sink="one", biases="v", num_heads=1)
    target = tiny(extra_keys=1, biases="o", num_heads=1)
    w = draw(source)
    new = {n: w[n] for n in "qkvo"} | {"extra_k": np.zeros((1, 1, 6))}
    new |= {"extra_v": -w["v_bias"][None], "o_bias": w["v_bias"][0] @ w["o"][0]}
    inputs = inputs_of(source)
    np.testing.assert_allclose(function(new, target, inputs), function(w, source, inputs))
    assert refused(w, source, target).kind == "undecided"


# Norms.


def test_the_bias_of_a_norm_of_keys_adds_the_same_to_a_row():
    source, target = (tiny(head_dim=4, qk_norm="layer", qk_norm_bias=b) for b in (True, False))
    w = draw(source)
    witness = refused(w, source, target)
    assert (witness.kind, witness.what) == ("bias", "q_bias")
    w["q_norm_bias"][:] = 0
    assert check(w, source, target)[1] == ("drop_key_norm_bias",)
    assert convert(w, source, target, rotary=True)[0] is None


@pytest.mark.parametrize("kind", deep(["rms", "layer"], "layer"))
def test_a_norm_of_queries_is_no_product_of_maps(kind):
    """Plain scores grow without bound, those of normalised queries do not."""
    plain, normed = tiny(), tiny(qk_norm=kind)
    for source, target, rule in ((plain, normed, "bounded"), (normed, plain, "y/1024")):
        witness = refused(draw(source), source, target)
        assert (witness.kind, rule in witness.reason) == ("linearity", True)
        assert witness.found > 1e-3


# Any field against any other.

STATES = [
    {}, {"gate": "head"}, {"gate": "element"}, {"sink": "learnt"}, {"sink": "one"},
    {"extra_keys": 1}, {"ties": "kv"}, {"ties": "qk"}, {"ties": "qkv"},
    {"qk_norm": "layer"}, {"qk_norm": "layer", "qk_norm_bias": True},
]  # fmt: skip


@pytest.mark.slow
def test_what_came_from_the_target_goes_back_whatever_it_looks_like():
    """No proof holds against weights that are in the target: heads in another order and basis."""
    found = 0
    for one, two in itertools.permutations(STATES, 2):
        source, target = tiny(**one), tiny(**two)
        w, certificate = convert(draw(target), target, source)
        if w is None:
            continue
        assert max(certificate.forward, certificate.gradient) < 1e-12
        found, w = found + 1, floats(w)
        w = floats(permute_heads(w, source, [1, 0]))
        if not (source.qk_norm or source.ties):
            w = floats(regauge(w, source, qk=RNG.normal(size=(3, 3))))
        if not (source.ties or source.gate == "element"):
            w = floats(regauge(w, source, vo=RNG.normal(size=(3, 3))))
        check(w, source, target)
    assert found == 21
