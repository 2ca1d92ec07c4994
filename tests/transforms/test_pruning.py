"""Removed heads: the same function as with a head mask of 0, with fewer weights, or the reason."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from conversions import logits, random_model

from attnlab import heads, models
from attnlab.models import FFN, Alibi, Compute, ModelConfig, Relative
from attnlab.models.config import EncoderConfig
from attnlab.transforms import remove_heads, scale_heads
from attnlab.transforms.pruning import LOCATIONS

pytestmark = pytest.mark.usefixtures("x64")
BASE = ModelConfig(
    vocab_size=11, max_len=8, width=12, num_layers=3, heads=heads.Standard(num_heads=6),
    ffn=FFN(width=10), compute=Compute(dtype="float64"),
)  # fmt: skip
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
CASES = {
    name: (kind, {}, [0, 4])
    for name, kind in heads.LAYOUTS.items()
    if kind.__module__.startswith("attnlab")  # the order in others is not known
    and not any("slice_width" in w.axes for w in kind(width=12, num_heads=6).all_weights.values())
} | {
    "grouped_tied": (heads.GroupedTied, {"num_kv_heads": 3}, [2, 3]),
    "collaborative": (heads.Collaborative, {"num_kv_heads": 2}, [0, 1, 2]),
    # Two softmax distributions for each head, those of a key head together, each with a sink.
    "pairs": (heads.Differential, {"num_kv_heads": 2, "extras": (heads.Sink(),)}, [1, 5]),
}
GROUPED = heads.Standard(num_heads=6, num_kv_heads=3)


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


@functools.cache
def draw(config):
    return random_model(config, scale=0.5)


def masked(config, params, removed, by):
    """The weights, with nothing in the output of these heads."""
    made = dict(params)
    for name, lost in removed.items():
        stack, sublayer = LOCATIONS[name]
        plan = config.encoder_model.plan if name == "encoder" else config.plan
        weights = dict(made[stack][sublayer])
        writes = ("vo", "v_bias") if "vo" in weights else ("o",)
        for index, numbers in lost.items():
            group = plan.indices(sublayer)[index] if by == "layer" else index
            for weight in set(writes) & set(weights):
                weights[weight] = weights[weight].at[group, np.array(numbers)].set(0)
        made[stack] = {**made[stack], sublayer: weights}
    return made


def check(config, lost, *, left, by="group", idle=None, **others):
    """Both models give the same logits to 1e-12; returns the config of the small one."""
    params = draw(config)
    given = jax.tree.map(np.asarray, params)  # which may be of NumPy
    small, weights, filled = remove_heads(config, given, lost, by=by, **others)
    expected = logits(config, masked(config, params, {"heads": lost, **others}, by), TOKENS)
    got = logits(small, weights, TOKENS)
    assert got.dtype == expected.dtype == np.float64
    assert_close(got, expected)
    assert np.abs(got - logits(config, params, TOKENS)).max() > 1e-3
    assert small.heads.num_heads == left
    assert filled == (idle or {})
    assert models.num_parameters(small) < models.num_parameters(config)
    models.check_params(small, weights)
    return small


@pytest.mark.parametrize("name", deep(CASES, "standard", "latent"))
def test_the_same_function_in_every_layout(name):
    kind, fields, lost = CASES[name]
    layout = kind(num_heads=6, biases=kind.bias_names, **fields)
    config = changed(heads=layout, sharing="albert", positions=Relative(buckets=8))
    check(config, {0: lost}, left=6 - len(lost))


def test_groups_that_keep_fewer_are_filled_up():
    """Per layer of cycle:2, of which layers 0 and 2 share a group; the same per group."""
    config = changed(sharing="cycle:2")
    lost, filled = {0: [1, 5], 1: [0, 2, 3], 2: [1, 5]}, {"heads": {1: (0,)}}
    small = check(config, lost, by="layer", left=4, idle=filled)
    assert small.layout.size("head_dim") == 2
    by_layer, by_group = (
        remove_heads(config, draw(config), heads, by=by)
        for by, heads in (("layer", lost), ("group", {0: lost[0], 1: lost[1]}))
    )
    assert by_layer[::2] == by_group[::2] == (small, filled)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (by_layer[1], by_group[1]))))
    with pytest.raises(ValueError, match="layers 0, 2 share group 0 and would lose different"):
        remove_heads(config, draw(config), {0: [1, 5], 1: [0, 2]}, by="layer")


@pytest.mark.parametrize("name", ["standard", "latent_absorbed"])
def test_factors_go_into_output_projections(name):
    """Where two weights in turn make the output of a head, into one of them."""
    config = changed(heads=heads.LAYOUTS[name](num_heads=6), sharing="cycle:2")
    factors = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6)))
    scaled = scale_heads(config, draw(config), {"heads": factors})
    mask = factors[np.array([0, 1, 0])]
    assert_close(
        logits(config, scaled, TOKENS), logits(config, draw(config), TOKENS, head_mask=mask)
    )


def test_heads_that_share_keys():
    """Whole groups, or as many of each; else the fullest group counts."""
    config = changed(heads=GROUPED, num_layers=2)
    small = check(config, {0: [2, 3], 1: [0, 1]}, left=4)
    assert small.layout.size("num_kv_heads") == 2
    fewer = remove_heads(config, draw(config), {0: [0, 2, 5], 1: [0, 1, 3, 4]})
    assert (fewer[0].heads.num_heads, fewer[0].heads.num_kv_heads) == (3, 3)
    assert fewer[2] == {"heads": {1: (0,)}}


def test_both_stacks_and_cross_attention():
    config = changed(
        num_layers=2, ffn=FFN(width=0), sharing="albert", heads=heads.Standard(num_heads=3),
        kind="encoder_decoder", encoder=EncoderConfig(sharing="separate"),
        positions=Relative(buckets=8, per_layer=True),
    )  # fmt: skip
    lost = dict(cross={0: [0]}, encoder={0: [1], 1: [1]})
    with pytest.raises(ValueError, match="remove the same heads of every group"):
        remove_heads(config, draw(config), {0: [2]}, cross={0: [0]}, encoder={0: [1], 1: [0]})
    with pytest.raises(ValueError, match="no smaller"):
        remove_heads(config, draw(config), {0: [2]})
    check(config, {0: [2]}, left=2, **lost)


def test_layers_that_attend_to_the_same_keys():
    check(changed(num_layers=2, sharing="cla:1"), {0: [1, 2], 1: [1, 2]}, left=4)


CONCATENATED = heads.Standard(num_heads=6, output_projection=False)
TALKING = heads.Standard(num_heads=6, extras=(heads.TalkingHeads(),))
ROUTED = heads.Standard(num_heads=6, extras=(heads.MixtureOfHeads(),))
TYPES = ((1, models.LayerOverrides(window=2)), (1, models.LayerOverrides()))
ENCODERS = {
    name: dict(kind="encoder_decoder", encoder=encoder)
    for name, encoder in (
        ("shares heads", EncoderConfig(shares_decoder=True)),
        ("has deltas", EncoderConfig(sharing="relaxed:1")),
    )
}
REFUSED = {
    "slices": (dict(heads=heads.Narrow(num_heads=6)), {0: [1]}, "each head reads its own slice"),
    "no output": (dict(heads=CONCATENATED), {0: [1]}, "a part of the output"),
    "talking heads": (dict(heads=TALKING), {0: [1]}, "talking_heads mixes"),
    "routed heads": (dict(heads=ROUTED), {0: [1]}, "mixture_of_heads depends on the order"),
    "deltas": (dict(sharing="relaxed:1"), {0: [1]}, "without a delta first"),
    "encoder's heads": (ENCODERS["shares heads"], {0: [1]}, "use untie_encoder first"),
    "encoder's deltas": (ENCODERS["has deltas"], {0: [1]}, "without a delta first"),
    "slopes": (dict(positions=Alibi()), {0: [1]}, "slopes depend on the number of heads"),
    "layer types": (dict(layer_types=TYPES), {0: [1]}, "have no heads in common"),
    "one group alone": ({}, {0: [1]}, "no smaller"),
    "none in all": (dict(heads=GROUPED, num_layers=2), {0: [0], 1: [0, 2]}, "no smaller"),
    "same keys": (dict(num_layers=2, sharing="cla:1"), {0: [1, 2], 1: [1, 3]}, "the same keys"),
    "no such group": (dict(sharing="albert"), {1: [1]}, "no group 1; there are 1"),
    "no such head": (dict(sharing="albert"), {0: [6]}, "group 0 has no head 6; it has 6"),
    "a mask": (dict(sharing="albert"), {0: np.eye(6)[0] > 0}, "must be a whole number, not .*True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_cannot_be_removed(case):
    fields, lost, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        remove_heads(changed(**fields), draw(changed(**fields)), lost)


UNKNOWN = "unknown heads of this decoder '{}'.*known: heads"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        *((name, {}, UNKNOWN.format(name)) for name in ("cross", "encoder", "haeds")),
        ("heads", dict(layer_types=TYPES), "have no heads in common; use head_mask"),
        # They would change more than the head mask does.
        *(("cross", fields, "first") for fields in ENCODERS.values()),
    ],
)
def test_factors_that_are_refused(name, fields, message):
    config = changed(**fields)
    with pytest.raises(ValueError, match=message):
        scale_heads(config, draw(config), {name: np.ones((3, 6))})
