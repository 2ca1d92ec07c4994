"""DeepSeek-V3 (DeepSeek-AI 2024) with dense layers alone, in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.llama import (
    decoder_fields,
    decoder_rows,
    decoder_settings,
    family,
    named,
    without,
)
from attnlab.pretrained.rope import read_rope, write_rope
from attnlab.pretrained.rows import Row, dense, same
from attnlab.pretrained.settings import Null, OrNull

EXPERTS = """
moe_intermediate_size n_shared_experts n_routed_experts output_router_logits n_group topk_group
routed_scaling_factor num_experts_per_tok norm_topk_prob moe_layer_freq scoring_func topk_method
aux_loss_alpha seq_aux ep_size num_nextn_predict_layers
""".split()  # noqa: SIM905
"""What no dense layer reads, nor the last norm."""
SETTINGS = {
    **without("mlp_bias", "attention_bias", "head_dim"),
    **dict.fromkeys(EXPERTS),
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": OrNull(128),
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": OrNull(1536),
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "qk_head_dim": Null(int),
    "head_dim": Null(int),
    "first_k_dense_replace": 3,
    "rope_interleave": True,
}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    if s["first_k_dense_replace"] < s["num_hidden_layers"]:
        raise ValueError(
            f"config.json: first_k_dense_replace = {s['first_k_dense_replace']} of "
            f"{s['num_hidden_layers']} layers: the others have experts, which are not supported"
        )
    turned = s["qk_rope_head_dim"]
    derived = {
        "num_key_value_heads": s["num_attention_heads"],
        "qk_head_dim": s["qk_nope_head_dim"] + turned,
        "head_dim": turned,
    }
    for name, value in derived.items():
        if s[name] not in (None, value):
            raise ValueError(f"config.json: {name} = {s[name]!r} is not supported, only {value}")
    return decoder_fields(s | dict(mlp_bias=False, attention_bias=False), architecture) | dict(
        layout="latent",
        head_dim=s["qk_nope_head_dim"],
        value_dim=s["v_head_dim"],
        rotary_dim=turned,
        latent_dim=s["kv_lora_rank"],
        query_latent_dim=s["q_lora_rank"],
        head_norm_eps=1e-6,  # whatever rms_norm_eps says
        **read_rope(s),
    )


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings, sizes = decoder_settings(c) | write_rope(c), c.heads.sizes
    del settings["mlp_bias"]
    return settings | dict(
        num_key_value_heads=c.num_heads,
        head_dim=sizes["P"],
        qk_head_dim=sizes["H"] + sizes["P"],
        first_k_dense_replace=c.num_layers,
        num_nextn_predict_layers=0,
        kv_lora_rank=sizes["M"],
        q_lora_rank=c.query_latent_dim,
        qk_rope_head_dim=sizes["P"],
        qk_nope_head_dim=sizes["H"],
        v_head_dim=sizes["V"],
        rope_interleave=True,  # as all that are published
    ), named(c, "DeepseekV3")


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    pairs = ("q_turned", "k_turned") if s["rope_interleave"] else ()

    def heads(at: str, stack: str, slot: int) -> list[Row]:
        where = (stack, "attention")
        plain: dict[str, Any] = dict(slot=slot, bias=False)
        queries: dict[str, Any] = dict(pack=("q", "q_turned"), by_head=True, pairs=pairs, **plain)
        if c.query_latent_dim:
            rows = dense(f"{at}q_a_proj", *where, "q_down", **plain)
            rows += same(f"{at}q_a_layernorm.weight", *where, "q_down_norm", slot=slot)
            rows += dense(f"{at}q_b_proj", *where, **queries)
        else:
            rows = dense(f"{at}q_proj", *where, **queries)
        down: dict[str, Any] = dict(pack=("kv_down", "k_turned"), pairs=pairs, **plain)
        rows += dense(f"{at}kv_a_proj_with_mqa", *where, **down)
        rows += same(f"{at}kv_a_layernorm.weight", *where, "kv_down_norm", slot=slot)
        rows += dense(f"{at}kv_b_proj", *where, pack=("k", "v"), by_head=True, **plain)
        return rows + dense(f"{at}o_proj", *where, "o", **plain)

    return decoder_rows(c, heads)


DEEPSEEK_V3: Family = family(
    "deepseek_v3", SETTINGS, _fields, _describe, _rows, fixed={"attention_bias": False}
)
