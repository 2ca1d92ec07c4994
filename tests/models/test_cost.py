"""Formulas of cost equal the published counts, the old numbers and the initialised weights."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import test_counts
from conftest import deep, diagonal, product_flops
from test_accounting import OPTIONS, OTHER_PARTS, TRACED, with_layout

from attnlab import LAYOUTS, plan_names
from attnlab.heads import Narrow, Standard, TalkingHeads, Wide
from attnlab.model import accounting as old
from attnlab.model.as_models import as_config
from attnlab.models import cost, specs
from attnlab.models.config import ModelConfig
from attnlab.models.parameters import param_shapes

PUBLISHED = test_counts.ROWS | {name: (name, count) for name, count in test_counts.NAMED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_and_old_numbers(name):
    before, count = PUBLISHED[name]
    before = test_counts.published_config(before) if isinstance(before, str) else before
    config, length = as_config(before), min(64, before.max_len)
    assert cost.num_parameters(config) == count
    assert cost.applied_parameters(config) == old.applied_parameters(before)
    assert cost.parameters_by_uses(config) == old.parameters_by_uses(before)
    assert cost.cache_bytes_per_token(config) == old.model_cache_bytes(before)
    # The old formula left out the product of image features with the embedding.
    images = 2 * config.vocab_size * config.width if config.embedding.images else 0
    assert cost.flops_per_token(config, length) == old.flops_per_token(before, length) + images


@pytest.mark.parametrize(
    ("layout", "parameters", "shared", "flops"),
    [  # README, main table
        (Wide, 419_456, 120_320, 1_081_344),
        (Standard, 220_544, 70_592, 491_520),
        (Narrow, 183_680, 61_376, 417_792),
    ],
)
def test_main_table(layout, parameters, shared, flops):
    heads = layout(num_heads=4, biases=("q", "k", "v", "o"))
    for sharing, count in (("separate", parameters), ("albert", shared)):
        config = ModelConfig(heads=heads, sharing=sharing)
        assert cost.num_parameters(config) == count
        assert cost.applied_parameters(config) == parameters
        assert cost.flops_per_token(config, 64) == flops


def size_of(tree):
    return sum(a.size for a in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("layout", "plan", "i"), diagonal(LAYOUTS, plan_names(), range(len(OPTIONS)))
)
def test_parameters_equal_the_initialised_weights(layout, plan, i):
    config = as_config(with_layout(layout, plan=plan, **OPTIONS[i]))
    assert cost.num_parameters(config) == size_of(param_shapes(config))
    assert sum(n * uses for uses, n in cost.parameters_by_uses(config).items()) == (
        cost.applied_parameters(config) - cost.num_outer_parameters(config)
    )


@pytest.mark.parametrize(
    "layout", deep([n for n in LAYOUTS if n != "absorbed"], "standard", "narrow", "bilinear")
)
def test_shared_keys_and_deltas(layout):
    for options in OTHER_PARTS:
        if "q_norm" not in LAYOUTS[layout].maps:
            options = {name: value for name, value in options.items() if name != "qk_norm"}
        # The new model mixes the heads of cross-attention too, the old one did not.
        if options.get("kind") == "encoder_decoder":
            options = {name: value for name, value in options.items() if name != "talking_heads"}
        before = with_layout(layout, **options)
        config = as_config(before)
        assert cost.num_parameters(config) == old.unique_parameters(before)
        assert cost.num_parameters(config) == size_of(param_shapes(config))
        assert cost.weight_flops(config) == old.making_flops(before)


@pytest.mark.parametrize(("layout", "plan"), diagonal(LAYOUTS, plan_names()))
def test_flops_equal_the_traced_products(layout, plan):
    for options in TRACED if plan == "attention_only" else TRACED[:1]:
        fields = {"order": "factored", "talking_heads": plan == "albert"} | options
        config = as_config(with_layout(layout, plan=plan, **fields))
        assert traced_flops(config) == 2 * 7 * cost.flops_per_token(config, 7)


def traced_flops(config):
    """FLOPs of the products in the forward pass of 2 texts of 7 tokens."""
    tokens = jnp.zeros((2, 7), jnp.int32)
    inputs = {"source": tokens} if config.kind == "encoder_decoder" else {}
    run = lambda p: config.build().apply({"params": p}, tokens, **inputs)
    return product_flops(jax.make_jaxpr(run)(param_shapes(config)).jaxpr)


def test_layers_that_share_keys_spend_nothing_on_them():
    layout = Standard(num_heads=3, num_kv_heads=1, head_dim=4, value_dim=5)
    alone = ModelConfig(width=12, heads=layout, num_layers=5)
    shared = dataclasses.replace(alone, sharing="cla:2")  # 3 layers reuse keys
    more = cost.flops_per_token(alone, 7) - cost.flops_per_token(shared, 7)
    assert more == 3 * 2 * 12 * (4 + 5)
    assert cost.num_parameters(alone) - cost.num_parameters(shared) == 3 * 12 * (4 + 5)
    cache = shared.init_cache(1, 7)
    held = sum(a.nbytes for name, a in cache.items() if name != "length")
    assert cost.cache_bytes_per_token(shared) == held / 7


def test_classes_of_every_token_count():
    """Defect D5: pooler "each" multiplies every token with the classes."""
    config = ModelConfig(kind="encoder")
    output = specs.OutputHead(pooler="each", num_classes=5)
    classes = dataclasses.replace(config, output=output)
    more = cost.flops_per_token(classes, 8) - cost.flops_per_token(config, 8)
    assert more == 2 * config.width * 5
    assert traced_flops(classes) == 2 * 7 * cost.flops_per_token(classes, 7)
    first = dataclasses.replace(output, pooler="first")
    once = dataclasses.replace(config, output=first)
    assert cost.flops_per_token(once, 8) == cost.flops_per_token(config, 8)


def test_extras_count():
    plain, mixing = (
        ModelConfig(heads=Standard(num_heads=4, extras=extras))
        for extras in ((), (TalkingHeads(),))
    )
    more = cost.flops_per_token(mixing, 8) - cost.flops_per_token(plain, 8)
    assert more == 4 * 2 * 2 * 4 * 4 * 8  # layers, scores and probabilities, FLOPs, heads^2, keys
