"""Decoders beside Llama, in the names of Hugging Face: OLMo (Groeneveld et al. 2024, arXiv
2402.00838), OLMo 2 (arXiv 2501.00656) and OLMo 3 (2025), Phi (Li et al. 2023, arXiv 2309.05463) and
Phi-3 (Abdin et al. 2024, arXiv 2404.14219), Cohere (2024) and Cohere 2 (2025, arXiv 2504.00698),
StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173), StableLM (Bellagamba et al. 2024, arXiv
2402.17834), Granite (IBM 2024), GLM and GLM-4 (arXiv 2406.12793), SmolLM3, Seed-OSS, ERNIE 4.5
(2025) and EXAONE 4 (arXiv 2507.11407).
"""

from attnlab.heads import HeadNorm, Standard
from attnlab.models import FFN, Dropout, Norm
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained import rotary as r
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families import llama
from attnlab.pretrained.families.llama import FLAT, HEADS, LLAMA, PAIRED, decoder_table
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.tasks import LAST, SCORES

AFTER = {
    "attention.norm_after": "post_attention_layernorm",
    "ffn.norm_after": "post_feedforward_layernorm",
}

OLMO = LLAMA.variant(
    "olmo",
    f.CausalHead("Olmo"),
    f.Words(only={"clip_qkv": None}),
    without="rms_norm_eps mlp_bias head_dim",
    norm=Norm(scale=False, eps=1e-5),
    tasks=(LAST,),
)
OLMO2 = LLAMA.variant(
    "olmo2",
    f.CausalHead("Olmo2"),
    llama.NORMED,
    without="mlp_bias head_dim",
    table=decoder_table(FLAT, norms=AFTER),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all")),
    norm=Norm(kind="rms", position="after"),
    tasks=(LAST,),
)


class _OlmoTypes(r.LayerTypes):
    """Some versions of transformers read rope_theta for layers without a window alone, and have
    500,000 for the others."""

    def of_type(self, attributes: JSON, type_: str) -> JSON:
        own, theta = (attributes["rope_parameters"] or {}).get(type_), attributes["rope_theta"]
        if type_ == r.SLIDING and not own and theta not in (None, 5e5):
            why = "is not supported without rope_parameters of each type of layer"
            raise bad_value("rope_theta", theta, why)
        return super().of_type(attributes, type_)


OLMO3 = OLMO2.variant(
    "olmo3",
    f.CausalHead("Olmo3"),
    _OlmoTypes(
        default_types=r.every(4),
        bases={r.FULL: ("rope_theta", None), r.SLIDING: ("rope_theta", None)},
        rope=r.RotaryField(required=("rope_theta",)),
    ),
)
ONE_NORM = {"attention.norm": "input_layernorm"}
EPSILON = f.value("layer_norm_eps", float, "norm.eps", "heads.norm_eps")
BIASED_HEAD_NORM = HeadNorm("layer", bias=True)
HEAD_NORM = HeadNorm("layer", over="own_head")
PHI = LLAMA.variant(
    "phi",
    f.CausalHead("Phi", bias=True),
    *f.numbers("resid_pdrop embd_pdrop"),
    f.activation("hidden_act"),
    EPSILON,
    f.Choice("qk_layernorm", "heads.qk_norm", {True: BIASED_HEAD_NORM, False: None}),
    r.RotaryField(fraction=r.FRACTION, default_fraction=0.5),
    without="rms_norm_eps attention_bias mlp_bias head_dim",
    table=decoder_table(
        attention=(
            *linears("self_attn.", "attention", **llama.QKVO | {"o": "dense"}),
            *(Module(f"self_attn.{n}_layernorm", f"attention.{n}_norm", "table") for n in "qk"),
            *(Module(f"self_attn.{n}_layernorm", f"attention.{n}_norm_bias", "bias") for n in "qk"),
        ),
        ffn=linears("mlp.", "ffn", up="fc1", down="fc2"),
        norms=ONE_NORM,
        outside={"final_norm": "final_layernorm"},
    ),
    heads=Standard(num_heads=4, biases=f.BIASES),
    norm=Norm(position="parallel_one"),
    ffn=FFN(),
    tasks=SCORES,
)


