"""The sizes of published models, by name: configs to train or to count, without any weights."""

import dataclasses
from typing import Any, NamedTuple

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Dropout, Embedding, Norm, Sinusoidal
from attnlab.names import lookup
from attnlab.pretrained.attributes import JSON, read_attributes
from attnlab.pretrained.fields import Source
from attnlab.pretrained.registry import FAMILIES


class Published(NamedTuple):
    """A family, the task model that was trained, and its config.json beyond the defaults."""

    family: str
    architecture: str
    attributes: JSON
    tensors: tuple[str, ...] = ()
    """Tensors of the file that decide about output heads."""

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        family = FAMILIES[self.family]
        attributes = read_attributes(
            self.attributes, family.attributes, family.other_attributes.fixed
        )
        return family.config(attributes, Source(self.architecture, dict.fromkeys(self.tensors)))


def _sizes(width: int, layers: int, heads: int, ffn_width: int = 0) -> JSON:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn_width or 4 * width,
    }


def _gpt2(width: int, layers: int, heads: int) -> Published:
    return Published("gpt2", "GPT2LMHeadModel", dict(n_embd=width, n_layer=layers, n_head=heads))


def _t5(width: int, d_kv: int, ffn_width: int, layers: int, heads: int) -> Published:
    sizes = dict(d_model=width, d_kv=d_kv, d_ff=ffn_width, num_layers=layers, num_heads=heads)
    return Published("t5", "T5ForConditionalGeneration", sizes)


def _t5_v1_1(width: int, ffn_width: int, layers: int, heads: int) -> Published:
    old = _t5(width, 64, ffn_width, layers, heads)
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return old._replace(attributes=old.attributes | gated, tensors=("lm_head.weight",))


def _gemma3(width: int, ffn_width: int, layers: int) -> Published:
    sizes = _sizes(width, layers, 4, ffn_width)
    sizes |= dict(num_key_value_heads=1, max_position_embeddings=32768)
    sizes |= dict(vocab_size=262144, sliding_window=512)
    return Published("gemma3_text", "Gemma3ForCausalLM", sizes)


def _vit(width: int, layers: int, heads: int, patch: int) -> Published:
    labels = {"id2label": dict.fromkeys(range(1000)), "patch_size": patch}
    return Published("vit", "ViTForImageClassification", _sizes(width, layers, heads) | labels)


