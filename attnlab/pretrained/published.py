"""The sizes of published models, by name: configs to train or to count, without any weights."""

import dataclasses
import functools
from typing import Any, NamedTuple

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Dropout, Embedding, Norm, Sinusoidal
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.attributes import read_attributes
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


def _model(
    family: str,
    architecture: str,
    width: int,
    layers: int,
    heads: int,
    ffn_width: int = 0,
    **more: object,
) -> Published:
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
    sizes |= dict(intermediate_size=ffn_width or 4 * width)
    return Published(family, architecture, sizes | more)


def _gpt2(width: int, layers: int, heads: int) -> Published:
    return Published("gpt2", "GPT2LMHeadModel", dict(n_embd=width, n_layer=layers, n_head=heads))


def _t5(width: int, d_kv: int, ffn_width: int, layers: int, heads: int) -> Published:
    sizes = dict(d_model=width, d_kv=d_kv, d_ff=ffn_width, num_layers=layers, num_heads=heads)
    return Published("t5", "T5ForConditionalGeneration", sizes)


def _t5_v1_1(width: int, ffn_width: int, layers: int, heads: int) -> Published:
    old = _t5(width, 64, ffn_width, layers, heads)
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return old._replace(attributes=old.attributes | gated, tensors=("lm_head.weight",))


_bert = functools.partial(_model, "bert", "BertForPreTraining")
_albert = functools.partial(_model, "albert", "AlbertForPreTraining")
_roberta = functools.partial(
    _model, "roberta", "RobertaForMaskedLM",
    max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
)  # fmt: skip
_llama = functools.partial(_model, "llama", "LlamaForCausalLM")
_llama3 = functools.partial(
    _llama, vocab_size=128256, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5
)
_qwen2 = functools.partial(
    _model, "qwen2", "Qwen2ForCausalLM", rope_theta=1000000.0, max_position_embeddings=131072
)
_qwen3 = functools.partial(
    _model, "qwen3", "Qwen3ForCausalLM",
    num_key_value_heads=8, rope_theta=1000000.0, max_position_embeddings=40960,
)  # fmt: skip
_gemma3 = functools.partial(
    _model, "gemma3_text", "Gemma3ForCausalLM", heads=4, num_key_value_heads=1,
    max_position_embeddings=32768, vocab_size=262144, sliding_window=512,
)  # fmt: skip
_pythia = functools.partial(_model, "gpt_neox", "GPTNeoXForCausalLM", vocab_size=50304)
_vit = functools.partial(
    _model, "vit", "ViTForImageClassification", id2label=dict.fromkeys(range(1000))
)
LLAMA_3_2_ROPE = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3_2_ROPE |= dict(original_max_position_embeddings=8192)
PUBLISHED = {
    "bert_base": _bert(768, 12, 12),
    "bert_large": _bert(1024, 24, 16),
    "albert_base": _albert(768, 12, 12),
    "albert_large": _albert(1024, 24, 16),
    "albert_xlarge": _albert(2048, 24, 16),
    "albert_xxlarge": _albert(4096, 12, 64),
    "roberta_base": _roberta(768, 12, 12),
    "roberta_large": _roberta(1024, 24, 16),
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
    "llama_2_7b": _llama(4096, 32, 32, 11008, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "llama_3_8b": _llama3(4096, 32, 32, 14336, max_position_embeddings=8192),
    "llama_3_2_1b": _llama3(
        *(2048, 16, 32, 8192),
        max_position_embeddings=131072,
        rope_scaling=LLAMA_3_2_ROPE,
        tie_word_embeddings=True,
    ),
    "mistral_7b": _model(
        *("mistral", "MistralForCausalLM", 4096, 32, 32, 14336),
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
    ),
    "qwen2_0_5b": _qwen2(896, 24, 14, 4864, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_7b": _qwen2(3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064),
    "qwen3_0_6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3_8b": _qwen3(4096, 36, 32, 12288),
    "gemma3_270m": _gemma3(640, 18, ffn_width=2048),
    "gemma3_1b": _gemma3(1152, 26, ffn_width=6912),
    "pythia_70m": _pythia(512, 6, 8),
    "pythia_160m": _pythia(768, 12, 12),
    "pythia_1_4b": _pythia(2048, 24, 16),
    "gpt_neox_20b": Published("gpt_neox", "GPTNeoXForCausalLM", {}),
    "mixtral_8x7b": Published("mixtral", "MixtralForCausalLM", dict(rope_theta=1000000.0)),
    "qwen1_5_moe_a2_7b": Published(
        "qwen2_moe", "Qwen2MoeForCausalLM", dict(rope_theta=1000000.0, max_position_embeddings=8192)
    ),
    "qwen3_30b_a3b": Published(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True, rope_theta=1000000.0),
    ),
    "vit_base_16": _vit(768, 12, 12, patch_size=16),
    "vit_base_32": _vit(768, 12, 12, patch_size=32),
    "vit_large_16": _vit(1024, 24, 16, patch_size=16),
    "vit_huge_14": _vit(1280, 32, 16, patch_size=14),
}
"""Name -> a model on the Hugging Face Hub, as its config.json describes it."""
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
"""Name -> config of a model of Vaswani et al. 2017."""


def published_config(name: str, **fields: Any) -> ModelConfig:
    """The config of a published model; `fields` of `ModelConfig` replace some of it.

    Args:
      name: of `PUBLISHED` or `TRANSFORMERS`.
      **fields: fields of `ModelConfig`.

    Raises:
      ValueError: the name is in neither, or `fields` do not fit the rest.
      TypeError: `fields` has one that `ModelConfig` does not have.

    >>> from attnlab.models import num_parameters
    >>> num_parameters(published_config("gpt2"))
    124439808
    """
    known: dict[str, Published | ModelConfig] = {**PUBLISHED, **TRANSFORMERS}
    found = lookup(known, name, what="published model")
    config = found.config if isinstance(found, Published) else found
    return dataclasses.replace(config, **fields)
