"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437) and GLM-4.5 (2025, arXiv 2508.06471), in the
names of Hugging Face.
"""

import dataclasses
import operator

from attnlab.heads import HeadNorm, Latent
from attnlab.models import FFN, Experts
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.experts import FIRST_DENSE, ExpertFields
from attnlab.pretrained.families.llama import GATED_NAMES, LLAMA, RATES, decoder_table
from attnlab.pretrained.families.mixtures import GATED_EXPERTS, routing
from attnlab.pretrained.name_table import Module, linears
from attnlab.pretrained.rotary import RotaryField
from attnlab.pretrained.tasks import SCORES


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
        **routing("n_routed_experts", 256, 8),
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
    dict(vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61),
    dict(num_attention_heads=128, max_position_embeddings=4096),
    f.CausalHead("DeepseekV3"),
    f.value("kv_lora_rank", 512, "heads.latent_dim"),
    f.value("q_lora_rank", 1536, "heads.query_latent_dim", nullable=True),
    f.value("qk_rope_head_dim", 64, "heads.rotary_dim"),
    f.value("qk_nope_head_dim", 128, "heads.head_dim"),
    f.value("v_head_dim", 128, "heads.value_dim"),
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
        ignored="output_router_logits seq_aux ep_size num_nextn_predict_layers",
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
    dict(vocab_size=151552, intermediate_size=10944, num_hidden_layers=46, rms_norm_eps=1e-5),
    dict(num_attention_heads=96, max_position_embeddings=131072, num_key_value_heads=8),
    dict(num_experts_per_tok=8, n_routed_experts=128, n_group=1, topk_group=1),
    dict(routed_scaling_factor=1.0, moe_intermediate_size=1408, first_k_dense_replace=1),
    f.CausalHead("Glm4Moe"),
    f.value("rms_norm_eps", 1e-5, "norm.eps", "heads.norm_eps"),
    f.biases("attention_bias", False, f.BIASES[:3]),
    f.Choice("use_qk_norm", False, "heads.qk_norm", {True: HeadNorm("rms"), False: None}),
    dataclasses.replace(
        EXPERTS, options={n: one for n, one in EXPERTS.options.items() if n != "balance"}
    ),
    RotaryField(fraction="partial_rotary_factor", default_fraction=0.5),
    f.Words(ignored="output_router_logits num_nextn_predict_layers num_mtp_layers"),
    without="mlp_bias",
    # The modules behind the last layer that predict more tokens.
    table=decoder_table(ffn=SHARED_FFN, unread=(*RATES, "layers.46.*", "layers.92.*")),
    tasks=(),
)
