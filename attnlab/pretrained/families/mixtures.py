"""Decoders with experts in the names of Hugging Face: Mixtral (Jiang et al. 2024, arXiv
2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388), gpt-oss (arXiv
2508.10925), OLMoE (Muennighoff et al. 2024, arXiv 2409.02060), DeepSeek-V3 (DeepSeek-AI 2024, arXiv
2412.19437) and GLM-4.5 (2025, arXiv 2508.06471).
"""

import dataclasses
import operator

from attnlab.heads import HeadNorm, Latent, Sink, Standard
from attnlab.models import FFN, Experts
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.experts import FIRST_DENSE, SPARSE_STEPS, ExpertFields, expert_modules
from attnlab.pretrained.families import llama
from attnlab.pretrained.families.llama import FLAT, GATED_NAMES, LLAMA, RATES, decoder_table
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rotary import FULL, SLIDING, LayerTypes, RotaryField, Window, every
from attnlab.pretrained.tasks import QUESTIONS, SCORES

WIDTH = Attribute("intermediate_size", 11008)
BALANCE = {"balance": Attribute("router_aux_loss_coef", 0.001)}
GATED_EXPERTS = expert_modules(
    "mlp.gate", {n: f"mlp.experts.{{}}.{name}" for n, name in GATED_NAMES.items()}, llama.GATED_FFN
)
"""Names of Qwen and DeepSeek."""
QWEN_FFN = (
    *GATED_EXPERTS,
    *linears("mlp.shared_expert.", "ffn.shared", **GATED_NAMES),
    Module("mlp.shared_expert_gate", "ffn.shared_gate"),
)


def routing(num_experts: str) -> dict[str, Attribute]:
    """How many experts there are, by this attribute, and how many each token has."""
    options = {"num_experts": Attribute(num_experts, kind=int, is_depth=True)}
    return options | {"top_k": Attribute("num_experts_per_tok", kind=int)}


MIXTRAL = LLAMA.variant(
    "mixtral",
    f.CausalHead("Mixtral"),
    RotaryField(default_base=1e6),
    ExpertFields(routing("num_local_experts") | BALANCE, WIDTH, windows=Window()),
    f.Words(only={"router_jitter_noise": 0.0}),
    without="attention_bias mlp_bias",
    table=decoder_table(
        ffn=expert_modules(
            "block_sparse_moe.gate",
            {
                ours: f"block_sparse_moe.experts.{{}}.{name}"
                for ours, name in {"gate": "w1", "up": "w3", "down": "w2"}.items()
            },
        )
    ),
    tasks=QUESTIONS,
)


def _qwen_types(attributes: JSON) -> list[str]:
    """Every second layer, from the first on, up to max_window_layers."""
    slides, first = attributes["use_sliding_window"], attributes["max_window_layers"]
    count = attributes["num_hidden_layers"]
    return [SLIDING if slides and i % 2 == 0 and i < first else FULL for i in range(count)]


NORMALIZE = {"normalize": Attribute("norm_topk_prob", False)}
SHARED = {"shared_width": Attribute("shared_expert_intermediate_size", 5632)}
QWEN2_MOE = LLAMA.variant(
    "qwen2_moe",
    f.CausalHead("Qwen2Moe"),
    f.biases("qkv_bias", f.BIASES[:3]),
    ExpertFields(
        routing("num_experts") | NORMALIZE | SHARED | BALANCE,
        Attribute("moe_intermediate_size", 1408),
        constant={"shared_gate": True},
        dense=SPARSE_STEPS,
        windows=LayerTypes(
            default_types=_qwen_types, more=(llama.MAX_WINDOW_LAYERS,), switch="use_sliding_window"
        ),
    ),
    without="mlp_bias attention_bias",
    table=decoder_table(ffn=QWEN_FFN),
    tasks=QUESTIONS,
)
QWEN3_MOE = LLAMA.variant(
    "qwen3_moe",
    f.CausalHead("Qwen3Moe"),
    llama.NORMED,
    ExpertFields(
        routing("num_experts") | NORMALIZE | BALANCE,
        Attribute("moe_intermediate_size", 768),
        other_name="num_local_experts",
        dense=SPARSE_STEPS,
        windows=Window(switch="use_sliding_window"),
    ),
    f.Words(ignored="max_window_layers"),
    without="mlp_bias",
    table=decoder_table(ffn=QWEN_FFN),
    heads=llama.RMS_HEADS,
)
GATE_UP = "mlp.experts.gate_up_proj"
GPT_OSS = LLAMA.variant(
    "gpt_oss",
    f.CausalHead("GptOss"),
    ExpertFields(
        routing("num_local_experts") | BALANCE,
        WIDTH,
        constant={"router_bias": True},
        windows=LayerTypes(
            default_window=128,
            default_types=every(2),
            rope=RotaryField(required=("rope_type", "rope_theta")),
        ),
        clip=Attribute("swiglu_limit", 7.0),
    ),
    f.Words(
        used=(Attribute("hidden_act", "silu"),),  # whatever it says, it is this one
        ignored="experts_per_token initial_context_length",
        only={"swiglu_alpha": 1.702},
        written={"hidden_act": "silu"},
    ),
    without="mlp_bias",
    table=decoder_table(
        attention=(*llama.HEADS, Module("self_attn.sinks", "attention.sink", "plain")),
        ffn=(
            Module("mlp.router", "ffn.router"),
            # All experts of a layer in one tensor, columns of gate and up in turn.
            Module(GATE_UP, ("ffn.gate", "ffn.up"), "plain", in_turn=True),
            Module(f"{GATE_UP}_bias", ("ffn.gate_bias", "ffn.up_bias"), "plain", in_turn=True),
            Module("mlp.experts.down_proj", "ffn.down", "plain"),
            Module("mlp.experts.down_proj_bias", "ffn.down_bias", "plain"),
        ),
    ),
    heads=Standard(num_heads=4, extras=(Sink(),)),
    ffn=FFN(activation="gated_quick_gelu"),
    tasks=SCORES,
)
OLMOE = LLAMA.variant(
    "olmoe",
    f.CausalHead("Olmoe"),
    llama.NORMED,
    ExpertFields(routing("num_experts") | NORMALIZE | BALANCE, WIDTH),
    f.Words(only={"clip_qkv": None}),
    without="mlp_bias head_dim",
    table=decoder_table(FLAT, GATED_EXPERTS),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all")),
    tasks=(),
)


