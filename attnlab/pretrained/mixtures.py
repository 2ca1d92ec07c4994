"""Decoders with experts in the names of Hugging Face: Mixtral (Jiang et al. 2024, arXiv
2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388) and gpt-oss (arXiv
2508.10925).
"""

import functools

from attnlab.heads import HeadNorm, Sink, Standard
from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute, shown
from attnlab.pretrained.expert_layers import (
    ExpertFields,
    ExpertNames,
    SparseSteps,
    expert_entries,
    stored_layers,
    with_experts,
)
from attnlab.pretrained.family import OtherAttributes
from attnlab.pretrained.fields import (
    BIASES,
    Choice,
    Source,
    Values,
    changed,
    grouped_heads,
    sizes,
    value,
)
from attnlab.pretrained.layer_types import FULL, SLIDING, LayerTypes, Window, every
from attnlab.pretrained.llama import FIELDS, causal_head, decoder
from attnlab.pretrained.weights import Entry

WIDTH = Attribute("intermediate_size", 11008)
EXPERT_WIDTH = Attribute("moe_intermediate_size", 1408)
BALANCE = Attribute("router_aux_loss_coef", 0.001)
UNUSED = (Attribute("output_router_logits"),)
"""Says whether transformers adds the balance loss in training."""
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _names(router: str, expert: str, projections: dict[str, str], **more: str) -> ExpertNames:
    weights = {name: f"{expert}.{module}" for name, module in projections.items()}
    return ExpertNames(router, weights, **more)  # type: ignore[arg-type]


