"""Decoders with experts in the names of Hugging Face: Mixtral (Jiang et al. 2024, arXiv
2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388) and gpt-oss (arXiv
2508.10925).
"""

from attnlab.heads import Sink, Standard
from attnlab.models.config import ModelConfig
from attnlab.models.specs import FFN
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.common_fields import (
    BIASES,
    CausalHead,
    biases,
    head_dim,
    kv_heads,
    numbers,
)
from attnlab.pretrained.expert_layers import (
    GATED_EXPERTS,
    ExpertFields,
    SparseSteps,
    expert_modules,
)
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import Choice, Source, Values, changed
from attnlab.pretrained.layer_types import FULL, SLIDING, LayerTypes, Window, every
from attnlab.pretrained.llama import (
    FIELDS,
    HEADS,
    NORMED,
    RMS_HEADS,
    DecoderNames,
    decoder,
)
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rope import RotaryField

WIDTH = Attribute("intermediate_size", 11008)
BALANCE = Attribute("router_aux_loss_coef", 0.001)
UNUSED = "output_router_logits"
"""Says whether transformers adds the balance loss in training."""
QWEN_FFN = (
    *GATED_EXPERTS,
    *linears("mlp.shared_expert.", "ffn.shared", gate="gate_proj", up="up_proj", down="down_proj"),
    Module("mlp.shared_expert_gate", "ffn.shared_gate"),
)
MIXTRAL_EXPERTS = ExpertFields(
    options={
        "num_experts": Attribute("num_local_experts", 8),
        "top_k": Attribute("num_experts_per_tok", 2),
        "balance": BALANCE,
    },
    width=WIDTH,
    windows=Window(None),
)
MIXTRAL_FIELDS = changed(
    FIELDS,
    *numbers(intermediate_size=14336, max_position_embeddings=131072, rms_norm_eps=1e-5),
    kv_heads(8),
    RotaryField(default_base=1e6),
    without=("attention_bias", "mlp_bias"),
)
MIXTRAL = decoder(
    "mixtral",
    (*MIXTRAL_FIELDS, MIXTRAL_EXPERTS),
    CausalHead("Mixtral"),
    names=DecoderNames(
        ffn=expert_modules(
            "block_sparse_moe.gate",
            {
                "gate": "block_sparse_moe.experts.{}.w1",
                "up": "block_sparse_moe.experts.{}.w3",
                "down": "block_sparse_moe.experts.{}.w2",
            },
        )
    ),
    other_attributes=OtherAttributes(ignored=(UNUSED,), fixed={"router_jitter_noise": 0.0}),
)


def _qwen_types(attributes: JSON) -> list[str]:
    """Every second layer, from the first on, up to max_window_layers."""
    slides, first = attributes["use_sliding_window"], attributes["max_window_layers"]
    count = attributes["num_hidden_layers"]
    return [SLIDING if slides and i % 2 == 0 and i < first else FULL for i in range(count)]


class _QwenTypes(LayerTypes):
    """Layers with a window, where use_sliding_window is true; else sliding_window is 0."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        zero = Attribute("sliding_window", 4096, nullable=True, least=0)
        own = (one for one in super().attributes if one.name != zero.name)
        used = Attribute("use_sliding_window", False)
        return (*own, zero, used, Attribute("max_window_layers", 28, least=0))

    def types(self, attributes: JSON) -> list[str]:
        types = super().types(attributes)
        if SLIDING in types and not (
            attributes["use_sliding_window"] and attributes["sliding_window"]
        ):
            why = "need use_sliding_window = true and a sliding_window"
            raise bad_value("layer_types", types, why)
        return types

    def write(self, config: ModelConfig) -> JSON:
        attributes = super().write(config)
        return attributes | {"use_sliding_window": SLIDING in attributes["layer_types"]}


class _Window(Window):
    """sliding_window of all layers, where use_sliding_window is true."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (*super().attributes, Attribute("use_sliding_window", False))

    def read(self, attributes: JSON, source: Source) -> Values:
        window = attributes["sliding_window"] if attributes["use_sliding_window"] else None
        return super().read({"sliding_window": window}, source)

    def write(self, config: ModelConfig) -> JSON:
        return super().write(config) | {"use_sliding_window": config.attention.window is not None}


