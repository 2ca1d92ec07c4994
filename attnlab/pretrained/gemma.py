"""Gemma (2024, arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (2025,
arXiv 2503.19786), in the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, SoftCap, Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Norm
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.common_fields import (
    GATED,
    CausalHead,
    activation,
    head_dim,
    kv_heads,
    numbers,
)
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Field, Source, Values, changed, choose, value
from attnlab.pretrained.layer_types import FULL, SLIDING, LayerTypes, TypedRotary, every
from attnlab.pretrained.llama import FIELDS, NORMED, DecoderNames, decoder

BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""Type of a layer -> what configs before transformers 5 call its base, and its default."""


class _EmbeddingScale(Field):
    """Embeddings are scaled by the root of the width."""

    attributes: tuple[Attribute, ...] = ()

    def read(self, attributes: JSON, source: Source) -> Values:
        return {"embedding.scale": attributes["hidden_size"] ** 0.5}

    def write(self, config: ModelConfig) -> JSON:
        return {}


class _Scales(_EmbeddingScale):
    """Scores are scaled by query_pre_attn_scalar^(-1/2) too."""

    attributes = (Attribute("query_pre_attn_scalar", 256),)

    def read(self, attributes: JSON, source: Source) -> Values:
        scale = {"heads.scale": attributes["query_pre_attn_scalar"] ** -0.5}
        return super().read(attributes, source) | scale

    def write(self, config: ModelConfig) -> JSON:
        return {"query_pre_attn_scalar": round(config.layout.score_scale**-2)}


class _SoftCap(Field):
    """attn_logit_softcapping of the scores; null is none."""

    attributes = (Attribute("attn_logit_softcapping", 50.0, nullable=True),)

    def read(self, attributes: JSON, source: Source) -> Values:
        cap = attributes["attn_logit_softcapping"]
        if cap is not None and cap <= 0:
            raise bad_value("attn_logit_softcapping", cap, "must be above 0, or null")
        return {"heads.extras": () if cap is None else (SoftCap(float(cap)),)}

    def write(self, config: ModelConfig) -> JSON:
        caps = [one.cap for one in config.heads.extras if isinstance(one, SoftCap)]
        return {"attn_logit_softcapping": caps[0] if caps else None}


TANH_KIND = {theirs: ours for theirs, ours in GATED.items() if theirs != "gelu"}
TANH_KIND["gelu"] = GATED["gelu_new"]  # last: not what is written


class _Activation(Choice):
    """hidden_act, where "gelu" means the tanh kind, as all releases were trained; some versions of
    transformers read hidden_activation in its place, which may not contradict it."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (*super().attributes, Attribute("hidden_activation", nullable=True, json_type=str))

    def read(self, attributes: JSON, source: Source) -> Values:
        values, other = super().read(attributes, source), attributes.get("hidden_activation")
        if other is not None and choose("hidden_activation", other, self.values) not in (
            values.values()
        ):
            why = f"contradicts hidden_act = {attributes['hidden_act']!r}; write both alike"
            raise bad_value("hidden_activation", other, why)
        return values


SANDWICH = {
    "attention.norm": "input_layernorm",
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}
GEMMA = decoder(
    "gemma",
    changed(
        FIELDS,
        *numbers(vocab_size=256000, hidden_size=3072, intermediate_size=24576),
        *numbers(num_hidden_layers=28, num_attention_heads=16, max_position_embeddings=8192),
        kv_heads(16),
        head_dim(256),
        _Activation("hidden_act", "gelu_pytorch_tanh", "ffn.activation", TANH_KIND),
        _EmbeddingScale(),
        without=("mlp_bias",),
    ),
    CausalHead("Gemma", tied=True),
    other_attributes=OtherAttributes(fixed={"use_bidirectional_attention": None}),
    norm=Norm(kind="rms_plus_one"),
)
LATER_FIELDS = changed(
    FIELDS,
    *numbers(hidden_size=2304, intermediate_size=9216, num_hidden_layers=26),
    *numbers(num_attention_heads=8),
    kv_heads(4),
    head_dim(256),
    activation("hidden_activation", "gelu_pytorch_tanh", gated=True),
    _Scales(),
    without=("hidden_act", "mlp_bias"),
)
GEMMA2 = decoder(
    "gemma2",
    changed(
        LATER_FIELDS,
        *numbers(vocab_size=256000, max_position_embeddings=8192),
        _SoftCap(),
        value("final_logit_softcapping", 30.0, "output.soft_cap", nullable=True),
        LayerTypes(default_types=lambda attributes: every(attributes["num_hidden_layers"], 2)),
        without=("rope_parameters",),
    ),
    CausalHead("Gemma2", tied=True),
    names=DecoderNames(norms=SANDWICH),
    other_attributes=OtherAttributes(
        ignored=("hidden_act", "cache_implementation"), fixed={"use_bidirectional_attention": None}
    ),
    norm=Norm(kind="rms_plus_one", position="sandwich"),
)
GEMMA3 = decoder(
    "gemma3_text",
    changed(
        LATER_FIELDS,
        *numbers(vocab_size=262208, max_position_embeddings=131072),
        NORMED,
        TypedRotary(
            bases=BASES,
            default_types=lambda s: every(s["num_hidden_layers"], s["sliding_window_pattern"]),
            more=(
                Attribute("sliding_window_pattern", 6),
                Attribute("_sliding_window_pattern"),
                Attribute("rope_local_base_freq"),
            ),
        ),
    ),
    CausalHead("Gemma3", tied=True, bare="TextModel"),
    names=DecoderNames(norms=SANDWICH),
    other_attributes=OtherAttributes(
        fixed={
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        }
    ),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms_plus_one")),
    norm=Norm(kind="rms_plus_one", position="sandwich"),
)
