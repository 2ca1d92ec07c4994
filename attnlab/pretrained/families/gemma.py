"""Gemma (2024, arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (2025,
arXiv 2503.19786), in the names of Hugging Face.
"""

from attnlab.heads import HeadNorm, SoftCap, Standard
from attnlab.models import Norm
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.llama import LLAMA, NORMED, decoder_table
from attnlab.pretrained.rotary import FULL, SLIDING, LayerTypes, every
from attnlab.pretrained.tasks import LAST, SCORES


class _EmbeddingScale(f.Field):
    """Embeddings are scaled by the root of the width."""

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        return {"embedding.scale": attributes["hidden_size"] ** 0.5}


class _ScoreScale(f.Field):
    """Scores are scaled by query_pre_attn_scalar^(-1/2)."""

    attributes = (Attribute("query_pre_attn_scalar", 256),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        return {"heads.scale": attributes["query_pre_attn_scalar"] ** -0.5}

    def write(self, config: ModelConfig) -> JSON:
        return {"query_pre_attn_scalar": round(config.layout.score_scale**-2)}


class _SoftCap(f.Field):
    """attn_logit_softcapping of the scores; null is none."""

    attributes = (Attribute("attn_logit_softcapping", 50.0, nullable=True),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        cap = attributes["attn_logit_softcapping"]
        if cap is not None and cap <= 0:
            raise bad_value("attn_logit_softcapping", cap, "must be above 0, or null")
        return {"heads.extras": () if cap is None else (SoftCap(float(cap)),)}

    def write(self, config: ModelConfig) -> JSON:
        caps = [one.cap for one in config.heads.extras if isinstance(one, SoftCap)]
        return {"attn_logit_softcapping": caps[0] if caps else None}


TANH_KIND = {theirs: ours for theirs, ours in f.GATED.items() if theirs != "gelu"}
TANH_KIND["gelu"] = f.GATED["gelu_new"]  # last: not what is written


class _Activation(f.Choice):
    """hidden_act, where "gelu" means the tanh kind, as all releases were trained; some versions of
    transformers read hidden_activation in its place, which may not contradict it."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (*super().attributes, Attribute("hidden_activation", kind=str))

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        values, other = super().read(attributes, source), attributes["hidden_activation"]
        said = other is not None and f.choose("hidden_activation", other, self.values)
        if said and said != values[self.path]:
            why = f"contradicts hidden_act = {attributes['hidden_act']!r}; write both alike"
            raise bad_value("hidden_activation", other, why)
        return values


CAUSAL = f.Choice("use_bidirectional_attention", "kind", {False: "decoder", None: "decoder"})
SANDWICH = {
    "attention.norm": "input_layernorm",
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm": "pre_feedforward_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}
GEMMA = LLAMA.variant(
    "gemma",
    f.CausalHead("Gemma"),
    _Activation("hidden_act", "ffn.activation", TANH_KIND),
    _EmbeddingScale(),
    CAUSAL,
    without="mlp_bias",
    norm=Norm(kind="rms_plus_one"),
    tasks=SCORES,
)
GEMMA2 = LLAMA.variant(
    "gemma2",
    f.CausalHead("Gemma2"),
    f.activation("hidden_activation", gated=True),
    _EmbeddingScale(),
    _ScoreScale(),
    _SoftCap(),
    f.value("final_logit_softcapping", float, "output.soft_cap", nullable=True),
    LayerTypes(default_types=every(2)),
    f.Words(ignored="hidden_act cache_implementation"),
    CAUSAL,
    without="mlp_bias",
    table=decoder_table(norms=SANDWICH),
    norm=Norm(kind="rms_plus_one", position="sandwich"),
    tasks=SCORES,
)


class _Gemma3Types(LayerTypes):
    """Where attention is bidirectional (EmbeddingGemma), a window is as wide, half to each side."""

    def window(self, attributes: JSON) -> int:
        window = super().window(attributes)
        return (window + 1) // 2 if attributes["use_bidirectional_attention"] else window

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        if config.kind == "encoder" and attributes["sliding_window"]:
            attributes["sliding_window"] = max(1, 2 * attributes["sliding_window"] - 2)
        return attributes


GEMMA3 = GEMMA2.variant(
    "gemma3_text",
    f.CausalHead("Gemma3Text", causal="Gemma3ForCausalLM"),
    NORMED,
    _Gemma3Types(
        default_types=every("sliding_window_pattern"),
        more=(
            Attribute("sliding_window_pattern", 6, object),
            Attribute("_sliding_window_pattern"),
            Attribute("rope_local_base_freq"),
        ),
        # What configs before transformers 5 say.
        bases={FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)},
    ),
    f.Words(only={"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    f.Choice("use_bidirectional_attention", "kind", {**CAUSAL.values, True: "encoder"}),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms_plus_one")),
    tasks=(LAST,),
)