COHERE = LLAMA.variant(
    "cohere",
    f.CausalHead("Cohere"),
    EPSILON,
    f.Choice("use_qk_norm", "heads.qk_norm", {True: HEAD_NORM, False: None}),
    f.value("logit_scale", float, "output.scale"),
    r.RotaryField(required=("rope_theta",)),
    without="rms_norm_eps mlp_bias head_dim",
    table=decoder_table(PAIRED, norms=ONE_NORM),
    norm=Norm(position="parallel_one", bias=False),
    tasks=(),
)
COHERE2 = COHERE.variant(
    "cohere2",
    f.CausalHead("Cohere2"),
    r.StillTypes(
        default_types=r.every("sliding_window_pattern"),
        more=(Attribute("sliding_window_pattern", 4, object),),  # "LLLG" or null beside layer_types
        rope=r.RotaryField(required=("rope_theta",)),
    ),
    f.head_dim(),
    without="use_qk_norm",
)
FUSED_FFN = (
    Module("mlp.gate_up_proj", ("ffn.gate", "ffn.up")),
    Module("mlp.down_proj", "ffn.down"),
)
PHI3 = LLAMA.variant(
    "phi3",
    f.CausalHead("Phi3"),
    *f.numbers("resid_pdrop"),
    f.Words(ignored="embd_pdrop"),  # transformers applies none
    r.Window(),
    r.RotaryField(fraction=r.FRACTION, scalings=("longrope",), outside=True),
    without="attention_bias mlp_bias head_dim",
    table=decoder_table(
        attention=(Module("self_attn.qkv_proj", PACKED), Module("self_attn.o_proj", "attention.o")),
        ffn=FUSED_FFN,
    ),
    dropout=f.IN_LAYERS,
    tasks=SCORES,
)
STARCODER2 = LLAMA.variant(
    "starcoder2",
    f.CausalHead("Starcoder2"),
    *f.numbers("norm_epsilon residual_dropout embedding_dropout"),
    f.activation("hidden_act"),
    r.Window(),
    *f.all_biases("use_bias"),
    f.Words(
        # Other names of what hidden_act and norm_epsilon say; transformers reads those alone.
        ignored="activation_function layer_norm_epsilon rms_norm_eps attention_softmax_in_fp32 "
        "scale_attention_softmax_in_fp32",
        only={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ),
    without="rms_norm_eps attention_bias mlp_bias",
    table=decoder_table(ffn=linears("mlp.", "ffn", up="c_fc", down="c_proj")),
    norm=Norm(),
    tasks=SCORES,
)
STABLELM = LLAMA.variant(
    "stablelm",
    f.CausalHead("StableLm"),
    *f.numbers("hidden_dropout"),
    EPSILON,
    f.Choice("qk_layernorm", "heads.qk_norm", {True: HEAD_NORM, False: None}),
    f.biases("use_qkv_bias", f.BIASES[:3]),
    r.RotaryField(fraction=r.FRACTION, default_fraction=0.25),
    f.Choice("use_parallel_residual", "norm.position", {True: "parallel_one", False: "pre"}),
    without="rms_norm_eps attention_bias mlp_bias head_dim",
    table=decoder_table(
        (
            *HEADS[:4],
            *(
                Module(f"self_attn.{n}_layernorm.norms.{{}}", f"attention.{n}_norm", "table")
                for n in "qk"
            ),
        )
    ),
    norm=Norm(),
    dropout=Dropout(places=("ffn",)),
    tasks=SCORES,
)


class _LogitsScaling(f.Field):
    """Logits are divided by logits_scaling."""

    attributes = (Attribute("logits_scaling", 1.0),)

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        scale = float(attributes["logits_scaling"])
        if scale <= 0:
            raise bad_value("logits_scaling", scale, "must be above 0")
        return {"output.scale": 1 / scale}

    def write(self, config: ModelConfig) -> JSON:
        return {"logits_scaling": 1 / config.output.scale}


GRANITE = LLAMA.variant(
    "granite",
    f.CausalHead("Granite"),
    f.value("embedding_multiplier", float, "embedding.scale"),
    f.value("residual_multiplier", float, "attention.output_scale", "ffn.output_scale"),
    f.value("attention_multiplier", float, "heads.scale", default_path="layout.score_scale"),
    _LogitsScaling(),
    without="head_dim",
    tasks=(),
)
GLM = LLAMA.variant(
    "glm",
    f.CausalHead("Glm"),
    f.biases("attention_bias", f.BIASES[:3]),
    r.RotaryField(fraction=r.FRACTION, default_fraction=0.5),
    without="mlp_bias",
    table=decoder_table(PAIRED, FUSED_FFN),
    tasks=SCORES,
)
GLM4 = GLM.variant(
    "glm4",
    f.CausalHead("Glm4"),
    table=decoder_table(
        PAIRED,
        FUSED_FFN,
        norms={
            "attention.norm": "input_layernorm",
            "attention.norm_after": "post_self_attn_layernorm",
            "ffn.norm": "post_attention_layernorm",
            "ffn.norm_after": "post_mlp_layernorm",
        },
    ),
    norm=Norm(kind="rms", position="sandwich"),
)


class _SmolTypes(r.LayerTypes):
    """no_rope_layers: 1 where a layer has rotary positions, 0 where it has none. If
    use_sliding_window is true, layers of layer_types have a window; by default those without."""

    def rotates(self, attributes: JSON, types: list[str]) -> list[bool]:
        return _smol_rotates(attributes)

    def write(self, config: ModelConfig) -> JSON:
        rotates = [config.stacks[name].positions.is_rotary for name in config.layer_names]
        words = {"no_rope_layer_interval": 4, "no_rope_layers": [int(one) for one in rotates]}
        return super().write(config) | words


def _smol_rotates(attributes: JSON) -> list[bool]:
    count, every = attributes["num_hidden_layers"], attributes["no_rope_layer_interval"]
    said = attributes["no_rope_layers"]
    said = [int((i + 1) % every != 0) for i in range(count)] if said is None else said
    if len(said) < count or any(one not in (0, 1) for one in said):
        raise bad_value("no_rope_layers", said, f"should be {count} numbers 0 or 1")
    return [bool(one) for one in said[:count]]


def _smol_types(attributes: JSON) -> list[str]:
    slides = attributes["use_sliding_window"] and attributes["sliding_window"] is not None
    return [r.FULL if one or not slides else r.SLIDING for one in _smol_rotates(attributes)]


SMOLLM3 = LLAMA.variant(
    "smollm3",
    f.CausalHead("SmolLM3"),
    _SmolTypes(
        default_window=None,
        default_types=_smol_types,
        more=(Attribute("no_rope_layers", kind=list), Attribute("no_rope_layer_interval", 4)),
        rope=r.RotaryField(default_base=2e6),
        switch="use_sliding_window",
    ),
    f.Words(ignored="max_window_layers"),
    without="head_dim",
)


class _OutBias(f.Field):
    """Biases of queries, keys and values, and of the output."""

    attributes = (Attribute("attention_bias", True), Attribute("attention_out_bias", False))

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        inner, outer = (attributes[one.name] for one in self.attributes)
        return {"heads.biases": f.BIASES[: 3 * inner] + ("o",) * outer}

    def write(self, config: ModelConfig) -> JSON:
        there = config.heads.biases
        return {"attention_bias": "q" in there, "attention_out_bias": "o" in there}


SEED_OSS = LLAMA.variant(
    "seed_oss",
    f.CausalHead("SeedOss"),
    *f.numbers("residual_dropout"),
    _OutBias(),
    dropout=f.IN_LAYERS,
)
ERNIE4_5 = LLAMA.variant(
    "ernie4_5",
    f.CausalHead("Ernie4_5"),
    *f.all_biases("use_bias"),
    r.RotaryField(default_base=5e5),
    f.Words(ignored="attention_dropout"),  # transformers applies none
    without="attention_bias mlp_bias",
    table=decoder_table(PAIRED),
    tasks=(),
)


class _ExaoneTypes(r.StillTypes):
    """Without a sliding_window, all layers have rotary positions."""

    def rotates(self, attributes: JSON, types: list[str]) -> list[bool]:
        alike = attributes["sliding_window"] is None
        return [alike or one for one in super().rotates(attributes, types)]

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        alike = r.SLIDING not in attributes["layer_types"] and config.positions.is_rotary
        return attributes | ({"sliding_window": None} if alike else {})


EXAONE4 = LLAMA.variant(
    "exaone4",
    f.CausalHead("Exaone4"),
    llama.NORMED,
    _ExaoneTypes(
        default_types=r.every("sliding_window_pattern"),
        more=(Attribute("sliding_window_pattern", 4, object),),
    ),
    without="attention_bias mlp_bias",
    table=decoder_table(norms=AFTER),
    heads=llama.RMS_HEADS,
    norm=Norm(kind="rms", position="after"),
)
