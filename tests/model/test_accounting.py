"""Formulas equal the tree, the published counts, and the products that a trace holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from conftest import deep, diagonal, product_flops

from attnlab import (
    LAYOUTS,
    HeadSpec,
    ModelConfig,
    applied_parameters,
    flops_per_token,
    init_cache,
    multi_head_attention,
    plan_names,
    unique_parameters,
)
from attnlab.heads.old.cost import cache_bytes_per_token, call_flops
from attnlab.model.accounting import model_cache_bytes
from attnlab.model.match import match
from attnlab.model.outer import count_outer

SMALL = ModelConfig(
    vocab_size=29, max_len=11, width=12, num_layers=5, num_heads=3, ffn_width=17, value_dim=5
)


def with_layout(layout, **fields):
    """SMALL with a layout, less the sizes that it has no axis for."""
    letters = LAYOUTS[layout].letters
    if "V" not in letters:
        fields["value_dim"] = None
    if "H" not in letters:
        fields.pop("head_dim", None)
    if layout == "grouped_tied":  # a part of the value, which is 5 wide
        fields |= {"head_dim": 4} if "head_dim" in fields else {}
    if layout == "absorbed" and fields.get("positions") == "rotary":
        fields["positions"] = "none"
    return dataclasses.replace(SMALL, layout=layout, **fields)


def tree_of(config):
    tokens = jnp.zeros((1, 2), jnp.int32)
    texts = (tokens, tokens) if config.kind == "encoder_decoder" else (tokens,)
    return jax.eval_shape(config.build().init, jax.random.key(0), *texts)["params"]


def size_of(tree):
    return sum(a.size for a in jax.tree.leaves(tree))


OPTIONS = [
    {},
    {"attention_biases": "", "ffn_bias": False, "norm_bias": False, "readout": "own"},
    {"norm": "post", "positions": "sinusoidal", "embedding_norm": True, "token_types": 3},
    {
        "positions": "rotary",
        "readout": "own",
        "readout_bias": True,
        "head_dim": 6,
        "kind": "encoder",
    },
    {"talking_heads": True, "order": "factored", "window": 2},
    {
        "activation": "gated_silu",
        "norm_kind": "rms",
        "norm_bias": False,
        "embedding_width": 12,
        "embedding_norm": True,
    },
    {
        "kind": "encoder",
        "embedding_width": 7,
        "embedding_norm": True,
        "readout_transform": "tanh",
        "readout_bias": True,
        "pooler": "first",
        "pooled_classes": 2,
    },
    {"readout": "none", "positions": "relative", "ffn_bias": False, "activation": "gated_gelu"},
    {"embedding_width": 5, "readout": "own", "readout_transform": "gelu"},
    {"kind": "encoder_decoder", "encoder_layers": 3, "encoder_plan": "albert"},
    {"kind": "encoder_decoder", "share_encoder": True, "positions": "relative"},
    {"kind": "encoder_decoder", "cross": "merged", "encoder_layers": 2, "talking_heads": True},
]
# What a trace has beside the products of the tokens: nothing here, and texts of its own there.
TRACED = [{}, *(options for options in OPTIONS[5:] if "pooler" not in options)]


@pytest.mark.parametrize(
    ("layout", "plan", "i"), diagonal(LAYOUTS, plan_names(), range(len(OPTIONS)))
)
def test_parameters_equal_the_tree(layout, plan, i):
    config = with_layout(layout, plan=plan, **OPTIONS[i])
    assert unique_parameters(config) == size_of(tree_of(config))
    alone = dataclasses.replace(config, plan="separate", encoder_plan=None, share_encoder=False)
    applied = applied_parameters(config) - count_outer(config)
    assert applied == unique_parameters(alone) - count_outer(alone)


@pytest.mark.parametrize(
    ("plan", "count"),
    [  # ALBERT, Table 4 at E = H = 768, without the pooler
        ("albert", 30_524_160),
        ("attention_only", 82_487_808),
        ("ffn_only", 56_527_104),
        ("separate", 108_490_752),
    ],
)
def test_albert_table_4(plan, count):
    config = ModelConfig(
        kind="encoder",
        vocab_size=30_000,
        max_len=512,
        token_types=2,
        embedding_norm=True,
        width=768,
        num_layers=12,
        num_heads=12,
        ffn_width=3072,
        norm="post",
        plan=plan,
    )
    assert unique_parameters(config) == size_of(tree_of(config)) == count
    readout = 2 * 768 * 30_000
    assert flops_per_token(config, 512) - readout == 188_743_680


@pytest.mark.parametrize(("layout", "plan"), diagonal(LAYOUTS, plan_names()))
def test_flops_equal_the_products_of_the_trace(layout, plan):
    for options in TRACED if plan == "attention_only" else TRACED[:1]:
        fields = {"order": "factored", "talking_heads": plan == "albert"} | options
        config = with_layout(layout, plan=plan, **fields)
        tokens = jnp.zeros((2, 7), jnp.int32)
        texts = (tokens, tokens) if config.kind == "encoder_decoder" else (tokens,)
        run = lambda p, c=config, t=texts: c.build().apply({"params": p}, *t)
        traced = jax.make_jaxpr(run)(tree_of(config))
        assert product_flops(traced.jaxpr) == 2 * 7 * flops_per_token(config, 7)


@pytest.mark.parametrize("readout", ["tied", "none"])
def test_flops_have_the_classes_of_every_token(readout):
    """The pooler "each" gives classes for each token; others once a text, which do not count."""
    fields = dict(kind="encoder", pooled_classes=4, readout=readout)
    config = dataclasses.replace(SMALL, pooler="each", **fields)
    first = dataclasses.replace(SMALL, pooler="first_plain", **fields)
    assert flops_per_token(config, 7) - flops_per_token(first, 7) == 2 * SMALL.width * 4
    run = lambda p: config.build().apply({"params": p}, jnp.zeros((2, 7), int), return_outputs=True)
    traced = jax.make_jaxpr(run)(tree_of(config))
    assert product_flops(traced.jaxpr) == 2 * 7 * flops_per_token(config, 7)


@pytest.mark.parametrize(
    ("layout", "plan", "budget"), diagonal(LAYOUTS, plan_names(), ["parameters", "flops"])
)
def test_matched_arms_have_the_budget(layout, plan, budget):
    reference = dataclasses.replace(SMALL, ffn_width=300)
    arm = with_layout(layout, plan=plan)
    matched = match(arm, reference, budget, length=11).config
    cost = {"parameters": unique_parameters, "flops": lambda c: flops_per_token(c, 11)}[budget]
    nearest = abs(cost(matched) - cost(reference))
    for step in (-1, 1):
        other = dataclasses.replace(matched, ffn_width=matched.ffn_width + step)
        assert nearest <= abs(cost(other) - cost(reference))
    assert nearest < 0.01 * cost(reference)


def test_a_budget_that_heads_alone_exceed():
    wide = dataclasses.replace(SMALL, layout="wide", value_dim=None, num_heads=6)
    reference = dataclasses.replace(SMALL, ffn_width=2)
    with pytest.raises(ValueError, match="give the reference a larger ffn_width"):
        match(wide, reference, "parameters")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_are_those_of_xla(layout, optimized):
    """Within 2 % of the compiler's own count of one dense layer, softmax and all."""
    spec = HeadSpec(layout, width=256, num_heads=4)
    x = jax.ShapeDtypeStruct((2, 64, 256), jnp.float32)
    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in spec.shapes.items()}
    run = functools.partial(
        multi_head_attention, spec=spec, order="factored", implementation="dense"
    )
    counted = jax.jit(run).lower(w, x).compile().cost_analysis()["flops"]
    assert abs(call_flops(spec, 2, 64, 64) / counted - 1) < 0.02


