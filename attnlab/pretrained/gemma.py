"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786), in the names of Hugging Face: its text model."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Tensors
from attnlab.pretrained.layer_types import (
    FULL,
    SLIDING,
    by_pattern,
    of_type,
    read_types,
    write_types,
)
from attnlab.pretrained.llama import (
    decoder_fields,
    decoder_rows,
    decoder_settings,
    family,
    plain_heads,
    without,
)
from attnlab.pretrained.rope import read_rope, write_rope
from attnlab.pretrained.rows import Row
from attnlab.pretrained.settings import Null, OrNull, shown

SETTINGS = {
    **without("hidden_act", "mlp_bias"),
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": OrNull(4096),
    "layer_types": Null(list),
    "sliding_window_pattern": 6,
    "_sliding_window_pattern": None,
    "rope_local_base_freq": None,
}
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""Type of a layer -> what configs before transformers 5 call its base, and what it is unsaid."""
SAME = {"rope_type": "default"}


def _rope(s: dict[str, Any], kind: str) -> dict[str, Any]:
    today, (name, base) = s["rope_parameters"] or {}, BASES[kind]
    if set(today) - set(BASES) or not all(isinstance(one, dict | None) for one in today.values()):
        raise ValueError(
            f"config.json: rope_parameters = {shown(today)} should be an object with {FULL!r} and "
            f"{SLIDING!r}"
        )
    said = today.get(kind) or SAME
    scaling = s["rope_scaling"] if kind == FULL else None
    unsaid = s[name] is None and "rope_theta" not in said
    own = dict(rope_parameters=said, rope_scaling=scaling, rope_theta=base if unsaid else s[name])
    return read_rope(s | own)


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    types = s["layer_types"]
    if types is None:
        types = by_pattern(s["num_hidden_layers"], s["sliding_window_pattern"])
    window = s["sliding_window"]
    # They count the token itself.
    own = {
        FULL: _rope(s, FULL) | dict(window=None),
        SLIDING: _rope(s, SLIDING) | dict(window=window and window - 1),
    }
    return (
        decoder_fields(s | dict(mlp_bias=False), architecture, "hidden_activation")
        | read_types(s, types, own)
        | dict(
            num_kv_heads=s["num_key_value_heads"],
            head_dim=s["head_dim"],
            attention_scale=s["query_pre_attn_scalar"] ** -0.5,
            embedding_scale=s["hidden_size"] ** 0.5,
            norm="sandwich",
            norm_kind="rms_plus_one",
            qk_norm="rms_plus_one",
            head_norm_eps=s["rms_norm_eps"],
        )
    )


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings, one = decoder_settings(c), of_type(c, FULL)
    settings["hidden_activation"] = settings.pop("hidden_act")
    del settings["mlp_bias"]
    ropes = {kind: write_rope(of_type(c, kind)) for kind in BASES}
    today = {kind: rope["rope_parameters"] for kind, rope in ropes.items()}
    settings |= dict(
        num_key_value_heads=one.heads.sizes["K"],
        head_dim=one.heads.sizes["H"],
        query_pre_attn_scalar=round(one.heads.score_scale**-2),
        rope_parameters=today,
        rope_theta=ropes[FULL]["rope_theta"],
        rope_scaling=ropes[FULL]["rope_scaling"],
        rope_local_base_freq=ropes[SLIDING]["rope_theta"],
    )
    name = "Gemma3TextModel" if c.readout == "none" else "Gemma3ForCausalLM"
    return settings | write_types(c), name


NORMS = {
    ("attention", "norm"): "input_layernorm",
    ("attention", "norm_after"): "post_attention_layernorm",
    ("ffn", "norm"): "pre_feedforward_layernorm",
    ("ffn", "norm_after"): "post_feedforward_layernorm",
}


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    return decoder_rows(c, plain_heads(c), NORMS)


GEMMA3 = family(
    "gemma3_text",
    SETTINGS,
    _fields,
    _describe,
    _rows,
    fixed={
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)
