"""DeepSeek-V3 (DeepSeek-AI 2024) with dense layers alone, in the names of Hugging Face."""

from attnlab.heads import Latent
from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute, derived
from attnlab.pretrained.fields import Field, Source, Values, changed, sizes, value
from attnlab.pretrained.llama import FIELDS, decoder
from attnlab.pretrained.name_table import Module, linears

EXPERTS = """
moe_intermediate_size n_shared_experts n_routed_experts output_router_logits n_group topk_group
routed_scaling_factor num_experts_per_tok norm_topk_prob moe_layer_freq scoring_func topk_method
aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
""".split()  # noqa: SIM905
"""What no dense layer reads, nor the last norm."""


class _DenseLayers(Field):
    """All layers are dense: first_k_dense_replace is at least their number."""

    attributes = (Attribute("first_k_dense_replace", 3, least=0),)

    def read(self, given: JSON, source: Source) -> Values:
        count, layers = given["first_k_dense_replace"], given["num_hidden_layers"]
        if count < layers:
            raise ValueError(
                f"config.json: first_k_dense_replace = {count} of {layers} layers: the others have "
                "experts, which are not supported"
            )
        return {}

    def write(self, config: ModelConfig) -> JSON:
        return {"first_k_dense_replace": config.num_layers}


def _num_heads(given: JSON) -> int:
    return int(given["num_attention_heads"])


def _query_size(given: JSON) -> int:
    return int(given["qk_nope_head_dim"] + given["qk_rope_head_dim"])


def _rotary_size(given: JSON) -> int:
    return int(given["qk_rope_head_dim"])


NEIGHBOURS = ("q_rotary", "k_rotary")
QUERIES = Module(
    "", ("attention.q", "attention.q_rotary"), by_head=True, pairs=NEIGHBOURS,
    pairs_if="rope_interleave",
)  # fmt: skip
DEEPSEEK_V3 = decoder(
    "deepseek_v3",
    # The epsilon of its norms is 1e-6, whatever rms_norm_eps says.
    Latent(num_heads=4, norm_eps=1e-6),
    changed(
        FIELDS,
        *sizes(vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61),
        *sizes(num_attention_heads=128, max_position_embeddings=4096),
        value("kv_lora_rank", 512, "heads.latent_dim"),
        value("q_lora_rank", 1536, "heads.query_latent_dim", nullable=True),
        value("qk_rope_head_dim", 64, "heads.rotary_dim"),
        value("qk_nope_head_dim", 128, "heads.head_dim"),
        value("v_head_dim", 128, "heads.value_dim"),
        _DenseLayers(),
        without=("mlp_bias", "attention_bias", "num_key_value_heads", "head_dim"),
    ),
    other_attributes=(
        *map(Attribute, EXPERTS),
        Attribute("rope_interleave", True),
        derived("num_key_value_heads", _num_heads, "num_attention_heads"),
        derived("qk_head_dim", _query_size, "qk_nope_head_dim", "qk_rope_head_dim"),
        derived("head_dim", _rotary_size, "qk_rope_head_dim"),
    ),
    written={"rope_interleave": True, "num_nextn_predict_layers": 0},  # as all that are published
    architecture="DeepseekV3",
    modules=(
        QUERIES._replace(name="self_attn.q_proj", only_without="q_down"),
        QUERIES._replace(name="self_attn.q_b_proj", only_with="q_down"),
        *linears("self_attn.", "attention", q_down="q_a_proj", o="o_proj"),
        Module("self_attn.q_a_layernorm", "attention.q_down_norm", "table"),
        Module(
            "self_attn.kv_a_proj_with_mqa",
            ("attention.kv_down", "attention.k_rotary"),
            pairs=NEIGHBOURS,
            pairs_if="rope_interleave",
        ),
        Module("self_attn.kv_a_layernorm", "attention.kv_down_norm", "table"),
        Module("self_attn.kv_b_proj", ("attention.k", "attention.v"), by_head=True),
    ),
    fixed={"attention_bias": False},
)
