"""Formulas of cost equal published counts and the arrays of a cache. `test_random_models.py` and
the contract of layouts compare them with programs."""

import dataclasses

import jax
import pytest

from attnlab import models
from attnlab.heads import Narrow, Standard, Wide
from attnlab.models import FFN, Attention, Embedding, ModelConfig, NoPositions, Norm, OutputHead
from attnlab.models.cost import outer_flops

QKVO = ("q", "k", "v", "o")


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
        assert models.num_parameters(config) == count
        assert models.applied_parameters(config) == parameters
        assert models.flops_per_token(config, 64) == flops


BERT = ModelConfig(
    kind="encoder", vocab_size=30_000, max_len=512, width=768, num_layers=12,
    heads=Standard(num_heads=12, biases=QKVO), ffn=FFN(width=3072), norm=Norm(position="post"),
    embedding=Embedding(norm=True, token_types=2),
)  # fmt: skip


def vaswani(d=512, f=2048, h=8, *, biases=(), position="post", vocab=37_000):
    """Table 3 (arXiv 1706.03762): attention without biases, FFN with."""
    return ModelConfig(
        kind="encoder_decoder", vocab_size=vocab, width=d, num_layers=6, ffn=FFN(width=f),
        heads=Standard(num_heads=h, biases=biases), norm=Norm(position=position),
        positions=models.Sinusoidal(),
    )  # fmt: skip


def bottleneck(h, d_p):
    """Table 2 (arXiv 2002.07028): width 512, 24 layers, d_ff 4096, heads of a size of their own;
    with a pooler and the vocabulary of BERT."""
    return dataclasses.replace(
        BERT, vocab_size=30_522, width=512, num_layers=24, ffn=FFN(width=4096),
        heads=Standard(num_heads=h, head_dim=d_p, biases=QKVO),
        output=OutputHead(kind="none", pooler="first"),
    )  # fmt: skip


def multi_query(num_heads, head_dim, kv_heads, ffn, **fields):
    """Shazeer 2019 (arXiv 1911.02150)."""
    layout = Standard(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return ModelConfig(
        vocab_size=32768, max_len=256, width=1024, num_layers=6, heads=layout,
        ffn=FFN(width=ffn, bias=False), norm=Norm(position="post", bias=False), **fields,
    )  # fmt: skip


COUNTS = [
    # ALBERT (arXiv 1909.11942), Table 4 at E = H = 768, without the pooler; the plans between:
    # test_published_counts.py
    (dataclasses.replace(BERT, sharing="albert"), 30_524_160),
    (BERT, 108_490_752),
    # Tensor2Tensor base and big, less their embeddings, with final norms
    (vaswani(position="pre", vocab=1), 44_103_680 + 512),
    (vaswani(d=1024, f=4096, h=16, position="pre", vocab=1), 176_287_744 + 1024),
    (vaswani(biases=QKVO), 63_045_632 + 36_864),
    (bottleneck(8, 128), 167_394_816),
    (bottleneck(32, 128), 318_610_944),
    (bottleneck(8, 32), 129_590_784),
]
# heads, width of a head, key heads, d_ff of the translation model, d_ff of the language model: all
# of a task are equal, norms left out, as there.
for *sizes, translation, language in [
    (8, 128, 8, 4096, 8192), (8, 128, 1, 5440, 9088), (1, 128, 1, 6784, 9984),
    (2, 64, 2, 6784, 9984), (8, 16, 8, 6784, 9984),
]:  # fmt: skip
    COUNTS += [
        (multi_query(*sizes, translation, kind="encoder_decoder"), 209_977_344 + 5 * 6 * 1024),
        (multi_query(*sizes, language, positions=NoPositions()), 159_383_552 + 2 * 6 * 1024),
    ]


@pytest.mark.parametrize(("config", "count"), COUNTS)
def test_counts_of_papers(config, count):
    assert models.num_parameters(config) == count
    assert sum(a.size for a in jax.tree.leaves(models.param_shapes(config))) == count


@pytest.mark.parametrize(
    ("pooler", "flops"), [("each", 2 * (64 * 16 + 64 * 16 + 16 * 10)), ("mean", 2 * 64 * 16)]
)
def test_flops_of_a_classifier_behind_a_transform(pooler, flops):
    """It reads the width of the embedding; what reads a whole text does not count."""
    head = OutputHead(kind="none", transform="gelu", pooler=pooler, num_classes=10)
    config = ModelConfig(kind="encoder", embedding=Embedding(width=16), output=head)
    assert outer_flops(config) == flops


@pytest.mark.parametrize(
    ("order", "plan"),
    [(None, "cla:2"), ("factored", "cla:2"), ("bilinear", "albert"), ("absorbed", "separate")],
)
def test_bytes_of_a_cache_are_those_of_its_arrays(order, plan):
    config = ModelConfig(
        width=12, heads=Wide(num_heads=5), num_layers=4, sharing=plan, positions=NoPositions(),
        attention=Attention(order=order),
    )  # fmt: skip
    one, three = (jax.eval_shape(lambda s=size: config.init_cache(1, s)) for size in (1, 3))
    size = lambda cache: sum(a.size * a.dtype.itemsize for a in cache.values())
    assert models.cache_bytes_per_token(config) == (size(three) - size(one)) / 2
