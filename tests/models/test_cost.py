"""Formulas of cost equal the initialised weights, the traced products and published counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import product_flops

from attnlab import LAYOUTS
from attnlab.heads import Narrow, Standard, TalkingHeads, Wide
from attnlab.models import (
    FFN,
    Attention,
    Embedding,
    NoPositions,
    Norm,
    OutputHead,
    Sinusoidal,
    cost,
)
from attnlab.models.config import ModelConfig
from attnlab.models.params import param_shapes

QKVO = ("q", "k", "v", "o")
SMALL = ModelConfig(
    vocab_size=29,
    max_len=11,
    width=12,
    num_layers=5,
    heads=Standard(num_heads=3, value_dim=5, biases=QKVO),
    ffn=FFN(width=17),
)


def size_of(tree):
    return sum(a.size for a in jax.tree.leaves(tree))


def traced_flops(config):
    """FLOPs of the products in the forward pass of 2 texts of 7 tokens."""
    tokens = jnp.zeros((2, 7), jnp.int32)
    inputs = {"source": tokens} if config.kind == "encoder_decoder" else {}
    run = lambda p: config.build().apply({"params": p}, tokens, **inputs)
    return product_flops(jax.make_jaxpr(run)(param_shapes(config)).jaxpr)


# Against the weights and the trace ----------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_equal_the_traced_products(layout):
    """All sizes different where the layout has them; random models have the other options."""
    kind, sizes = LAYOUTS[layout], {"value_dim": 5, "extras": (TalkingHeads(),)}
    if layout == "grouped_tied":  # a part of the value is rotated
        sizes |= {"value_dim": 6, "head_dim": 6}
    sizes = {n: a for n, a in sizes.items() if n in {f.name for f in dataclasses.fields(kind)}}
    heads = kind(num_heads=3, biases=kind.bias_names, **sizes)
    config = dataclasses.replace(SMALL, heads=heads, attention=Attention(order="factored"))
    assert traced_flops(config) == 2 * 7 * cost.flops_per_token(config, 7)


def test_classes_of_every_token_count():
    """Pooler "each" multiplies every token with the classes; others once a text, not counted."""
    config = ModelConfig(kind="encoder")
    classes, first = (
        dataclasses.replace(config, output=OutputHead(pooler=pooler, num_classes=5))
        for pooler in ("each", "first_plain")
    )
    for other in (config, first):
        more = cost.flops_per_token(classes, 8) - cost.flops_per_token(other, 8)
        assert more == 2 * config.width * 5
    assert traced_flops(classes) == 2 * 7 * cost.flops_per_token(classes, 7)


# Published counts ----------------------------------------


@pytest.mark.parametrize(
    ("layout", "parameters", "shared", "flops"),
    [  # README, main table
        (Wide, 419_456, 120_320, 1_081_344),
        (Standard, 220_544, 70_592, 491_520),
        (Narrow, 183_680, 61_376, 417_792),
    ],
)
def test_main_table(layout, parameters, shared, flops):
    for sharing, count in (("separate", parameters), ("albert", shared)):
        config = ModelConfig(heads=layout(num_heads=4, biases=QKVO), sharing=sharing)
        assert cost.num_parameters(config) == count
        assert cost.applied_parameters(config) == parameters
        assert cost.flops_per_token(config, 64) == flops


BERT = ModelConfig(
    kind="encoder",
    vocab_size=30_000,
    max_len=512,
    width=768,
    num_layers=12,
    heads=Standard(num_heads=12, biases=QKVO),
    ffn=FFN(width=3072),
    norm=Norm(position="post"),
    embedding=Embedding(norm=True, token_types=2),
)


@pytest.mark.parametrize(
    ("plan", "count"),
    [  # ALBERT (arXiv 1909.11942), Table 4 at E = H = 768, without the pooler
        ("albert", 30_524_160),
        ("attention_only", 82_487_808),
        ("ffn_only", 56_527_104),
        ("separate", 108_490_752),
    ],
)
def test_albert_table_4(plan, count):
    config = dataclasses.replace(BERT, sharing=plan)
    assert cost.num_parameters(config) == size_of(param_shapes(config)) == count
    lm_head = 2 * 768 * 30_000
    assert cost.flops_per_token(config, 512) - lm_head == 188_743_680


def vaswani(d=512, f=2048, h=8, vocab=37000, position="post", biases=()):
    """Table 3 (arXiv 1706.03762): attention without biases, FFN with."""
    return ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        width=d,
        num_layers=6,
        heads=Standard(num_heads=h, biases=biases),
        ffn=FFN(width=f),
        norm=Norm(position=position),
        positions=Sinusoidal(),
    )


def bottleneck(h, d_p):
    """Table 2 (arXiv 2002.07028): width 512, 24 layers, d_ff 4096, heads of a size of their own;
    with a pooler and the vocabulary of BERT."""
    layout = Standard(num_heads=h, head_dim=d_p, biases=QKVO)
    return dataclasses.replace(
        BERT,
        vocab_size=30_522,
        width=512,
        num_layers=24,
        heads=layout,
        ffn=FFN(width=4096),
        output=OutputHead(kind="none", pooler="first"),
    )


COUNTS = {
    "Tensor2Tensor base, less its embeddings": (vaswani(position="pre", vocab=1), 44_103_680 + 512),
    "Tensor2Tensor big, less its embeddings": (
        vaswani(d=1024, f=4096, h=16, position="pre", vocab=1), 176_287_744 + 1024,
    ),
    "Vaswani base, attention biases": (vaswani(biases=QKVO), 63_045_632 + 36_864),
    "bottleneck A, h = 8": (bottleneck(8, 128), 167_394_816),
    "bottleneck A, h = 12": (bottleneck(12, 128), 192_597_504),
    "bottleneck A, h = 16": (bottleneck(16, 128), 217_800_192),
    "bottleneck A, h = 32": (bottleneck(32, 128), 318_610_944),
    "bottleneck B, d_p = 32": (bottleneck(8, 32), 129_590_784),
    "bottleneck B, d_p = 64": (bottleneck(8, 64), 142_192_128),
    "bottleneck B, d_p = 256": (bottleneck(8, 256), 217_800_192),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_papers(name):
    config, count = COUNTS[name]
    assert cost.num_parameters(config) == count


# heads, width of a head, key heads, d_ff of the translation model, d_ff of the language model
MULTI_QUERY = [
    (8, 128, 8, 4096, 8192),
    (8, 128, 1, 5440, 9088),
    (1, 128, 1, 6784, 9984),
    (2, 64, 2, 6784, 9984),
    (4, 32, 4, 6784, 9984),
    (8, 16, 8, 6784, 9984),
]


@pytest.mark.parametrize("row", MULTI_QUERY)
def test_multi_query_configurations_are_equal(row):
    """Shazeer 2019 (arXiv 1911.02150): all six of each task, norms left out, as there."""
    num_heads, head_dim, kv_heads, translation, language = row
    config = ModelConfig(
        vocab_size=32768,
        max_len=256,
        width=1024,
        num_layers=6,
        heads=Standard(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim),
        norm=Norm(position="post", bias=False),
    )
    both = dataclasses.replace(
        config, kind="encoder_decoder", ffn=FFN(width=translation, bias=False)
    )
    assert cost.num_parameters(both) - 5 * 6 * 1024 == 209_977_344
    alone = dataclasses.replace(
        config, ffn=FFN(width=language, bias=False), positions=NoPositions()
    )
    assert cost.num_parameters(alone) - 2 * 6 * 1024 == 159_383_552