MIXTRAL_NAMES = _names(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}",
    {"gate": "w1", "up": "w3", "down": "w2"},
)
QWEN_NAMES = _names("mlp.gate", "mlp.experts.{}", PROJECTIONS)._replace(
    shared={name: f"mlp.shared_expert.{module}" for name, module in PROJECTIONS.items()},
    shared_gate="mlp.shared_expert_gate",
)
MIXTRAL = with_experts(
    decoder(
        "mixtral",
        Standard(num_heads=4),
        (
            *changed(
                FIELDS,
                *sizes(intermediate_size=14336, max_position_embeddings=131072),
                *grouped_heads(num_kv_heads=8),
                value("rms_norm_eps", 1e-5, "norm.eps"),
                without=("attention_bias", "mlp_bias"),
            ),
            ExpertFields(
                options={
                    "num_experts": Attribute("num_local_experts", 8),
                    "top_k": Attribute("num_experts_per_tok", 2),
                    "balance": BALANCE,
                },
                width=WIDTH,
                windows=Window(None),
            ),
        ),
        causal_head("Mixtral"),
        other_attributes=OtherAttributes(read=UNUSED, fixed={"router_jitter_noise": 0.0}),
    ),
    functools.partial(expert_entries, MIXTRAL_NAMES),
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
        return (*own, zero, Attribute("use_sliding_window", False),
                Attribute("max_window_layers", 28, least=0))  # fmt: skip

    def types(self, attributes: JSON) -> list[str]:
        types = super().types(attributes)
        if SLIDING in types and not (
            attributes["use_sliding_window"] and attributes["sliding_window"]
        ):
            raise ValueError(
                f"config.json: layer_types = {shown(types)} need use_sliding_window = true and a "
                "sliding_window"
            )
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


QWEN_SIZES = (
    *sizes(vocab_size=151936, hidden_size=2048, num_hidden_layers=24),
    *sizes(max_position_embeddings=32768),
)
QWEN2_MOE = with_experts(
    decoder(
        "qwen2_moe",
        Standard(num_heads=4),
        (
            *changed(
                FIELDS,
                *QWEN_SIZES,
                *sizes(intermediate_size=5632, num_attention_heads=16),
                *grouped_heads(num_kv_heads=16),
                Choice("qkv_bias", True, "heads.biases", {True: BIASES[:3], False: ()}),
                without=("attention_bias", "mlp_bias", "rope_parameters"),
            ),
            ExpertFields(
                options={
                    "num_experts": Attribute("num_experts", 60),
                    "top_k": Attribute("num_experts_per_tok", 4),
                    "normalize": Attribute("norm_topk_prob", False),
                    "shared_width": Attribute("shared_expert_intermediate_size", 5632),
                    "balance": BALANCE,
                },
                width=EXPERT_WIDTH,
                constant={"shared_gate": True},
                dense=SparseSteps(),
                windows=_QwenTypes(default_types=_qwen_types),
            ),
        ),
        causal_head("Qwen2Moe"),
        other_attributes=OtherAttributes(read=UNUSED),
    ),
    functools.partial(expert_entries, QWEN_NAMES),
)
QWEN3_MOE = with_experts(
    decoder(
        "qwen3_moe",
        Standard(num_heads=4, qk_norm=HeadNorm("rms")),
        (
            *changed(
                FIELDS,
                *QWEN_SIZES,
                *sizes(intermediate_size=6144, num_attention_heads=32),
                *grouped_heads(num_kv_heads=4),
                value("rms_norm_eps", 1e-6, "norm.eps", "heads.norm_eps"),
                without=("mlp_bias",),
            ),
            ExpertFields(
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
            ),
        ),
        causal_head("Qwen3Moe"),
        other_attributes=OtherAttributes(read=(*UNUSED, Attribute("max_window_layers"))),
    ),
    functools.partial(expert_entries, QWEN_NAMES),
)


def _gpt_oss_entries(config: ModelConfig) -> list[Entry]:
    """All experts of a layer in one tensor, columns of gate and up in turn; and the sinks."""
    made = []
    for prefix, stack, _, groups in stored_layers(config):
        where, group = (stack, "ffn"), groups["ffn"]
        for end in ("", "_bias"):
            both = tuple((*where, f"{name}{end}") for name in ("gate", "up"))
            name = f"{prefix}mlp.experts.gate_up_proj{end}"
            made.append(Entry(name, both, group, "table", in_turn=True))
            down = f"{prefix}mlp.experts.down_proj{end}"
            made.append(Entry(down, ((*where, f"down{end}"),), group))
        router, bias = ((*where, "router"),), ((*where, "router_bias"),)
        made.append(Entry(f"{prefix}mlp.router.weight", router, group, "linear"))
        made.append(Entry(f"{prefix}mlp.router.bias", bias, group))
        sinks = ((stack, "attention", "sink"),)
        made.append(Entry(f"{prefix}self_attn.sinks", sinks, groups["attention"]))
    return made


def _alternating(attributes: JSON) -> list[str]:
    return every(attributes["num_hidden_layers"], 2)


GPT_OSS = with_experts(
    decoder("gpt_oss", Standard(num_heads=4, extras=(Sink(),)), (
            *changed(
                FIELDS,
                *sizes(vocab_size=201088, hidden_size=2880, num_hidden_layers=36),
                *sizes(intermediate_size=2880, num_attention_heads=64),
                *sizes(max_position_embeddings=131072),
                *grouped_heads(num_kv_heads=8, head_dim=64),
                Choice("hidden_act", "silu", "ffn.activation", {"silu": "gated_quick_gelu"}),
                Choice("attention_bias", True, "heads.biases", {True: BIASES, False: ()}),
                value("rms_norm_eps", 1e-5, "norm.eps"),
                without=("mlp_bias", "rope_parameters"),
            ),
            ExpertFields(
                options={
                    "num_experts": Attribute("num_local_experts", 128),
                    "top_k": Attribute("num_experts_per_tok", 4),
                    "balance": BALANCE,
                },
                width=WIDTH,
                constant={"router_bias": True},
                one_by_one=False,
                windows=LayerTypes(default_window=128, default_types=_alternating),
                clip=Attribute("swiglu_limit", 7.0),
            ),
        ), causal_head("GptOss"), other_attributes=OtherAttributes(read=(
            *UNUSED, Attribute("experts_per_token"), Attribute("initial_context_length"),
        ), fixed={"swiglu_alpha": 1.702}),),
    _gpt_oss_entries,
    bias=True,
)  # fmt: skip