QWEN_FIELDS = changed(
    FIELDS,
    *numbers(vocab_size=151936, hidden_size=2048, num_hidden_layers=24),
    *numbers(max_position_embeddings=32768),
    without=("mlp_bias",),
)
QWEN2_EXPERTS = ExpertFields(
    options={
        "num_experts": Attribute("num_experts", 60),
        "top_k": Attribute("num_experts_per_tok", 4),
        "normalize": Attribute("norm_topk_prob", False),
        "shared_width": Attribute("shared_expert_intermediate_size", 5632),
        "balance": BALANCE,
    },
    width=Attribute("moe_intermediate_size", 1408),
    constant={"shared_gate": True},
    dense=SparseSteps(),
    windows=_QwenTypes(default_types=_qwen_types),
)
QWEN2_FIELDS = changed(
    QWEN_FIELDS,
    *numbers(intermediate_size=5632, num_attention_heads=16),
    kv_heads(16),
    biases("qkv_bias", True, BIASES[:3]),
    without=("attention_bias", "rope_parameters"),
)
QWEN2_MOE = decoder(
    "qwen2_moe",
    (*QWEN2_FIELDS, QWEN2_EXPERTS),
    CausalHead("Qwen2Moe"),
    names=DecoderNames(ffn=QWEN_FFN),
    other_attributes=OtherAttributes(ignored=(UNUSED,)),
)
QWEN3_EXPERTS = ExpertFields(
    options={
        "num_experts": Attribute("num_experts", 128),
        "top_k": Attribute("num_experts_per_tok", 8),
        "normalize": Attribute("norm_topk_prob", False),
        "balance": BALANCE,
    },
    width=Attribute("moe_intermediate_size", 768),
    other_name="num_local_experts",
    dense=SparseSteps(),
    windows=_Window(),
)
QWEN3_FIELDS = changed(
    QWEN_FIELDS,
    *numbers(intermediate_size=6144, num_attention_heads=32),
    kv_heads(4),
    NORMED,
)
QWEN3_MOE = decoder(
    "qwen3_moe",
    (*QWEN3_FIELDS, QWEN3_EXPERTS),
    CausalHead("Qwen3Moe"),
    names=DecoderNames(ffn=QWEN_FFN),
    other_attributes=OtherAttributes(ignored=(UNUSED, "max_window_layers")),
    heads=RMS_HEADS,
)
GPT_OSS_EXPERTS = ExpertFields(
    options={
        "num_experts": Attribute("num_local_experts", 128),
        "top_k": Attribute("num_experts_per_tok", 4),
        "balance": BALANCE,
    },
    width=WIDTH,
    constant={"router_bias": True},
    one_by_one=False,
    windows=LayerTypes(
        default_window=128,
        default_types=lambda attributes: every(attributes["num_hidden_layers"], 2),
        rope=RotaryField(required=("rope_type", "rope_theta")),
    ),
    clip=Attribute("swiglu_limit", 7.0),
)
GPT_OSS_FIELDS = changed(
    FIELDS,
    *numbers(vocab_size=201088, hidden_size=2880, num_hidden_layers=36, intermediate_size=2880),
    *numbers(num_attention_heads=64, max_position_embeddings=131072, rms_norm_eps=1e-5),
    kv_heads(8),
    head_dim(64),
    Choice("hidden_act", "silu", "ffn.activation", {"silu": "gated_quick_gelu"}),
    biases("attention_bias", True),
    without=("mlp_bias", "rope_parameters"),
)
GATE_UP = "mlp.experts.gate_up_proj"
GPT_OSS = decoder(
    "gpt_oss",
    (*GPT_OSS_FIELDS, GPT_OSS_EXPERTS),
    CausalHead("GptOss"),
    names=DecoderNames(
        attention=(*HEADS, Module("self_attn.sinks", "attention.sink", "plain")),
        ffn=(
            Module("mlp.router", "ffn.router"),
            # All experts of a layer in one tensor, columns of gate and up in turn.
            Module(GATE_UP, ("ffn.gate", "ffn.up"), "plain", in_turn=True),
            Module(f"{GATE_UP}_bias", ("ffn.gate_bias", "ffn.up_bias"), "plain", in_turn=True),
            Module("mlp.experts.down_proj", "ffn.down", "plain"),
            Module("mlp.experts.down_proj_bias", "ffn.down_bias", "plain"),
        ),
    ),
    other_attributes=OtherAttributes(
        ignored=(UNUSED, "experts_per_token", "initial_context_length"),
        fixed={"swiglu_alpha": 1.702},
    ),
    heads=Standard(num_heads=4, extras=(Sink(),)),
    ffn=FFN(),
)
