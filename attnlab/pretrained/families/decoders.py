"""Decoders beside Llama, in the names of Hugging Face: Phi-3 (Abdin et al. 2024, arXiv 2404.14219),
StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173), StableLM (Bellagamba et al. 2024, arXiv
2402.17834), Granite (IBM 2024), GLM and GLM-4 (arXiv 2406.12793) and SmolLM3 (2025).
"""

from attnlab.models import NoPositions, Norm, Rotary
from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.families.llama import LLAMA, PAIRED, decoder_table
from attnlab.pretrained.name_table import PACKED, Module, linears
from attnlab.pretrained.rotary import FULL, LENGTH, RotaryField, Window, score_scales, types_of
from attnlab.pretrained.tasks import SCORES

FRACTION = "partial_rotary_factor"
FUSED_FFN = (
    Module("mlp.gate_up_proj", ("ffn.gate", "ffn.up")),
    Module("mlp.down_proj", "ffn.down"),
)
PHI3 = LLAMA.variant(
    "phi3",
    dict(vocab_size=32064, hidden_size=3072, intermediate_size=8192, rms_norm_eps=1e-5),
    dict(max_position_embeddings=4096),
    f.CausalHead("Phi3"),
    *f.numbers(resid_pdrop=0.0, embd_pdrop=0.0),
    Window(None),
    RotaryField(fraction=FRACTION, scalings=("longrope",), length=LENGTH),
    without="attention_bias mlp_bias head_dim",
    table=decoder_table(
        attention=(Module("self_attn.qkv_proj", PACKED), Module("self_attn.o_proj", "attention.o")),
        ffn=FUSED_FFN,
    ),
    tasks=SCORES,
)
STARCODER2 = LLAMA.variant(
    "starcoder2",
    dict(vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30),
    dict(num_attention_heads=24, max_position_embeddings=4096, num_key_value_heads=2),
    f.CausalHead("Starcoder2", tied=True),
    *f.numbers(norm_epsilon=1e-5, residual_dropout=0.0, embedding_dropout=0.0),
    f.activation("hidden_act", "gelu_pytorch_tanh"),
    Window(None),
    f.AllBiases("use_bias", True),
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
    dict(vocab_size=50304, hidden_size=2560, intermediate_size=6912, num_key_value_heads=32),
    dict(max_position_embeddings=4096),
    f.CausalHead("StableLm"),
    *f.numbers(layer_norm_eps=1e-5, hidden_dropout=0.0),
    f.biases("use_qkv_bias", False, f.BIASES[:3]),
    RotaryField(fraction=FRACTION, default_fraction=0.25),
    f.Choice("use_parallel_residual", False, "norm.position", {True: "parallel_one", False: "pre"}),
    f.Words(only={"qk_layernorm": False}),
    without="rms_norm_eps attention_bias mlp_bias head_dim",
    norm=Norm(),
    tasks=SCORES,
)


class _Multipliers(f.Field):
    """Scores are multiplied by attention_multiplier, logits are divided by logits_scaling."""

    attributes = (Attribute("attention_multiplier", 1.0), Attribute("logits_scaling", 1.0))

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        scale = float(attributes["logits_scaling"])
        if scale <= 0:
            raise bad_value("logits_scaling", scale, "must be above 0")
        return {"heads.scale": attributes["attention_multiplier"], "output.scale": 1 / scale}

    def write(self, config: ModelConfig) -> JSON:
        scores = config.layout.score_scale
        return {"attention_multiplier": scores, "logits_scaling": 1 / config.output.scale}


GRANITE = LLAMA.variant(
    "granite",
    f.CausalHead("Granite"),
    f.value("embedding_multiplier", 1.0, "embedding.scale"),
    f.value("residual_multiplier", 1.0, "attention.output_scale", "ffn.output_scale"),
    _Multipliers(),
    without="head_dim",
    tasks=(),
)
GLM = LLAMA.variant(
    "glm",
    dict(vocab_size=151552, intermediate_size=13696, num_hidden_layers=40, head_dim=128),
    dict(max_position_embeddings=131072, rms_norm_eps=1.5625e-7, num_key_value_heads=2),
    f.CausalHead("Glm"),
    f.biases("attention_bias", True, f.BIASES[:3]),
    RotaryField(fraction=FRACTION, default_fraction=0.5),
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
STILL = NoPositions()


class _PositionLayers(f.Field):
    """no_rope_layers: 1 where a layer has rotary positions, 0 where it has none."""

    rope = RotaryField(default_base=2e6)
    attributes = (
        Attribute("no_rope_layers", kind=list),
        Attribute("no_rope_layer_interval", 4),
        Attribute("layer_types", kind=list),
        *rope.attributes,
    )

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        count, every = attributes["num_hidden_layers"], attributes["no_rope_layer_interval"]
        turns, types = attributes["no_rope_layers"], attributes["layer_types"]
        turns = [int((i + 1) % every != 0) for i in range(count)] if turns is None else turns
        if len(turns) < count or any(turn not in (0, 1) for turn in turns):
            raise bad_value("no_rope_layers", turns, f"should be {count} numbers 0 or 1")
        if any(one != FULL for one in types or ()):
            raise bad_value("layer_types", types, f"is not supported, only {FULL!r}")
        turns, (rotary, scale) = turns[:count], self.rope.rotary(attributes)
        still = LayerOverrides(positions=STILL)
        values = types_of([LayerOverrides() if turn else still for turn in turns])
        values |= score_scales([scale if turn else 1.0 for turn in turns])
        return values | {"positions": rotary if any(turns) else STILL}

    def write(self, config: ModelConfig) -> JSON:
        positions = [config.stacks[name].positions for name in config.layer_names]
        turns = [int(one.is_rotary) for one in positions]
        scales = config.attention.layer_scales or (1.0,) * config.num_layers
        first = turns.index(1) if any(turns) else None
        unused = (Rotary(base=2e6), 1.0)
        rotary = unused if first is None else (positions[first], scales[first])
        return self.rope.describe(*rotary) | {
            "no_rope_layer_interval": 4,
            "no_rope_layers": turns,
            "layer_types": [FULL] * config.num_layers,
        }


SMOLLM3 = LLAMA.variant(
    "smollm3",
    dict(vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16),
    dict(max_position_embeddings=32768, num_key_value_heads=4),
    f.CausalHead("SmolLM3", tied=True),
    _PositionLayers(),
    f.Words(
        ignored="max_window_layers", only={"use_sliding_window": False, "sliding_window": None}
    ),
    without="head_dim",
)
