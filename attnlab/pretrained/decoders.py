"""Decoders beside Llama, in the names of Hugging Face: Phi-3 (Abdin et al. 2024, arXiv 2404.14219),
StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173), StableLM (Bellagamba et al. 2024, arXiv
2402.17834) and Granite (IBM 2024).
"""

from attnlab.heads import Standard, score_scale
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Norm
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.fields import (
    ACTIVATIONS,
    BIASES,
    Choice,
    Field,
    Source,
    Value,
    Values,
    changed,
    grouped_heads,
    sizes,
    value,
)
from attnlab.pretrained.gpt2 import QKV
from attnlab.pretrained.layer_types import Window
from attnlab.pretrained.llama import FIELDS, decoder
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rope import RotaryField

HEADS = Standard(num_heads=4)
KV_HEADS = grouped_heads()[:1]
"""num_key_value_heads, where a head is always hidden_size / num_attention_heads wide."""
FRACTION = "partial_rotary_factor"

PHI3 = decoder(
    "phi3",
    HEADS,
    changed(
        FIELDS,
        *sizes(vocab_size=32064, hidden_size=3072, intermediate_size=8192),
        *sizes(max_position_embeddings=4096),
        value("rms_norm_eps", 1e-5, "norm.eps"),
        value("resid_pdrop", 0.0, "dropout.rate"),
        value("embd_pdrop", 0.0, "dropout.embedding", default_path="dropout.rate"),
        Window(None),
        RotaryField(fraction=FRACTION),
        without=("attention_bias", "mlp_bias", "head_dim"),
    ),
    architecture="Phi3",
    modules=(Module("self_attn.qkv_proj", QKV), Module("self_attn.o_proj", "attention.o")),
    ffn=(
        Module("mlp.gate_up_proj", ("ffn.gate", "ffn.up")),
        Module("mlp.down_proj", "ffn.down"),
    ),
    other_attributes=(Attribute("original_max_position_embeddings"),),
    # The default of transformers, 32000, is beyond a small vocabulary.
    written={"pad_token_id": None},
)


class _Biases(Field):
    """use_bias of all matrices."""

    attributes = (Attribute("use_bias", True),)

    def read(self, given: JSON, source: Source) -> Values:
        return {"heads.biases": BIASES if given["use_bias"] else (), "ffn.bias": given["use_bias"]}

    def write(self, config: ModelConfig) -> JSON:
        if set(config.heads.biases) != (set(BIASES) if config.ffn.bias else set()):
            raise ValueError(
                "heads.biases must be those of all matrices where ffn.bias is, or none"
            )
        return {"use_bias": config.ffn.bias}


STARCODER2 = decoder(
    "starcoder2",
    HEADS,
    changed(
        FIELDS,
        *sizes(vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30),
        *sizes(num_attention_heads=24, max_position_embeddings=4096),
        *grouped_heads(num_kv_heads=2),
        Choice("hidden_act", "gelu_pytorch_tanh", "ffn.activation", ACTIVATIONS),
        value("norm_epsilon", 1e-5, "norm.eps"),
        value("residual_dropout", 0.0, "dropout.rate"),
        value("embedding_dropout", 0.0, "dropout.embedding", default_path="dropout.rate"),
        Window(None),
        _Biases(),
        without=("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim"),
    ),
    architecture="Starcoder2",
    norm=Norm(),
    ffn=linears("mlp.", "ffn", up="c_fc", down="c_proj"),
    tied=True,
)
STABLELM = decoder(
    "stablelm",
    HEADS,
    changed(
        FIELDS,
        *sizes(vocab_size=50304, hidden_size=2560, intermediate_size=6912),
        *sizes(max_position_embeddings=4096),
        *grouped_heads(num_kv_heads=32)[:1],
        value("layer_norm_eps", 1e-5, "norm.eps"),
        value("hidden_dropout", 0.0, "dropout.rate"),
        Choice("use_qkv_bias", False, "heads.biases", {True: BIASES[:3], False: ()}),
        RotaryField(fraction=FRACTION, default_fraction=0.25),
        without=("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim"),
    ),
    architecture="StableLm",
    norm=Norm(),
    fixed={"qk_layernorm": False, "use_parallel_residual": False},
)


class _Multipliers(Field):
    """Scores are multiplied by attention_multiplier, logits are divided by logits_scaling."""

    attributes = (Attribute("attention_multiplier", 1.0), Attribute("logits_scaling", 1.0))

    def read(self, given: JSON, source: Source) -> Values:
        scale = float(given["logits_scaling"])
        if scale <= 0:
            raise ValueError(f"config.json: logits_scaling = {scale!r} must be above 0")
        return {"heads.scale": given["attention_multiplier"], "output.scale": 1 / scale}

    def write(self, config: ModelConfig) -> JSON:
        scores = score_scale(config.layout)
        return {"attention_multiplier": scores, "logits_scaling": 1 / config.output.scale}


class _ResidualMultiplier(Value):
    """What every sublayer adds is multiplied."""

    def write(self, config: ModelConfig) -> JSON:
        if config.attention.output_scale != config.ffn.output_scale:
            raise ValueError("attention.output_scale and ffn.output_scale must be the same")
        return super().write(config)


GRANITE = decoder(
    "granite",
    HEADS,
    changed(
        FIELDS,
        *KV_HEADS,
        value("embedding_multiplier", 1.0, "embedding.scale"),
        _ResidualMultiplier(
            Attribute("residual_multiplier", 1.0), ("attention.output_scale", "ffn.output_scale")
        ),
        _Multipliers(),
        without=("head_dim",),
    ),
    architecture="Granite",
)