LLAMA_3 = dict(vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5)
LLAMA_3_2_ROPE = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3_2_ROPE |= dict(original_max_position_embeddings=8192)
LLAMA_3_2: JSON = LLAMA_3 | dict(
    max_position_embeddings=131072, rope_scaling=LLAMA_3_2_ROPE, tie_word_embeddings=True
)
QWEN2: JSON = dict(rope_theta=1000000.0, max_position_embeddings=131072)
QWEN3: JSON = dict(num_key_value_heads=8, rope_theta=1000000.0, max_position_embeddings=40960)
ROBERTA = dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
BERT_HEADS, ALBERT_HEADS = "BertForPreTraining", "AlbertForPreTraining"
LLAMA_LM, QWEN2_LM, QWEN3_LM = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
NEOX_LM = "GPTNeoXForCausalLM"
PUBLISHED = {
    "bert_base": Published("bert", BERT_HEADS, _sizes(768, 12, 12)),
    "bert_large": Published("bert", BERT_HEADS, _sizes(1024, 24, 16)),
    "albert_base": Published("albert", ALBERT_HEADS, _sizes(768, 12, 12)),
    "albert_large": Published("albert", ALBERT_HEADS, _sizes(1024, 24, 16)),
    "albert_xlarge": Published("albert", ALBERT_HEADS, _sizes(2048, 24, 16)),
    "albert_xxlarge": Published("albert", ALBERT_HEADS, _sizes(4096, 12, 64)),
    "roberta_base": Published("roberta", "RobertaForMaskedLM", ROBERTA | _sizes(768, 12, 12)),
    "roberta_large": Published("roberta", "RobertaForMaskedLM", ROBERTA | _sizes(1024, 24, 16)),
    "distilbert_base": Published("distilbert", "DistilBertForMaskedLM", {}),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    "t5_small": _t5(512, 64, 2048, 6, 8),
    "t5_base": _t5(768, 64, 3072, 12, 12),
    "t5_large": _t5(1024, 64, 4096, 24, 16),
    "t5_3b": _t5(1024, 128, 16384, 24, 32),
    "t5_11b": _t5(1024, 128, 65536, 24, 128),
    "t5_v1_1_small": _t5_v1_1(512, 1024, 8, 6),
    "t5_v1_1_base": _t5_v1_1(768, 2048, 12, 12),
    "llama_2_7b": Published(
        "llama",
        LLAMA_LM,
        _sizes(4096, 32, 32, 11008) | dict(max_position_embeddings=4096, rms_norm_eps=1e-5),
    ),
    "llama_3_8b": Published(
        "llama",
        LLAMA_LM,
        _sizes(4096, 32, 32, 14336) | LLAMA_3 | dict(max_position_embeddings=8192),
    ),
    "llama_3_2_1b": Published("llama", LLAMA_LM, _sizes(2048, 16, 32, 8192) | LLAMA_3_2),
    "mistral_7b": Published(
        "mistral",
        "MistralForCausalLM",
        _sizes(4096, 32, 32, 14336) | dict(max_position_embeddings=32768, rms_norm_eps=1e-5),
    ),
    "qwen2_0_5b": Published(
        "qwen2",
        QWEN2_LM,
        _sizes(896, 24, 14, 4864) | QWEN2 | dict(num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen2_7b": Published(
        "qwen2",
        QWEN2_LM,
        _sizes(3584, 28, 28, 18944) | QWEN2 | dict(num_key_value_heads=4, vocab_size=152064),
    ),
    "qwen3_0_6b": Published(
        "qwen3", QWEN3_LM, _sizes(1024, 28, 16, 3072) | QWEN3 | dict(tie_word_embeddings=True)
    ),
    "qwen3_8b": Published("qwen3", QWEN3_LM, _sizes(4096, 36, 32, 12288) | QWEN3),
    "gemma3_270m": _gemma3(640, 2048, 18),
    "gemma3_1b": _gemma3(1152, 6912, 26),
    "pythia_70m": Published("gpt_neox", NEOX_LM, _sizes(512, 6, 8) | dict(vocab_size=50304)),
    "pythia_160m": Published("gpt_neox", NEOX_LM, _sizes(768, 12, 12) | dict(vocab_size=50304)),
    "pythia_1_4b": Published("gpt_neox", NEOX_LM, _sizes(2048, 24, 16) | dict(vocab_size=50304)),
    "gpt_neox_20b": Published("gpt_neox", NEOX_LM, {}),
    "mixtral_8x7b": Published("mixtral", "MixtralForCausalLM", dict(rope_theta=1000000.0)),
    "qwen1_5_moe_a2_7b": Published(
        "qwen2_moe", "Qwen2MoeForCausalLM", dict(rope_theta=1000000.0, max_position_embeddings=8192)
    ),
    "qwen3_30b_a3b": Published(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True, rope_theta=1000000.0),
    ),
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
    heads=Standard(num_heads=8),
    ffn=FFN(width=2048, activation="relu"),
    norm=Norm(position="post", eps=1e-6),
    positions=Sinusoidal(halves=True),
    embedding=Embedding(scale=512**0.5),
    dropout=Dropout(rate=0.1),
)
TRANSFORMERS = {
    "transformer_base": TRANSFORMER,
    "transformer_big": dataclasses.replace(
        TRANSFORMER,
        width=1024,
        heads=Standard(num_heads=16),
        ffn=FFN(width=4096, activation="relu"),
        embedding=Embedding(scale=1024**0.5),
        dropout=Dropout(rate=0.3),
    ),
}


def published_config(name: str, **fields: Any) -> ModelConfig:
    """The config of a published model; `fields` of `ModelConfig` replace some of it.

    Raises:
      ValueError: the name is in neither `PUBLISHED` nor `TRANSFORMERS`.

    >>> from attnlab.models import num_parameters
    >>> num_parameters(published_config("gpt2"))
    124439808
    """
    known: dict[str, Published | ModelConfig] = {**PUBLISHED, **TRANSFORMERS}
    found = lookup(known, name, what="published model")
    config = found.config if isinstance(found, Published) else found
    return dataclasses.replace(config, **fields)