def test_cache_bytes_are_those_of_the_cache():
    for layout in LAYOUTS:
        spec = HeadSpec(layout, width=12, num_heads=6, **KV_HEADS.get(layout, {}))
        cache = init_cache(spec, 1, 7)
        held = sum(a.nbytes for name, a in cache.items() if name != "length")
        assert cache_bytes_per_token(spec) == held / 7


KV_HEADS = {"standard": {"num_kv_heads": 2}, "collaborative": {"num_kv_heads": 3}}


OTHER_PARTS = [
    {"plan": "relaxed:2", "delta_rank": 4, "talking_heads": True, "qk_norm": "rms"},
    {"plan": "attention=0,0,0,1,1 kv=0,-,1,0,- ffn=0,1,2,3,4"},
    {"kind": "encoder_decoder", "plan": "relaxed:1", "encoder_plan": "cla:2", "norm_bias": False},
    {"kind": "encoder_decoder", "plan": "relaxed:2", "share_encoder": True},
    {"kind": "encoder_decoder", "plan": "dictionary:2", "talking_heads": True},
]


@pytest.mark.parametrize(
    "layout", deep([n for n in LAYOUTS if n != "absorbed"], "standard", "narrow", "bilinear")
)
def test_parameters_of_keys_and_deltas_equal_the_tree(layout):
    for options in OTHER_PARTS:
        if "q_norm" not in LAYOUTS[layout].maps:
            options = {name: value for name, value in options.items() if name != "qk_norm"}
        config = with_layout(layout, **options)
        assert unique_parameters(config) == size_of(tree_of(config))


def test_layers_that_reuse_keys_spend_nothing_on_them():
    config = dataclasses.replace(SMALL, plan="cla:2", num_kv_heads=1)  # 5 layers, 3 reuse
    alone = dataclasses.replace(config, plan="separate")
    width, head_dim, value_dim = 12, 4, 5
    maps, biases = width * (head_dim + value_dim), head_dim + value_dim
    assert flops_per_token(alone, 7) - flops_per_token(config, 7) == 3 * 2 * maps
    assert unique_parameters(alone) - unique_parameters(config) == 3 * (maps + biases)
    assert applied_parameters(config) == unique_parameters(config)
    held = config.empty_cache(1, 7)
    bytes_held = sum(a.nbytes for name, a in held.items() if name != "length")
    assert model_cache_bytes(config) == bytes_held / 7
