"""Decoders with experts in the names of Hugging Face: Mixtral (Jiang et al. 2024, arXiv
2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388), gpt-oss (arXiv
2508.10925) and OLMoE (Muennighoff et al. 2024, arXiv 2409.02060).
"""

from attnlab.heads import HeadNorm, Sink, Standard
from attnlab.models import FFN
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.experts import SPARSE_STEPS, ExpertFields, expert_modules
from attnlab.pretrained.families import llama
from attnlab.pretrained.families.llama import FLAT, GATED_NAMES, LLAMA, decoder_table
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rotary import FULL, SLIDING, LayerTypes, RotaryField, Window, every
from attnlab.pretrained.tasks import QUESTIONS, SCORES

WIDTH = Attribute("intermediate_size", 11008)
BALANCE = {"balance": Attribute("router_aux_loss_coef", 0.001)}
UNUSED = "output_router_logits"
"""Says whether transformers adds the balance loss in training."""
GATED_EXPERTS = expert_modules(
    "mlp.gate", {n: f"mlp.experts.{{}}.{name}" for n, name in GATED_NAMES.items()}, llama.GATED_FFN
)
"""Names of Qwen and DeepSeek."""
QWEN_FFN = (
    *GATED_EXPERTS,
    *linears("mlp.shared_expert.", "ffn.shared", **GATED_NAMES),
    Module("mlp.shared_expert_gate", "ffn.shared_gate"),
)


def routing(num_experts: str, count: int, top_k: int) -> dict[str, Attribute]:
    """How many experts there are, by this attribute, and how many each token has."""
    options = {"num_experts": Attribute(num_experts, count)}
    return options | {"top_k": Attribute("num_experts_per_tok", top_k)}


MIXTRAL = LLAMA.variant(
    "mixtral",
    dict(intermediate_size=14336, max_position_embeddings=131072, rms_norm_eps=1e-5),
    dict(num_key_value_heads=8),
    f.CausalHead("Mixtral"),
    RotaryField(default_base=1e6),
    ExpertFields(routing("num_local_experts", 8, 2) | BALANCE, WIDTH, windows=Window(None)),
    f.Words(ignored=UNUSED, only={"router_jitter_noise": 0.0}),
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
    dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=24, intermediate_size=5632),
    dict(max_position_embeddings=32768, num_attention_heads=16, num_key_value_heads=16),
    f.CausalHead("Qwen2Moe"),
    f.biases("qkv_bias", True, f.BIASES[:3]),
    ExpertFields(
        routing("num_experts", 60, 4) | NORMALIZE | SHARED | BALANCE,
        Attribute("moe_intermediate_size", 1408),
        constant={"shared_gate": True},
        dense=SPARSE_STEPS,
        windows=LayerTypes(
            default_types=_qwen_types,
            more=(llama.MAX_WINDOW_LAYERS,),
            switch="use_sliding_window",
        ),
    ),
    f.Words(ignored=UNUSED),
    without="mlp_bias attention_bias",
    table=decoder_table(ffn=QWEN_FFN),
    tasks=QUESTIONS,
)
QWEN3_MOE = LLAMA.variant(
    "qwen3_moe",
    dict(vocab_size=151936, hidden_size=2048, num_hidden_layers=24, intermediate_size=6144),
    dict(max_position_embeddings=32768, num_attention_heads=32, num_key_value_heads=4),
    f.CausalHead("Qwen3Moe"),
    llama.NORMED,
    ExpertFields(
        routing("num_experts", 128, 8) | NORMALIZE | BALANCE,
        Attribute("moe_intermediate_size", 768),
        other_name="num_local_experts",
        dense=SPARSE_STEPS,
        windows=Window(switch="use_sliding_window"),
    ),
    f.Words(ignored=f"{UNUSED} max_window_layers"),
    without="mlp_bias",
    table=decoder_table(ffn=QWEN_FFN),
    heads=llama.RMS_HEADS,
)
GATE_UP = "mlp.experts.gate_up_proj"
GPT_OSS = LLAMA.variant(
    "gpt_oss",
    dict(vocab_size=201088, hidden_size=2880, num_hidden_layers=36, intermediate_size=2880),
    dict(num_attention_heads=64, max_position_embeddings=131072, rms_norm_eps=1e-5),
    dict(num_key_value_heads=8, head_dim=64, attention_bias=True),
    f.CausalHead("GptOss"),
    ExpertFields(
        routing("num_local_experts", 128, 4) | BALANCE,
        WIDTH,
        constant={"router_bias": True},
        one_by_one=False,
        windows=LayerTypes(
            default_window=128,
            default_types=every(2),
            rope=RotaryField(required=("rope_type", "rope_theta")),
        ),
        clip=Attribute("swiglu_limit", 7.0),
    ),
    f.Words(
        used=(Attribute("hidden_act", "silu"),),  # whatever it says, it is this one
        ignored=f"{UNUSED} experts_per_token initial_context_length",
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
    dict(vocab_size=50304, hidden_size=2048, num_hidden_layers=16, intermediate_size=2048),
    dict(num_attention_heads=16, max_position_embeddings=4096),
    f.CausalHead("Olmoe"),
    f.value("rms_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
    ExpertFields(
        routing("num_experts", 64, 8)
        | NORMALIZE
        | {"balance": Attribute("router_aux_loss_coef", 0.01)},
        WIDTH,
    ),
    f.Words(ignored=UNUSED, only={"clip_qkv": None}),
    without="mlp_bias head_dim",
    table=decoder_table(FLAT, GATED_EXPERTS),
    heads=Standard(num_heads=4, qk_norm=HeadNorm("rms", over="all")),
    tasks=(),
)
