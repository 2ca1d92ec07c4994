"""The sizes of published models, by name: configs to train or to count, without any weights."""

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

from attnlab.heads import Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN, Dropout, Embedding, Norm, Sinusoidal
from attnlab.names import lookup
from attnlab.nested import JSON
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
        source = Source(self.architecture, dict.fromkeys(self.tensors))
        return FAMILIES[self.family].read(self.attributes, source)[1]


BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
XXLARGE = dict(num_hidden_layers=12, num_attention_heads=64, intermediate_size=16384)
T5_BASE = dict(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
T5_V1_1 = dict(d_ff=2048, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
LLAMA_3_2_1B = (
    dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8)
    | dict(intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072)
    | dict(rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True)
)
LLAMA_3_2_ROPE = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_3_2_ROPE |= dict(original_max_position_embeddings=8192)
VIT = dict(patch_size=16, id2label=dict.fromkeys(range(1000)))
PUBLISHED = {
    "bert_base": Published("bert", "BertForPreTraining", BASE),
    "albert_base": Published("albert", "AlbertForPreTraining", BASE),
    "albert_xxlarge": Published("albert", "AlbertForPreTraining", XXLARGE),
    "gpt2": Published("gpt2", "GPT2LMHeadModel", {}),
    "t5_base": Published("t5", "T5ForConditionalGeneration", T5_BASE),
    "t5_v1_1_base": Published(
        "t5", "T5ForConditionalGeneration", T5_BASE | T5_V1_1, ("lm_head.weight",)
    ),
    "llama_3_2_1b": Published(
        "llama", "LlamaForCausalLM", LLAMA_3_2_1B | {"rope_scaling": LLAMA_3_2_ROPE}
    ),
    "vit_base_16": Published("vit", "ViTForImageClassification", BASE | VIT),
}
"""Name -> a model on the Hugging Face Hub, as its config.json describes it. Of others
`load_config` reads the config.json itself."""
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
"""The base model of Vaswani et al. 2017."""


def published_config(name: str, **fields: Any) -> ModelConfig:
    """The config of a published model; `fields` of `ModelConfig` replace some of it.

    Args:
      name: of `PUBLISHED`, or "transformer_base" (Vaswani et al. 2017).
      **fields: fields of `ModelConfig`.

    Raises:
      ValueError: the name is unknown, or `fields` do not fit the rest.
      TypeError: `fields` has one that `ModelConfig` does not have.

    >>> from attnlab.models import num_parameters
    >>> num_parameters(published_config("gpt2"))
    124439808
    """
    known: dict[str, Published | ModelConfig] = {**PUBLISHED, "transformer_base": TRANSFORMER}
    found = lookup(MappingProxyType(known), name, what="published model")
    config = found.config if isinstance(found, Published) else found
    return dataclasses.replace(config, **fields)
