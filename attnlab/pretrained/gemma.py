"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786), in the names of Hugging Face: its text model."""

from typing import Any

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
    decoder_settings,
    family,
    without,
)
from attnlab.pretrained.rope import read_rope, write_rope
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import OrNull

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
    "layer_types": None,
    "sliding_window_pattern": 6,
    "_sliding_window_pattern": None,
    "rope_local_base_freq": None,
}
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
"""Type of a layer -> what configs before transformers 5 call its base, and what it is unsaid."""
SAME = {"rope_type": "default"}


def _rope(s: dict[str, Any], kind: str) -> dict[str, Any]:
    today, (name, base) = s["rope_parameters"] or {}, BASES[kind]
    if not isinstance(today, dict) or set(today) - set(BASES):
        raise ValueError(
            f"config.json: rope_parameters = {today!r} should be an object with {FULL!r} and "
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


def _describe(c: Any) -> tuple[dict[str, Any], str]:
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


def _rows(c: Any, s: dict[str, Any]) -> list[Row]:
    rows, count = same("embed_tokens.weight", "embedding"), dict.fromkeys(c.stacks, 0)
    for i, stack in enumerate(c.layer_names):
        one, plan = c.stacks[stack], c.stacks[stack].layer_plan
        at, slot = f"layers.{i}.", {part: plan[part][count[stack]] for part in plan}
        count[stack] += 1
        for n in "qkvo":
            own = dict(slot=slot["attention"], bias=n in one.heads.biases)
            rows += dense(f"{at}self_attn.{n}_proj", stack, "attention", n, **own)
        for n in ("q_norm", "k_norm"):
            name = f"{at}self_attn.{n}.weight"
            rows += same(name, stack, "attention", n, slot=slot["attention"])
        for n in ("gate", "up", "down"):
            rows += dense(f"{at}mlp.{n}_proj", stack, "ffn", n, slot=slot["ffn"], bias=c.ffn_bias)
        for (part, which), theirs in NORMS.items():
            rows += norm(at + theirs, stack, part, which, slot=slot[part], bias=False)
    rows += norm("norm", "final_norm", bias=False)
    return rows + (dense("lm_head", "readout", bias=False) if c.readout == "own" else [])


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
