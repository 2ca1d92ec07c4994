"""Formulas of cost equal published counts and the arrays of a cache. `test_random_models.py` and
the contract of layouts compare them with programs."""

import jax
import pytest

from attnlab import models
from attnlab.heads import Narrow, Standard, Wide
from attnlab.models import FFN, Attention, Embedding, ModelConfig, NoPositions, Norm, OutputHead
from attnlab.models.cost import outer_flops
from attnlab.pretrained import published_config

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


def bottleneck(h, d_p):
    """Table 2 (arXiv 2002.07028): width 512, 24 layers, d_ff 4096, heads of a size of their own;
    with a pooler and the vocabulary of BERT."""
    return published_config(
        "bert_base", width=512, num_layers=24, ffn=FFN(width=4096),
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


PRE = {"norm": Norm(position="pre"), "vocab_size": 1}
BIG = {"width": 1024, "ffn": FFN(width=4096), "heads": Standard(num_heads=16)}
BIASED = {"heads": Standard(num_heads=8, biases=QKVO)}
COUNTS = [
    # ALBERT's: test_published_counts.py. Tensor2Tensor base and big, less their embeddings, with
    # final norms; then Table 3 (arXiv 1706.03762), here with biases in attention.
    (published_config("transformer_base", **PRE), 44_103_680 + 512),
    (published_config("transformer_base", **PRE, **BIG), 176_287_744 + 1024),
    (published_config("transformer_base", **BIASED), 63_045_632 + 36_864),
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
