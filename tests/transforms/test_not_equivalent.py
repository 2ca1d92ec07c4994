"""Proofs that no weights of a target are a function: what they say, and when they are silent."""

import dataclasses

import numpy as np
import pytest
from conftest import deep
from conversions import difference, random_params, small

from attnlab.heads import ExtraKeys, Gate, HeadNorm, Sink, SoftCap
from attnlab.transforms import Conversion, NotEquivalent, Undecided, convert


def refused(layout, target, params=None, **options):
    found = convert(random_params(layout) if params is None else params, layout, target, **options)
    assert isinstance(found, NotEquivalent), found
    return found


PROOFS = {
    "a rank of scores": (small("wide", value_dim=3), small(), "rank"),
    "a rank of scores, folded": (small(head_dim=5, value_dim=3), small("alt", value_dim=3), "rank"),
    "of tied states": (small(head_dim=5, value_dim=6), small("grouped_tied", head_dim=2), "rank"),
    "of a latent": (small("wide"), small("latent", latent_norm=False), "rank"),
    "of queries": (small(), small("low_rank_query", latent_norm=False, head_dim=2), "rank"),
    "slices": (small("bilinear"), small("narrow"), "slices"),
    "slices that a gate mixes": (small("narrow", extras=(Gate(),)), small("narrow"), "slices"),
}


@pytest.mark.parametrize("name", PROOFS)
def test_proofs(name):
    layout, target, kind = PROOFS[name]
    found = refused(layout, target)
    assert found.kind == kind
    assert found.found != found.allowed


@pytest.mark.parametrize(
    ("layout", "target"),
    [
        (small(biases=("q",)), small()),
        (small("narrow", biases=("v",)), small("narrow")),
        (small(extras=(Sink(),)), small(extras=(Sink(learnt=False),))),
        (small(extras=(Gate("element"),)), small()),
        (small("tensor_product"), small()),
        (small("low_rank_query"), small(head_dim=6)),
        (small(qk_norm=HeadNorm()), small(qk_norm=HeadNorm("layer"))),
    ],
    ids=str,
)
def test_biases_options_and_norms_are_undecided(layout, target):
    found = convert(random_params(layout), layout, target)
    assert isinstance(found, Undecided)
    assert not found.forward_error < 1e-6
    assert repr(target) in found.reason


def test_one_head_of_high_rank_among_low_ones():
    layout, target = small(head_dim=5, value_dim=3), small(value_dim=3)
    params = random_params(layout)
    params["q"][:, [0, 1, 3], 3:] = 0
    assert refused(layout, target, params).found == 5
    params["q"][:, 2, 3:] = 0
    assert isinstance(convert(params, layout, target), Conversion)


def test_a_head_of_high_rank_may_be_two_of_low_rank():
    """So the rank of the values of one head is no proof against a target with more heads."""
    one = small(width=8, num_heads=1, value_dim=4)
    two = small(width=8, num_heads=2, head_dim=8, value_dim=2)
    params = random_params(one)
    halves = {n: np.repeat(params[n], 2, axis=1) for n in "qk"}
    halves |= {"v": params["v"].reshape(8, 2, 2), "o": params["o"].reshape(2, 2, 8)}
    assert difference(halves, two, params, one) < 1e-13
    assert isinstance(convert(params, one, two), Undecided)


def test_heads_that_attend_alike_prove_nothing():
    """Of two heads with one score matrix the values may cancel."""
    layout, params = small("wide", value_dim=3), random_params(small("wide", value_dim=3))
    for name in "qk":
        params[name][:, 1:] = params[name][:, :1]
    params["v"][:, 1:], params["o"][1] = params["v"][:, :1], -params["o"][0]
    params["o"][2:] = 0.0
    assert isinstance(convert(params, layout, small()), Undecided)


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-3])
def test_a_rank_of_little_weight_proves_nothing(size):
    """A singular value near the rounding of float32, or one that no softmax shows."""
    layout, params = small(head_dim=4), random_params(small(head_dim=4))
    params["q"][..., 3] *= size
    assert not isinstance(convert(params, layout, small(value_dim=4)), NotEquivalent)


def test_rounding_of_float32_proves_nothing():
    layout, target = small(), small("bilinear")
    params = {n: a.astype(np.float32) for n, a in random_params(layout).items()}
    found = convert(params, layout, target)
    assert isinstance(found, Conversion)
    assert isinstance(convert(found.params, target, layout), Undecided)


JOINED = [HeadNorm(over="all"), HeadNorm("layer", bias=True, over="all")]
EXTRAS = ((), (Gate(),), (Sink(),), (ExtraKeys(2), SoftCap(2.0)))
FIELDS = [{"qk_norm": norm} for norm in (*JOINED, HeadNorm(over="own_head"))]
FIELDS += [{"extras": extras} for extras in EXTRAS]
TARGETS = [
    small(name, biases=("q", "k", "v", "o"), **fields)
    for name in ("narrow", "narrow_tied")
    for fields in FIELDS
]


@pytest.mark.parametrize("target", deep(TARGETS, *TARGETS[:2]), ids=repr)
def test_a_target_is_never_denied_what_it_computes(target):
    """The source is a black box: a class from outside with the weights of the target."""
    own = type("Own", (type(target),), {"weights": lambda self: type(target).weights(self)})
    params = random_params(target)
    found = convert(params, target.to(own), target)
    assert isinstance(found, Undecided), found


def test_rotary_positions_leave_few_proofs():
    layout, target = small(head_dim=4), small("narrow", head_dim=4)
    assert refused(layout, target, rotary=True).kind == "slices"
    other = dataclasses.replace(layout, head_dim=2, value_dim=4)
    assert isinstance(convert(random_params(layout), layout, other, rotary=True), Undecided)
