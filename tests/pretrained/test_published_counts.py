"""Parameter counts of published models, to the integer: by formula and by the tree of weights.

The numbers are those of transformers 5.23 with tied tensors counted once.
"""

import dataclasses

import jax
import pytest
from conftest import deep

from attnlab.models import EncoderConfig, num_parameters
from attnlab.pretrained import FAMILIES, PUBLISHED, param_shapes, published_config
from attnlab.pretrained.fields import Source


def published(family, architecture, *tensors, **attributes):
    """The config of a family's defaults with `attributes`, where the file holds `tensors`."""
    return FAMILIES[family].read(attributes, Source(architecture, dict.fromkeys(tensors)))[1]


def sizes(width, layers, heads, ffn_width):
    """Attributes of config.json."""
    return dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=ffn_width)  # fmt: skip


def plan(config, name):
    return dataclasses.replace(config, sharing=name)


LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
A_BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
A_LARGE = LARGE
A_XLARGE = LARGE | dict(hidden_size=2048, intermediate_size=8192)
YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)
YARN = dict(rope_theta=150000.0, rope_scaling=YARN)
SMALL = dict(num_hidden_layers=24, num_local_experts=32)
A_XXLARGE = dict(num_hidden_layers=12)
BERT, BERT_LARGE = (published("bert", "", "pooler.dense.weight", **s) for s in ({}, LARGE))
ALBERT = published("albert", "", "pooler.weight", **A_BASE)


def albert(architecture, *tensors, **attributes):
    return published("albert", architecture, *tensors, **attributes)