class _Experts(ExpertFields):
    """n_shared_experts are one that is as wide as all together."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (*super().attributes, Attribute("n_shared_experts", 1, least=0))

    def experts(self, attributes: JSON) -> Experts:
        width = attributes["n_shared_experts"] * attributes["moe_intermediate_size"]
        return dataclasses.replace(super().experts(attributes), shared_width=width)

    def write_experts(self, ffn: FFN) -> JSON:
        count = ffn.experts.shared_width // ffn.width if ffn.experts else 0
        return super().write_experts(ffn) | {"n_shared_experts": count}


EXPERTS = _Experts(
    {
        **routing("n_routed_experts"),
        "num_groups": Attribute("n_group", 8),
        "top_groups": Attribute("topk_group", 4),
        "normalize": Attribute("norm_topk_prob", True),
        "scale": Attribute("routed_scaling_factor", 2.5),
        "balance": Attribute("aux_loss_alpha", 0.001),
    },
    Attribute("moe_intermediate_size", 2048),
    constant={"scores": "sigmoid", "balance_bias": True},
    dense=FIRST_DENSE,
)
SHARED_FFN = (
    *GATED_EXPERTS,
    *linears("mlp.shared_experts.", "ffn.shared", **GATED_NAMES),
    Module("mlp.gate.e_score_correction_bias", "ffn.balance_bias", "plain"),
)
IN_PAIRS = Module("", "", pairs=("q_rotary", "k_rotary"), pairs_if="rope_interleave")
QUERIES = IN_PAIRS._replace(weights=("attention.q", "attention.q_rotary"), by_head=True)
KEYS = IN_PAIRS._replace(weights=("attention.kv_down", "attention.k_rotary"))
DEEPSEEK_V3 = LLAMA.variant(
    "deepseek_v3",
    f.CausalHead("DeepseekV3"),
    f.value("kv_lora_rank", int, "heads.latent_dim"),
    f.value("q_lora_rank", int, "heads.query_latent_dim", nullable=True),
    f.value("qk_rope_head_dim", int, "heads.rotary_dim"),
    f.value("qk_nope_head_dim", int, "heads.head_dim"),
    f.value("v_head_dim", int, "heads.value_dim"),
    EXPERTS,
    RotaryField(of_part=True),
    f.Words(
        used=(Attribute("rope_interleave", True),),
        follows={
            "num_key_value_heads": ("num_attention_heads", int),
            "qk_head_dim": ("qk_nope_head_dim qk_rope_head_dim", operator.add),
            "head_dim": ("qk_rope_head_dim", int),
        },
        # They say how it was trained, or what stands behind the last norm.
        ignored="seq_aux ep_size num_nextn_predict_layers num_mtp_layers",
        only={"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"moe_layer_freq": 1},
        # As in all that are published.
        written={"rope_interleave": True, "num_nextn_predict_layers": 0},
    ),
    without="mlp_bias",
    table=decoder_table(
        attention=(
            QUERIES._replace(name="self_attn.q_proj", only_without="q_down"),
            QUERIES._replace(name="self_attn.q_b_proj", only_with="q_down"),
            *linears("self_attn.", "attention", q_down="q_a_proj", o="o_proj"),
            Module("self_attn.q_a_layernorm", "attention.q_down_norm", "table"),
            KEYS._replace(name="self_attn.kv_a_proj_with_mqa"),
            Module("self_attn.kv_a_layernorm", "attention.kv_down_norm", "table"),
            Module("self_attn.kv_b_proj", ("attention.k", "attention.v"), by_head=True),
        ),
        ffn=SHARED_FFN,
        # The module behind the last layer that predicts one more token.
        unread=(*RATES, "layers.61.*"),
    ),
    # The epsilon of its norms is 1e-6, whatever rms_norm_eps says.
    heads=Latent(num_heads=4, norm_eps=1e-6),
    tasks=SCORES,
)
GLM4_MOE = LLAMA.variant(
    "glm4_moe",
    f.CausalHead("Glm4Moe"),
    llama.NORMED,
    f.biases("attention_bias", f.BIASES[:3]),
    f.Choice("use_qk_norm", "heads.qk_norm", {True: HeadNorm("rms"), False: None}),
    dataclasses.replace(
        EXPERTS, options={n: one for n, one in EXPERTS.options.items() if n != "balance"}
    ),
    RotaryField(fraction="partial_rotary_factor", default_fraction=0.5),
    f.Words(ignored="num_nextn_predict_layers num_mtp_layers"),
    without="mlp_bias",
    # The modules behind the last layer that predict more tokens.
    table=decoder_table(ffn=SHARED_FFN, unread=(*RATES, "layers.46.*", "layers.92.*")),
    tasks=(),
)
