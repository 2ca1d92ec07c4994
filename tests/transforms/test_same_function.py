"""Heads in another order and in other bases."""

import numpy as np
import pytest
from conversions import difference, random_params, sized, small

from attnlab.heads import ExtraKeys, Gate, HeadNorm, MixtureOfHeads, Sink, TalkingHeads
from attnlab.heads.layout import Extra
from attnlab.transforms import permute_heads, reparametrize

RNG = np.random.default_rng(8)


def six(name="standard", **fields):
    """Six heads of sizes that differ."""
    return sized(name, **{"out_width": None} | fields)


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (six(), [3, 5, 4, 0, 2, 1]),
        (six("two_stage"), [2, 0, 1, 4, 3, 5]),
        (six("collaborative"), [3, 5, 4, 0, 2, 1]),
        (six("bilinear"), [3, 5, 4, 0, 2, 1]),
        (six("alt"), [3, 1, 0, 4, 2, 5]),
        (six("absorbed"), [3, 1, 0, 4, 2, 5]),
        (six(extras=(Gate(), Sink(), ExtraKeys(2))), [3, 5, 4, 0, 2, 1]),
        (six("differential", extras=(ExtraKeys(2),)), [3, 5, 4, 0, 2, 1]),
        (six("alt", extras=(TalkingHeads(), Gate("element"))), [3, 1, 0, 4, 2, 5]),
    ],
    ids=str,
)
def test_the_order_of_heads_does_not_matter(layout, order):
    params = random_params(layout)
    new = permute_heads(params, layout, order)
    assert difference(new, layout, params, layout) < 1e-13
    name = "vo" if "vo" in params else "o"
    np.testing.assert_array_equal(new[name], params[name][order])


def test_orders_that_are_refused():
    each = six(num_kv_heads=6)
    for layout, order, message in (
        (six(), [3, 1, 0, 4, 2, 5], "splits heads that share keys and values; keep each 3"),
        (each, [0, 1, 2, 3, 4, 4], r"each of 0\.\.5 once"),
        (each, [0, 1, 2, 3, 4, 5.5], "order must be a whole number, not 5.5"),
        (each, [0, True, 2, 3, 4, 5], "order must be a whole number, not True"),
        (six("narrow"), [1, 0, 2, 3, 4, 5], "its slice of x"),
        (six("narrow_tied"), [1, 0, 2, 3, 4, 5], "its slice of x"),
        (six(output_projection=False, biases=()), [3, 4, 5, 0, 1, 2], "its slice of the output"),
        (six(extras=(MixtureOfHeads(),)), [3, 4, 5, 0, 1, 2], "depends on the order of the heads"),
    ):
        with pytest.raises(ValueError, match=message):
            permute_heads(random_params(layout), layout, order)


class Unknown(Extra):
    """It may be applied between any two matrices."""

    between = "any"


ROTATIONS = np.array([[[a, -b], [b, a]] for a, b in RNG.normal(size=(2, 2))])
COMMUTES = np.einsum("pij,pq->ipjq", ROTATIONS, np.eye(2)).reshape(4, 4)


@pytest.mark.parametrize("name", ["standard", "two_stage", "narrow", "narrow_tied", "alt"])
@pytest.mark.parametrize("per_head", [False, True])
def test_other_bases_are_the_same_function(name, per_head):
    layout = six(name)
    heads = {"standard": 2, "two_stage": 2, "narrow_tied": 1}.get(name, 6)
    shape = (heads,) if per_head else ()
    params = random_params(layout)
    qk, vo = RNG.normal(size=(*shape, 4, 4)), RNG.normal(size=(*shape, 5, 5))
    new = reparametrize(params, layout, qk=qk, vo=vo)
    assert np.abs(new["q"] - params["q"]).max() > 0.1
    assert difference(new, layout, params, layout) < 1e-10
    assert difference(new, layout, params, layout, rotary=True) > 0.01


def test_bases_that_commute_with_rotary_positions():
    layout, params = six(), random_params(six())
    new = reparametrize(params, layout, qk=COMMUTES, rotary=True)
    assert difference(new, layout, params, layout, rotary=True) < 1e-11
    with pytest.raises(ValueError, match="does not commute with rotary"):
        reparametrize(params, layout, qk=RNG.normal(size=(4, 4)), rotary=True)


@pytest.mark.parametrize(
    ("layout", "bases", "message"),
    [
        (six(), dict(qk=RNG.normal(size=(6, 4, 4))), "the same for all heads of one k head"),
        (six(), dict(vo=np.eye(4)), r"vo has shape \(4, 4\); .* takes \(5, 5\) or \(2, 5, 5\)"),
        (six(), dict(qk=np.zeros((4, 4))), "invertible"),
        (small(width=6, num_heads=2), dict(qk=np.eye(3), rotary=True), "even head_dim, not 3"),
        (six(qk_norm=HeadNorm()), dict(qk=np.eye(4)), "qk_norm depends on the basis"),
        (six(extras=(Gate("element"),)), dict(vo=np.eye(5)), "gate may depend"),
        (six(extras=(Unknown(),)), dict(vo=np.eye(5)), "Unknown may depend on the basis of v"),
        (six(extras=(ExtraKeys(2), Unknown())), dict(qk=np.eye(4)), "Unknown may depend"),
        (six("absorbed"), dict(vo=np.eye(3)), "no v and o per head"),
        (six("differential", num_kv_heads=6), dict(vo=np.eye(5)), "leave vo out"),
        (small("grouped_tied", width=6, num_heads=2), dict(vo=np.eye(3)), "are its keys"),
        (small(width=6, num_heads=2, tie="kv"), dict(qk=np.eye(3)), "leave qk out"),
        (small(width=6, num_heads=2, tie="qkv"), dict(vo=np.eye(3)), "leave vo out"),
    ],
)
def test_bases_that_are_refused(layout, bases, message):
    with pytest.raises(ValueError, match=message):
        reparametrize(random_params(layout), layout, **bases)
