"""DeepSeek-V3 (DeepSeek-AI 2024) with dense layers alone, in the names of Hugging Face."""

from attnlab.heads import Latent
from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.fields import Field, Source, Values, changed, config_value, sizes, value
from attnlab.pretrained.llama import FIELDS, decoder
from attnlab.pretrained.name_table import Module, linears

EXPERTS = """
moe_intermediate_size n_shared_experts n_routed_experts output_router_logits n_group topk_group
routed_scaling_factor num_experts_per_tok norm_topk_prob moe_layer_freq scoring_func topk_method
aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
""".split()  # noqa: SIM905
"""What no dense layer reads, nor the last norm."""


class _Dense(Field):
    """Attributes that follow from others, and those that only layers with experts read."""

    attributes = (
        *map(Attribute, EXPERTS),
        Attribute("first_k_dense_replace", 3, least=0),
        Attribute("rope_interleave", True),
        Attribute("num_key_value_heads", 128, nullable=True),
        Attribute("qk_head_dim", None, nullable=True, json_type=int),
        Attribute("head_dim", None, nullable=True, json_type=int),
    )

    def read(self, given: JSON, source: Source) -> Values:
        if given["first_k_dense_replace"] < given["num_hidden_layers"]:
            raise ValueError(
                f"config.json: first_k_dense_replace = {given['first_k_dense_replace']} of "
                f"{given['num_hidden_layers']} layers: the others have experts, which are not "
                "supported"
            )
        derived = {
            "num_key_value_heads": given["num_attention_heads"],
            "qk_head_dim": given["qk_nope_head_dim"] + given["qk_rope_head_dim"],
            "head_dim": given["qk_rope_head_dim"],
        }
        for name, one in derived.items():
            if given[name] not in (None, one):
                raise ValueError(
                    f"config.json: {name} = {given[name]!r} is not supported, only {one}"
                )
        return {}

    def write(self, config: ModelConfig) -> JSON:
        rotary = config_value(config, "heads.rotary_dim")
        return {
            "first_k_dense_replace": config.num_layers,
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,  # as all that are published
            "num_key_value_heads": config.heads.num_heads,
            "qk_head_dim": config_value(config, "heads.head_dim") + rotary,
            "head_dim": rotary,
        }


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
        _Dense(),
        without=("mlp_bias", "attention_bias"),
    ),
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
