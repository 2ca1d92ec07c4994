"""The sizes of published models, by name: configs to train or to count, without any weights."""

import dataclasses
from typing import Any, NamedTuple

from attnlab.model.config import ModelConfig
from attnlab.names import lookup
from attnlab.pretrained.albert import ALBERT
from attnlab.pretrained.bert import BERT
from attnlab.pretrained.distilbert import DISTILBERT
from attnlab.pretrained.families import Family
from attnlab.pretrained.gemma import GEMMA3
from attnlab.pretrained.gpt2 import GPT2
from attnlab.pretrained.gpt_neox import GPT_NEOX
from attnlab.pretrained.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from attnlab.pretrained.roberta import ROBERTA
from attnlab.pretrained.settings import read_settings
from attnlab.pretrained.t5 import T5
from attnlab.pretrained.vit import VIT


class Published(NamedTuple):
    """A family, the task model that was trained, and what config.json says beyond the defaults."""

    family: Family
    architecture: str
    settings: dict[str, Any]
    tensors: tuple[str, ...] = ()
    """Tensors of the file that decide about heads."""


def _bert(width: int, layers: int, heads: int) -> dict[str, int]:
    return dict(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


def _gpt2(width: int, layers: int, heads: int) -> Published:
    return Published(GPT2, "GPT2LMHeadModel", dict(n_embd=width, n_layer=layers, n_head=heads))


def _t5(width: int, d_kv: int, ffn_width: int, layers: int, heads: int, v11: bool) -> Published:
    sizes = dict(d_model=width, d_kv=d_kv, d_ff=ffn_width, num_layers=layers, num_heads=heads)
    if not v11:
        return Published(T5, "T5ForConditionalGeneration", sizes)
    gated = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return Published(T5, "T5ForConditionalGeneration", sizes | gated, ("lm_head.weight",))


def _llama(
    family: Family, width: int, ffn_width: int, layers: int, heads: int, **more: Any
) -> Published:
    sizes = dict(hidden_size=width, intermediate_size=ffn_width, num_hidden_layers=layers)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return Published(
        family, f"{names[family.name]}ForCausalLM", sizes | dict(num_attention_heads=heads) | more
    )


def _gemma3(width: int, ffn_width: int, layers: int) -> Published:
    sizes = dict(hidden_size=width, intermediate_size=ffn_width, num_hidden_layers=layers)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=32768)
    more = dict(vocab_size=262144, sliding_window=512)
    return Published(GEMMA3, "Gemma3ForCausalLM", sizes | more)


def _pythia(width: int, layers: int, heads: int) -> Published:
    sizes = _bert(width, layers, heads) | dict(vocab_size=50304)
    return Published(GPT_NEOX, "GPTNeoXForCausalLM", sizes)


def _vit(width: int, layers: int, heads: int, patch: int) -> Published:
    sizes = _bert(width, layers, heads) | dict(
        patch_size=patch, id2label=dict.fromkeys(range(1000))
    )
    return Published(VIT, "ViTForImageClassification", sizes)


