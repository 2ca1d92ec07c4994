"""The picture of a model, and that its numbers are those of the accounting."""

import dataclasses

import jax

from attnlab.heads import TalkingHeads, Wide
from attnlab.models import ModelConfig, describe, describe_attention

WIDE = Wide(num_heads=3, biases=("q", "k", "v", "o"))
CONFIG = ModelConfig(width=12, num_layers=10, heads=WIDE, sharing="cycle_rev:4")


def test_the_plan_as_a_picture():
    lines = describe(CONFIG).splitlines()
    assert lines[0] == "decoder of width 12: layout wide, 3 heads, sharing cycle_rev:4"
    picture = lines[lines.index("") + 1 :]
    assert picture[0] == "layers       0 1 2 3 4 5 6 7 8 9"
    assert picture[1] == "  attention  0 1 2 3 0 1 2 3 3 2"
    assert picture[2] == "  ffn        0 1 2 3 0 1 2 3 3 2"


def attention(config, batch=8, length=16):
    texts = ["tokens", "source"][: 1 + (config.kind == "encoder_decoder")]
    return describe_attention(
        config, dict.fromkeys(texts, jax.ShapeDtypeStruct((batch, length), "int32"))
    )


def test_what_is_told_of_attention_is_what_runs():
    """Talking heads leave the blocks, shared keys the other orders; a source is read apart."""
    talking = dataclasses.replace(WIDE, extras=(TalkingHeads(),))
    config = dataclasses.replace(CONFIG, max_len=2048, heads=talking)
    told = attention(config, 64, 2048)
    assert "  * dense" in told
    assert "    blockwise    talking_heads needs the scores of all heads at once" in told
    assert "  * blockwise" in attention(dataclasses.replace(config, heads=WIDE), 64, 2048)
    shared = attention(dataclasses.replace(CONFIG, sharing="cla:2"))
    assert "  * factored" in shared
    assert "    absorbed     the cache holds k, v" in shared
    both = dataclasses.replace(CONFIG, kind="encoder_decoder", sharing="albert")
    sections = [text.split(",")[0] for text in attention(both).split("\n\n")]
    assert sections == [
        "self-attention of encoder_layers", "self-attention of layers", "cross-attention of layers",
    ]  # fmt: skip
