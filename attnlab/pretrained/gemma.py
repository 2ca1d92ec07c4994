"""Gemma (2024, arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (2025,
arXiv 2503.19786), in the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, SoftCap, Standard, score_scale
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Norm
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import (
    GATED,
    CausalHead,
    Choice,
    Field,
    Source,
    Values,
    changed,
    grouped_heads,
    sizes,
    value,
)
from attnlab.pretrained.layer_types import FULL, SLIDING, LayerTypes, TypedRotary, every
from attnlab.pretrained.llama import FIELDS, DecoderNames, causal_head, decoder

BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""Type of a layer -> what configs before transformers 5 call its base, and its default."""


class _Scales(Field):
    """Scores are scaled by query_pre_attn_scalar^(-1/2), embeddings by the root of the width."""

    attributes = (Attribute("query_pre_attn_scalar", 256),)

    def read(self, attributes: JSON, source: Source) -> Values:
        return {
            "heads.scale": attributes["query_pre_attn_scalar"] ** -0.5,
            "embedding.scale": attributes["hidden_size"] ** 0.5,
        }

    def write(self, config: ModelConfig) -> JSON:
        return {"query_pre_attn_scalar": round(score_scale(config.layout) ** -2)}


class _SoftCap(Field):
    """attn_logit_softcapping of the scores; null is none."""

    attributes = (Attribute("attn_logit_softcapping", 50.0, nullable=True),)

    def read(self, attributes: JSON, source: Source) -> Values:
        cap = attributes["attn_logit_softcapping"]
        if cap is not None and cap <= 0:
            raise ValueError(
                f"config.json: attn_logit_softcapping = {cap!r} must be above 0, or null"
            )
        return {"heads.extras": () if cap is None else (SoftCap(float(cap)),)}

    def write(self, config: ModelConfig) -> JSON:
        caps = [one.cap for one in config.heads.extras if isinstance(one, SoftCap)]
        return {"attn_logit_softcapping": caps[0] if caps else None}


class _EmbeddingScale(Field):
    """Embeddings are scaled by the root of the width."""

    attributes = ()

    def read(self, attributes: JSON, source: Source) -> Values:
        return {"embedding.scale": attributes["hidden_size"] ** 0.5}

    def write(self, config: ModelConfig) -> JSON:
        return {}


SANDWICH = {
    "attention.norm": "input_layernorm",
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}
GEMMA = decoder(
    "gemma",
    Standard(num_heads=4),
    changed(
        FIELDS,
        *sizes(vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28),
        *sizes(num_attention_heads=16, max_position_embeddings=8192),
        *grouped_heads(num_kv_heads=16, head_dim=256),
        Choice("hidden_act", "gelu_pytorch_tanh", "ffn.activation", GATED),
        _EmbeddingScale(),
        without=("mlp_bias",),
    ),
    causal_head("Gemma", tied=True),
    norm=Norm(kind="rms_plus_one"),
    other_attributes=OtherAttributes(
        read=(Attribute("hidden_activation"),), fixed={"use_bidirectional_attention": None}
    ),
)
GEMMA2 = decoder(
    "gemma2",
    Standard(num_heads=4),
    changed(
        FIELDS,
        *sizes(vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26),
        *sizes(num_attention_heads=8, max_position_embeddings=8192),
        *grouped_heads(num_kv_heads=4, head_dim=256),
        Choice("hidden_activation", "gelu_pytorch_tanh", "ffn.activation", GATED),
        _Scales(),
        _SoftCap(),
        value("final_logit_softcapping", 30.0, "output.soft_cap", nullable=True),
        LayerTypes(default_types=lambda attributes: every(attributes["num_hidden_layers"], 2)),
        without=("hidden_act", "mlp_bias", "rope_parameters"),
    ),
    causal_head("Gemma2", tied=True),
    names=DecoderNames(norms=SANDWICH),
    norm=Norm(kind="rms_plus_one", position="sandwich"),
    other_attributes=OtherAttributes(
        read=(Attribute("hidden_act"), Attribute("cache_implementation")),
        fixed={"use_bidirectional_attention": None},
    ),
)
GEMMA3 = decoder(
    "gemma3_text",
    Standard(num_heads=4, qk_norm=HeadNorm("rms_plus_one")),
    changed(
        FIELDS,
        *sizes(vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26),
        *sizes(num_attention_heads=8, max_position_embeddings=131072),
        *grouped_heads(num_kv_heads=4, head_dim=256),
        Choice("hidden_activation", "gelu_pytorch_tanh", "ffn.activation", GATED),
        value("rms_norm_eps", 1e-6, "norm.eps", "heads.norm_eps"),
        _Scales(),
        TypedRotary(
            bases=BASES,
            default_types=lambda s: every(s["num_hidden_layers"], s["sliding_window_pattern"]),
            more=(
                Attribute("sliding_window_pattern", 6),
                Attribute("_sliding_window_pattern"),
                Attribute("rope_local_base_freq"),
            ),
        ),
        without=("hidden_act", "mlp_bias"),
    ),
    CausalHead("Gemma3TextModel", "Gemma3ForCausalLM", tied=True),
    names=DecoderNames(norms=SANDWICH),
    norm=Norm(kind="rms_plus_one", position="sandwich"),
    other_attributes=OtherAttributes(
        fixed={
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }
    ),
)