LLAMA_3 = dict(vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5)
LLAMA_3_2 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3_2 |= dict(original_max_position_embeddings=8192)
QWEN2_SIZES = dict(num_key_value_heads=4, rope_theta=1000000.0, max_position_embeddings=131072)
QWEN3_SIZES = dict(num_key_value_heads=8, rope_theta=1000000.0, max_position_embeddings=40960)
ROBERTA_SIZES = dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
PUBLISHED = {
    "bert_base": Published(BERT, "BertForPreTraining", _bert(768, 12, 12)),
    "bert_large": Published(BERT, "BertForPreTraining", _bert(1024, 24, 16)),
    "albert_base": Published(ALBERT, "AlbertForPreTraining", _bert(768, 12, 12)),
    "albert_large": Published(ALBERT, "AlbertForPreTraining", _bert(1024, 24, 16)),
    "albert_xlarge": Published(ALBERT, "AlbertForPreTraining", _bert(2048, 24, 16)),
    "albert_xxlarge": Published(ALBERT, "AlbertForPreTraining", _bert(4096, 12, 64)),
    "roberta_base": Published(ROBERTA, "RobertaForMaskedLM", ROBERTA_SIZES | _bert(768, 12, 12)),
    "roberta_large": Published(ROBERTA, "RobertaForMaskedLM", ROBERTA_SIZES | _bert(1024, 24, 16)),
    "distilbert_base": Published(DISTILBERT, "DistilBertForMaskedLM", {}),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    "t5_small": _t5(512, 64, 2048, 6, 8, v11=False),
    "t5_base": _t5(768, 64, 3072, 12, 12, v11=False),
    "t5_large": _t5(1024, 64, 4096, 24, 16, v11=False),
    "t5_3b": _t5(1024, 128, 16384, 24, 32, v11=False),
    "t5_11b": _t5(1024, 128, 65536, 24, 128, v11=False),
    "t5_v1_1_small": _t5(512, 64, 1024, 8, 6, v11=True),
    "t5_v1_1_base": _t5(768, 64, 2048, 12, 12, v11=True),
    "llama_2_7b": _llama(
        LLAMA, 4096, 11008, 32, 32, max_position_embeddings=4096, rms_norm_eps=1e-5
    ),
    "llama_3_8b": _llama(LLAMA, 4096, 14336, 32, 32, max_position_embeddings=8192, **LLAMA_3),
    "llama_3_2_1b": _llama(
        LLAMA,
        2048,
        8192,
        16,
        32,
        max_position_embeddings=131072,
        rope_scaling=LLAMA_3_2,
        tie_word_embeddings=True,
        **LLAMA_3,
    ),
    "mistral_7b": _llama(
        MISTRAL, 4096, 14336, 32, 32, max_position_embeddings=32768, rms_norm_eps=1e-5
    ),
    "qwen2_0_5b": _llama(
        QWEN2,
        896,
        4864,
        24,
        14,
        tie_word_embeddings=True,
        **QWEN2_SIZES | dict(num_key_value_heads=2),
    ),
    "qwen2_7b": _llama(QWEN2, 3584, 18944, 28, 28, vocab_size=152064, **QWEN2_SIZES),
    "qwen3_0_6b": _llama(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True, **QWEN3_SIZES),
    "qwen3_8b": _llama(QWEN3, 4096, 12288, 36, 32, **QWEN3_SIZES),
    "gemma3_270m": _gemma3(640, 2048, 18),
    "gemma3_1b": _gemma3(1152, 6912, 26),
    "pythia_70m": _pythia(512, 6, 8),
    "pythia_160m": _pythia(768, 12, 12),
    "pythia_1_4b": _pythia(2048, 24, 16),
    "gpt_neox_20b": Published(GPT_NEOX, "GPTNeoXForCausalLM", {}),
    "vit_base_16": _vit(768, 12, 12, 16),
    "vit_base_32": _vit(768, 12, 12, 32),
    "vit_large_16": _vit(1024, 24, 16, 16),
    "vit_huge_14": _vit(1280, 32, 16, 14),
}
# The paper's (Vaswani et al. 2017, table 3), with tensor2tensor's positions; post-norm.
TRANSFORMER = ModelConfig(
    kind="encoder_decoder",
    vocab_size=37000,
    max_len=1024,
    width=512,
    num_layers=6,
    num_heads=8,
    ffn_width=2048,
    norm="post",
    norm_eps=1e-6,
    activation="relu",
    attention_biases="",
    positions="sinusoidal_halves",
    embedding_scale=512**0.5,
    dropout_rate=0.1,
)
TRANSFORMERS = {
    "transformer_base": TRANSFORMER,
    "transformer_big": dataclasses.replace(
        TRANSFORMER,
        width=1024,
        num_heads=16,
        ffn_width=4096,
        embedding_scale=1024**0.5,
        dropout_rate=0.3,
    ),
}


def published_config(name: str, **fields: Any) -> ModelConfig:
    """The config of a published model; `fields` replace some of it.

    >>> from attnlab import unique_parameters
    >>> unique_parameters(published_config("gpt2"))
    124439808
    """
    known: dict[str, Published | ModelConfig] = {**PUBLISHED, **TRANSFORMERS}
    row = lookup(known, name, what="published model")
    if isinstance(row, Published):
        settings = read_settings(row.settings, row.family.settings, row.family.fixed, ())
        tensors = dict.fromkeys(row.tensors)
        row = ModelConfig(**row.family.fields(settings, tensors, row.architecture))
    return dataclasses.replace(row, **fields)
