"""What is told of the attention of a model; its plan: the docstring of `describe`."""

import dataclasses

import jax

from attnlab.heads import TalkingHeads, Wide
from attnlab.models import ModelConfig, describe_attention

TALKING = Wide(num_heads=3, biases=("q", "k", "v", "o"), extras=(TalkingHeads(),))
CONFIG = ModelConfig(width=12, num_layers=10, heads=TALKING, sharing="albert", max_len=2048)


def test_what_is_told_of_attention_is_what_runs():
    """Talking heads leave the blocks; a source is read apart. Other models: `test_explain.py`."""
    texts = dict.fromkeys(["tokens", "source"], jax.ShapeDtypeStruct((64, 2048), "int32"))
    told = describe_attention(CONFIG, {"tokens": texts["tokens"]})
    assert "  * bilinear" in told
    assert "  * dense" in told
    assert "    blockwise    talking_heads needs the scores of all heads at once" in told
    both = describe_attention(dataclasses.replace(CONFIG, kind="encoder_decoder"), texts)
    assert [text.split(",")[0] for text in both.split("\n\n")] == [
        "self-attention of encoder_layers", "self-attention of layers", "cross-attention of layers",
    ]  # fmt: skip
