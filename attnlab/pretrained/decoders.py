"""Decoders beside Llama, in the names of Hugging Face: Phi-3 (Abdin et al. 2024, arXiv 2404.14219),
StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173), StableLM (Bellagamba et al. 2024, arXiv
2402.17834), Granite (IBM 2024), GLM and GLM-4 (arXiv 2406.12793) and SmolLM3 (2025).
"""

from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.models.specs import NoPositions, Norm, Positions, Rotary
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value, shown
from attnlab.pretrained.common_fields import (
    BIASES,
    AllBiases,
    CausalHead,
    activation,
    biases,
    head_dim,
    kv_heads,
    numbers,
)
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Field, Source, Value, Values, changed, value
from attnlab.pretrained.layer_types import FULL, Window, types_of
from attnlab.pretrained.llama import FIELDS, PAIRED, DecoderNames, decoder
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.rope import RotaryField, score_scales

FRACTION = "partial_rotary_factor"
FUSED_FFN = (
    Module("mlp.gate_up_proj", ("ffn.gate", "ffn.up")),
    Module("mlp.down_proj", "ffn.down"),
)
PHI3 = decoder(
    "phi3",
    changed(
        FIELDS,
        *numbers(vocab_size=32064, hidden_size=3072, intermediate_size=8192),
        *numbers(max_position_embeddings=4096, rms_norm_eps=1e-5, resid_pdrop=0.0, embd_pdrop=0.0),
        Window(None),
        RotaryField(fraction=FRACTION, scalings=()),
        without=("attention_bias", "mlp_bias", "head_dim"),
    ),
    CausalHead("Phi3"),
    names=DecoderNames(
        attention=(Module("self_attn.qkv_proj", PACKED), Module("self_attn.o_proj", "attention.o")),
        ffn=FUSED_FFN,
    ),
    other_attributes=OtherAttributes(ignored=("original_max_position_embeddings",)),
)
STARCODER2 = decoder(
    "starcoder2",
    changed(
        FIELDS,
        *numbers(vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30),
        *numbers(num_attention_heads=24, max_position_embeddings=4096, norm_epsilon=1e-5),
        *numbers(residual_dropout=0.0, embedding_dropout=0.0),
        kv_heads(2),
        activation("hidden_act", "gelu_pytorch_tanh"),
        Window(None),
        AllBiases("use_bias", True),
        without=("rms_norm_eps", "attention_bias", "mlp_bias"),
    ),
    CausalHead("Starcoder2", tied=True),
    other_attributes=OtherAttributes(
        # Other names of what hidden_act and norm_epsilon say; transformers reads those alone.
        ignored=(
            *("activation_function", "layer_norm_epsilon", "rms_norm_eps"),
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        ),
        fixed={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ),
    names=DecoderNames(ffn=linears("mlp.", "ffn", up="c_fc", down="c_proj")),
    norm=Norm(),
)
STABLELM = decoder(
    "stablelm",
    changed(
        FIELDS,
        *numbers(vocab_size=50304, hidden_size=2560, intermediate_size=6912),
        *numbers(max_position_embeddings=4096, layer_norm_eps=1e-5, hidden_dropout=0.0),
        kv_heads(32),
        biases("use_qkv_bias", False, BIASES[:3]),
        RotaryField(fraction=FRACTION, default_fraction=0.25),
        Choice(
            "use_parallel_residual", False, "norm.position", {True: "parallel_one", False: "pre"}
        ),
        without=("rms_norm_eps", "attention_bias", "mlp_bias", "head_dim"),
    ),
    CausalHead("StableLm"),
    other_attributes=OtherAttributes(fixed={"qk_layernorm": False}),
    norm=Norm(),
)


class _Multipliers(Field):
    """Scores are multiplied by attention_multiplier, logits are divided by logits_scaling."""

    attributes = (Attribute("attention_multiplier", 1.0), Attribute("logits_scaling", 1.0))

    def read(self, attributes: JSON, source: Source) -> Values:
        scale = float(attributes["logits_scaling"])
        if scale <= 0:
            raise bad_value("logits_scaling", scale, "must be above 0")
        return {"heads.scale": attributes["attention_multiplier"], "output.scale": 1 / scale}

    def write(self, config: ModelConfig) -> JSON:
        scores = config.layout.score_scale
        return {"attention_multiplier": scores, "logits_scaling": 1 / config.output.scale}


class _ResidualMultiplier(Value):
    """What every sublayer adds is multiplied."""

    def write(self, config: ModelConfig) -> JSON:
        if config.attention.output_scale != config.ffn.output_scale:
            raise ValueError("attention.output_scale and ffn.output_scale must be the same")
        return super().write(config)


GRANITE = decoder(
    "granite",
    changed(
        FIELDS,
        value("embedding_multiplier", 1.0, "embedding.scale"),
        _ResidualMultiplier(
            Attribute("residual_multiplier", 1.0), ("attention.output_scale", "ffn.output_scale")
        ),
        _Multipliers(),
        without=("head_dim",),
    ),
    CausalHead("Granite"),
)
GLM_FIELDS = changed(
    FIELDS,
    *numbers(vocab_size=151552, intermediate_size=13696, num_hidden_layers=40),
    *numbers(max_position_embeddings=131072, rms_norm_eps=1.5625e-7),
    kv_heads(2),
    head_dim(128),
    biases("attention_bias", True, BIASES[:3]),
    RotaryField(fraction=FRACTION, default_fraction=0.5),
    without=("mlp_bias",),
)
GLM = decoder(
    "glm",
    GLM_FIELDS,
    CausalHead("Glm"),
    names=DecoderNames(attention=PAIRED, ffn=FUSED_FFN),
)
GLM4 = decoder(
    "glm4",
    GLM_FIELDS,
    CausalHead("Glm4"),
    names=DecoderNames(
        attention=PAIRED,
        ffn=FUSED_FFN,
        norms={
            "attention.norm": "input_layernorm",
            "attention.norm_after": "post_self_attn_layernorm",
            "ffn.norm": "post_attention_layernorm",
            "ffn.norm_after": "post_mlp_layernorm",
        },
    ),
    norm=Norm(kind="rms", position="sandwich"),
)


UNUSED = Rotary(base=2e6)


class _PositionLayers(Field):
    """no_rope_layers: 1 where a layer has rotary positions, 0 where it has none."""

    rope = RotaryField(default_base=2e6)

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (
            Attribute("no_rope_layers", None, nullable=True, json_type=list),
            Attribute("no_rope_layer_interval", 4),
            Attribute("layer_types", None, nullable=True, json_type=list),
            *self.rope.attributes,
        )

    def read(self, attributes: JSON, source: Source) -> Values:
        count, every = attributes["num_hidden_layers"], attributes["no_rope_layer_interval"]
        turns, types = attributes["no_rope_layers"], attributes["layer_types"]
        turns = [int((i + 1) % every != 0) for i in range(count)] if turns is None else turns
        if len(turns) < count or any(turn not in (0, 1) for turn in turns):
            raise bad_value("no_rope_layers", turns, f"should be {count} numbers 0 or 1")
        if any(one != FULL for one in types or ()):
            raise ValueError(f"config.json: layer_types = {shown(types)}: only {FULL!r}")
        turns = turns[:count]
        positions: list[Positions] = [NoPositions(), self.rope.positions(attributes)]
        scale, still = self.rope.score_scale(attributes), LayerOverrides(positions=NoPositions())
        own = types_of([LayerOverrides() if turn else still for turn in turns])
        own |= score_scales([scale if turn else 1.0 for turn in turns])
        return {"positions": positions[max(turns)]} | own

    def write(self, config: ModelConfig) -> JSON:
        if any(c.attention.window is not None for c in config.stacks.values()):
            raise ValueError("attention.window must be None in all layers")
        turns = {n: c.positions.is_rotary for n, c in config.stacks.items()}
        rotary = [c.positions for c in config.stacks.values() if c.positions.is_rotary]
        scales = config.attention.layer_scales or (1.0,) * config.num_layers
        mine = [s for s, name in zip(scales, config.layer_names, strict=True) if turns[name]]
        rope = self.rope.describe(rotary[0], mine[0]) if rotary else self.rope.describe(UNUSED)
        return rope | {
            "no_rope_layer_interval": 4,
            "no_rope_layers": [int(turns[name]) for name in config.layer_names],
            "layer_types": [FULL] * config.num_layers,
        }


SMOLLM3 = decoder(
    "smollm3",
    changed(
        FIELDS,
        *numbers(vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16),
        *numbers(max_position_embeddings=32768),
        kv_heads(4),
        _PositionLayers(),
        without=("head_dim",),
    ),
    CausalHead("SmolLM3", tied=True),
    other_attributes=OtherAttributes(
        ignored=("max_window_layers",),
        fixed={"use_sliding_window": False, "sliding_window": None},
    ),
)