T5_SIZES = {
    "small": {},
    "base": dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "large": dict(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
}
V11 = {
    "small": dict(d_ff=1024, num_layers=8, num_heads=6),
    "base": dict(d_model=768, d_ff=2048, num_layers=12, num_heads=12),
}


def t5(size, architecture="", *tensors, table=T5_SIZES, shared=False, **attributes):
    config = published("t5", architecture, *tensors, **table[size], **attributes)
    encoder = EncoderConfig(shares_decoder=True)
    return dataclasses.replace(config, encoder=encoder) if shared else config


GATED = dict(table=V11, feed_forward_proj="gated-gelu")
ROWS = {
    "BertModel base": (BERT, 109_482_240),
    "- attention shared": (plan(BERT, "attention_only"), 83_479_296),
    "- FFN shared": (plan(BERT, "ffn_only"), 57_518_592),
    "- all shared": (plan(BERT, "albert"), 31_515_648),
    "BertForMaskedLM base": (published("bert", "BertForMaskedLM"), 109_514_298),
    "BertForPreTraining base": (published("bert", "BertForPreTraining"), 110_106_428),
    "BertModel large": (BERT_LARGE, 335_141_888),
    "AlbertModel base": (ALBERT, 11_683_584),
    "AlbertModel large": (albert("", "pooler.weight", **A_LARGE), 17_683_968),
    "AlbertModel xlarge": (albert("", "pooler.weight", **A_XLARGE), 58_724_864),
    "AlbertModel xxlarge": (albert("", "pooler.weight", **A_XXLARGE), 222_595_584),
    "AlbertForMaskedLM base": (albert("AlbertForMaskedLM", **A_BASE), 11_221_680),
    "AlbertForMaskedLM xxlarge": (albert("AlbertForMaskedLM", **A_XXLARGE), 206_368_944),
    "AlbertForPreTraining base": (albert("AlbertForPreTraining", **A_BASE), 11_813_810),
    "AlbertForPreTraining xxlarge": (albert("AlbertForPreTraining", **A_XXLARGE), 223_158_450),
    "AlbertModel base, attention shared": (plan(ALBERT, "attention_only"), 63_647_232),
    "AlbertModel large, none shared": (
        albert("", "pooler.weight", **A_LARGE, num_hidden_groups=24), 307_397_120,
    ),
    "AlbertModel xlarge, none shared": (
        albert("", "pooler.weight", **A_XLARGE, num_hidden_groups=24), 1_216_965_120,
    ),
    "AlbertModel xxlarge, none shared": (
        albert("", "pooler.weight", **A_XXLARGE, num_hidden_groups=12), 2_437_773_824,
    ),
    "AlbertModel base, E = 768": (
        albert("", "pooler.weight", **A_BASE, embedding_size=768), 31_705_344,
    ),
    "T5 small": (t5("small"), 60_506_624),
    "T5 base": (t5("base"), 222_903_552),
    "T5 large": (t5("large"), 737_668_096),
    "T5 base, shared": (t5("base", shared=True), 137_949_312),
    "T5EncoderModel large": (t5("large", "T5EncoderModel"), 334_939_648),
    "T5 v1.1 small": (t5("small", "", "lm_head.weight", **GATED), 76_961_152),
    "T5 v1.1 base": (t5("base", "", "lm_head.weight", **GATED), 247_577_856),
    "GPT2Model small": (published("gpt2", "GPT2Model"), 124_439_808),
    "RobertaModel base": (
        published("roberta", "", "pooler.dense.weight", type_vocab_size=1,
                  max_position_embeddings=514), 124_645_632,
    ),
    "RobertaForMaskedLM base": (
        published("roberta", "RobertaForMaskedLM", type_vocab_size=1,
                  max_position_embeddings=514), 124_697_433,
    ),
    "DistilBertModel base": (published("distilbert", ""), 66_362_880),
    "DeepseekV3ForCausalLM, 3 dense layers": (
        published("deepseek_v3", "DeepseekV3ForCausalLM", num_hidden_layers=3), 3_603_815_424,
    ),
    "DeepseekV3ForCausalLM": (
        published("deepseek_v3", "DeepseekV3ForCausalLM"), 671_026_419_200,
    ),
    "MixtralForCausalLM 8x7B": (
        published("mixtral", "MixtralForCausalLM"), 46_702_792_704,
    ),
    "Qwen2MoeForCausalLM, Qwen1.5-MoE-A2.7B": (
        published("qwen2_moe", "Qwen2MoeForCausalLM"), 14_315_784_192,
    ),
    "Qwen3MoeForCausalLM, 30B-A3B": (
        published("qwen3_moe", "Qwen3MoeForCausalLM", num_hidden_layers=48, head_dim=128),
        30_532_122_624,
    ),
    "GptOssForCausalLM 20b": (
        published("gpt_oss", "GptOssForCausalLM", **YARN | SMALL),
        20_914_757_184,
    ),
    "GptOssForCausalLM 120b": (
        published("gpt_oss", "GptOssForCausalLM", **YARN), 116_829_156_672,
    ),
    "ViTModel base": (published("vit", "", "pooler.dense.weight"), 85_798_656 + 590_592),
    "Llama 3 8B": (
        published("llama", "LlamaForCausalLM", **sizes(4096, 32, 32, 14336), vocab_size=128256,
                  num_key_value_heads=8), 8_030_261_248,
    ),
    "Mistral 7B": (
        published("mistral", "MistralForCausalLM", **sizes(4096, 32, 32, 14336)), 7_241_732_096,
    ),
    "Qwen2 7B": (
        published("qwen2", "Qwen2ForCausalLM", **sizes(3584, 28, 28, 18944), num_key_value_heads=4,
                  vocab_size=152064), 7_615_616_512,
    ),
    "Qwen3 8B": (
        published("qwen3", "Qwen3ForCausalLM", **sizes(4096, 36, 32, 12288),
                  num_key_value_heads=8), 8_190_735_360,
    ),
    "Gemma 3 1B": (
        published("gemma3_text", "Gemma3ForCausalLM", **sizes(1152, 26, 4, 6912),
                  num_key_value_heads=1, vocab_size=262144, sliding_window=512), 999_885_952,
    ),
    "Pythia 1.4B": (
        published("gpt_neox", "GPTNeoXForCausalLM", **sizes(2048, 24, 16, 8192), vocab_size=50304),
        1_414_647_808,
    ),
    "GPT-NeoX 20B": (published("gpt_neox", "GPTNeoXForCausalLM"), 20_554_567_680),
    "ViT huge": (
        published("vit", "ViTForImageClassification", **sizes(1280, 32, 16, 5120), patch_size=14,
                  id2label=dict.fromkeys(range(1000))), 632_045_800,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_published_count(name):
    config, count = ROWS[name]
    assert num_parameters(config) == count


@pytest.mark.parametrize("name", deep(ROWS, *list(ROWS)[::6]))
def test_a_model_has_as_many_weights(name):
    config, count = ROWS[name]
    assert sum(a.size for a in jax.tree.leaves(param_shapes(config))) == count


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
