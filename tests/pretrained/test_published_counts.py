"""Parameter counts of published models, to the integer: by formula.

The numbers are those of transformers 5.23 with tied tensors counted once.
"""

import dataclasses

import pytest

from attnlab.models import EncoderConfig, num_parameters
from attnlab.pretrained import PUBLISHED, published_config
from attnlab.pretrained.published import Published

BERT_POOLER, POOLER = "pooler.dense.weight", "pooler.weight"
TIED = EncoderConfig(shares_decoder=True)


def sizes(width, layers, heads, ffn_width, kv_heads=None):
    """Attributes of config.json."""
    kv = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
    return kv | sizes | dict(intermediate_size=ffn_width)


BASE, XLARGE = sizes(768, 12, 12, 3072), sizes(2048, 24, 16, 8192)
T5_BASE = dict(d_model=768, num_layers=12, num_heads=12, d_ff=3072)
T5_LARGE = dict(d_model=1024, num_layers=24, num_heads=16, d_ff=4096)
ROBERTA = dict(type_vocab_size=1, max_position_embeddings=514)
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)
YARN = dict(rope_theta=150000.0, rope_scaling=YARN)
GEMMA = sizes(1152, 26, 4, 6912, 1) | dict(vocab_size=262144, sliding_window=512)
HUGE = sizes(1280, 32, 16, 5120) | dict(patch_size=14, id2label=dict.fromkeys(range(1000)))
ROWS = [
    # count, family, what its architecture ends in or the tensor of its head, attributes, fields
    (109_482_240, "bert", BERT_POOLER, {}, {}),
    (83_479_296, "bert", BERT_POOLER, {}, dict(sharing="attention_only")),
    (57_518_592, "bert", BERT_POOLER, {}, dict(sharing="ffn_only")),
    (31_515_648, "bert", BERT_POOLER, {}, dict(sharing="albert")),
    (109_514_298, "bert", "BertForMaskedLM", {}, {}),
    (11_683_584, "albert", POOLER, BASE, {}),
    (58_724_864, "albert", POOLER, XLARGE, {}),
    (222_595_584, "albert", POOLER, dict(num_hidden_layers=12), {}),
    (11_221_680, "albert", "AlbertForMaskedLM", BASE, {}),
    (63_647_232, "albert", POOLER, BASE, dict(sharing="attention_only")),
    (1_216_965_120, "albert", POOLER, XLARGE | dict(num_hidden_groups=24), {}),
    (31_705_344, "albert", POOLER, BASE | dict(embedding_size=768), {}),
    (60_506_624, "t5", "", {}, {}),
    (137_949_312, "t5", "", T5_BASE, dict(encoder=TIED)),
    (334_939_648, "t5", "T5EncoderModel", T5_LARGE, {}),
    (124_645_632, "roberta", BERT_POOLER, ROBERTA, {}),
    (124_697_433, "roberta", "RobertaForMaskedLM", ROBERTA, {}),
    (66_362_880, "distilbert", "", {}, {}),
    (671_026_419_200, "deepseek_v3", "", {}, {}),
    (46_702_792_704, "mixtral", "", {}, {}),
    (14_315_784_192, "qwen2_moe", "", {}, {}),
    (30_532_122_624, "qwen3_moe", "", dict(num_hidden_layers=48, head_dim=128), {}),
    (116_829_156_672, "gpt_oss", "", YARN, {}),
    (86_389_248, "vit", BERT_POOLER, {}, {}),
    (632_045_800, "vit", "ViTForImageClassification", HUGE, {}),
    (8_030_261_248, "llama", "", sizes(4096, 32, 32, 14336, 8) | dict(vocab_size=128256), {}),
    (7_241_732_096, "mistral", "", sizes(4096, 32, 32, 14336), {}),
    (7_615_616_512, "qwen2", "", sizes(3584, 28, 28, 18944, 4) | dict(vocab_size=152064), {}),
    (8_190_735_360, "qwen3", "", sizes(4096, 36, 32, 12288, 8), {}),
    (999_885_952, "gemma3_text", "", GEMMA, {}),
    (20_554_567_680, "gpt_neox", "", {}, {}),
]


@pytest.mark.parametrize(("count", "family", "head", "attributes", "fields"), ROWS)
def test_published_count(count, family, head, attributes, fields):
    """Of the family's defaults with `attributes`, in a file with this head."""
    architecture = "" if head.endswith(".weight") else head
    config = Published(family, architecture, attributes, (head,)).config
    assert num_parameters(dataclasses.replace(config, **fields)) == count


NAMED = {
    "bert_base": 110_106_428,
    "albert_base": 11_813_810,
    "albert_xxlarge": 223_158_450,
    "gpt2": 124_439_808,
    "t5_base": 222_903_552,
    "t5_v1_1_base": 247_577_856,
    "llama_3_2_1b": 1_235_814_400,
    "vit_base_16": 86_567_656,
    "transformer_base": 63_045_632,
}


@pytest.mark.parametrize("name", [*PUBLISHED, "transformer_base"])
def test_named_configs(name):
    assert num_parameters(published_config(name)) == NAMED[name]
