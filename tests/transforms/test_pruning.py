"""Heads taken away for good: the same function as gates of 0, with fewer weights, or the reason."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep

from attnlab import LAYOUTS, ModelConfig, unique_parameters
from attnlab.inspect import gates_of
from attnlab.transforms import remove_heads

pytestmark = pytest.mark.usefixtures("x64")
BASE = dict(
    vocab_size=11, max_len=8, width=12, num_layers=3, num_heads=6, ffn_width=10, dtype="float64"
)
SOURCE = jnp.asarray([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
PLAIN = [name for name, row in LAYOUTS.items() if "C" not in row.letters]
HALF = {"grouped_tied": dict(num_kv_heads=3), "collaborative": dict(num_kv_heads=2)}


def texts_of(config):
    return (SOURCE, TOKENS) if config.kind == "encoder_decoder" else (TOKENS,)


@functools.cache
def draw(config):
    init = lambda key: config.build().init(key, *texts_of(config))["params"]
    shapes, rng = jax.eval_shape(init, jax.random.key(0)), np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5), shapes)


def check(config, heads, *, left, by="group", idle=None, **others):
    """Both models give the same logits to 1e-12, of gates by `head_gate` where they are of layers;
    returns the small one's config."""
    params = draw(config)
    small, weights, filled = remove_heads(config, params, heads, by=by, **others)
    names = {"heads": heads} | {f"{n}.heads": lost for n, lost in others.items()}
    edit = {}
    for name, lost in names.items():
        gates = gates_of(config, name, by=by)
        gate = np.ones(gates.shape)
        for row, numbers in lost.items():
            gate[row, list(numbers)] = 0
        edit |= gates.edit(jnp.asarray(gate))
    texts, given = texts_of(config), dict(head_gate=gate) if by == "layer" else dict(edit=edit)
    expected = jax.jit(lambda p: config.build().apply({"params": p}, *texts, **given))(params)
    got = jax.jit(lambda p: small.build().apply({"params": p}, *texts))(weights)
    assert got.dtype == expected.dtype == np.float64
    assert_close(got, expected)
    assert small.num_heads == left
    assert filled == (idle or {})
    sizes = [sum(a.size for a in jax.tree.leaves(tree)) for tree in (weights, params)]
    assert sizes[0] == unique_parameters(small) < sizes[1]
    shapes = jax.eval_shape(
        lambda key: small.build().init(key, *texts)["params"], jax.random.key(0)
    )
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(lambda a: a.shape, shapes)
    return small


@pytest.mark.parametrize("layout", deep(PLAIN, "standard", "latent"))
def test_the_same_function_in_every_layout(layout):
    config = ModelConfig(**BASE | {"layout": layout, "plan": "albert"} | HALF.get(layout, {}))
    groups = 6 // config.heads.sizes["K"]
    lost = {1: [0, 4], 2: [2, 3], 3: [0, 1, 2], 6: [1, 5]}[groups]
    check(config, {0: lost}, left=6 - len(lost))


def test_groups_that_keep_fewer_are_filled_up():
    """Per layer of cycle:2, of which layers 0 and 2 share a group; the same per group."""
    config = ModelConfig(**BASE | dict(plan="cycle:2"))
    lost, filled = {0: [1, 5], 1: [0, 2, 3], 2: [1, 5]}, {"heads": {1: (0,)}}
    small = check(config, lost, by="layer", left=4, idle=filled)
    assert small.head_dim == 2
    by_layer, by_group = (
        remove_heads(config, draw(config), heads, by=by)
        for by, heads in (("layer", lost), ("group", {0: lost[0], 1: lost[1]}))
    )
    assert by_layer[::2] == by_group[::2] == (small, filled)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (by_layer[1], by_group[1]))))
    with pytest.raises(ValueError, match="layers 0, 2 share group 0 and would lose different"):
        remove_heads(config, draw(config), {0: [1, 5], 1: [0, 2]}, by="layer")


def test_heads_that_share_keys():
    """Whole groups, or as many of each; else the fullest group counts."""
    config = ModelConfig(**BASE | dict(num_kv_heads=3, num_layers=2, plan="separate"))
    small = check(config, {0: [2, 3], 1: [0, 1]}, left=4)
    assert small.num_kv_heads == 2
    fewer = remove_heads(config, draw(config), {0: [0, 2, 5], 1: [0, 1, 3, 4]})
    assert (fewer[0].num_heads, fewer[0].num_kv_heads, fewer[2]) == (3, 3, {"heads": {1: (0,)}})
    with pytest.raises(ValueError, match="nothing would be saved"):
        remove_heads(config, draw(config), {0: [0], 1: [0, 2]})


def test_both_stacks_and_what_reads_across():
    config = ModelConfig(
        **BASE | dict(num_layers=2, ffn_width=0, plan="albert", num_heads=3),
        kind="encoder_decoder", encoder_plan="separate", positions="relative", relative_buckets=8,
    )  # fmt: skip
    lost = dict(cross={0: [0]}, encoder={0: [1], 1: [1]})
    check(config, {0: [2]}, left=2, **lost)
    with pytest.raises(ValueError, match="remove the same heads of every group"):
        remove_heads(config, draw(config), {0: [2]}, cross={0: [0]}, encoder={0: [1], 1: [0]})
    with pytest.raises(ValueError, match="nothing would be saved"):
        remove_heads(config, draw(config), {0: [2]})


def test_layers_that_attend_to_the_same_keys():
    config = ModelConfig(**BASE | dict(num_layers=2, plan="cla:1"))
    check(config, {0: [1, 2], 1: [1, 2]}, left=4)
    with pytest.raises(ValueError, match="attend to the same keys"):
        remove_heads(config, draw(config), {0: [1, 2], 1: [1, 3]})


REFUSED = {
    "chunks": (dict(layout="narrow"), {0: [1]}, "each head reads its own slice"),
    "no output": (dict(attention_output=False, value_dim=2), {0: [1]}, "a part of the output"),
    "mixed": (dict(talking_heads=True), {0: [1]}, "talking_heads mixes"),
    "deltas": (dict(plan="relaxed:1"), {0: [1]}, "without a delta first"),
    "one group alone": ({}, {0: [1]}, "nothing would be saved"),
    "no such group": (dict(plan="albert"), {1: [1]}, "no group 1; there are 1"),
    "no such head": (dict(plan="albert"), {0: [6]}, "group 0 has no head 6; it has 6"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_is_refused(case):
    fields, heads, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        remove_heads(ModelConfig(**BASE | fields), {}, heads)
