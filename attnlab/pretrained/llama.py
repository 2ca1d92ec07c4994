"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023) and Qwen3 (Qwen Team 2025), in the names
of Hugging Face: one family with other settings.
"""

from typing import Any

from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.layer_types import FULL, SLIDING
from attnlab.pretrained.rope import ROPE, read_rope, write_rope
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import (
    OrNull,
    activation,
    size_fields,
    size_settings,
    their_activation,
)

SETTINGS = ROPE | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
NORMS = {"attention": "input_layernorm", "ffn": "post_attention_layernorm"}


def decoder_fields(s: dict[str, Any], architecture: str, act: str = "hidden_act") -> dict[str, Any]:
    """What decoders of this kind have in common: all but the heads and their positions. `act` is
    what the family calls its activation.
    """
    bare = architecture.endswith("Model") and not s["tie_word_embeddings"]
    return dict(
        kind="decoder",
        **size_fields(s),
        ffn_bias=s["mlp_bias"],
        attention_biases="qkvo" if s["attention_bias"] else "",
        norm_kind="rms",
        norm_bias=False,
        norm_eps=s["rms_norm_eps"],
        activation=f"gated_{activation(s, act)}",
        readout="none" if bare else "tied" if s["tie_word_embeddings"] else "own",
        attention_dropout_rate=s["attention_dropout"],
        init_std=0.02,
    )


def decoder_settings(c: Any) -> dict[str, Any]:
    """The inverse of `decoder_fields`."""
    if not c.activation.startswith("gated_"):
        raise ValueError(f"the feed-forward part has a gate, not {c.activation!r}")
    return dict(
        **size_settings(c),
        mlp_bias=c.ffn_bias,
        attention_bias=bool(c.attention_biases),
        rms_norm_eps=c.norm_eps,
        hidden_act=their_activation(c.activation.removeprefix("gated_")),
        tie_word_embeddings=c.readout == "tied",
        attention_dropout=c.attention_dropout_rate,
    )


def decoder_rows(c: Any, heads: Any) -> list[Row]:
    """The name table; `heads` gives that of the attention of (name in front, slot)."""
    rows = same("embed_tokens.weight", "embedding")
    for i in range(c.num_layers):
        at, slots = f"layers.{i}.", {part: c.layer_plan[part][i] for part in NORMS}
        rows += heads(f"{at}self_attn.", slots["attention"])
        for n in ("gate", "up", "down"):
            where = dict(slot=slots["ffn"], bias=c.ffn_bias)
            rows += dense(f"{at}mlp.{n}_proj", "layers", "ffn", n, **where)
        for part, theirs in NORMS.items():
            rows += norm(at + theirs, "layers", part, "norm", slot=slots[part], bias=False)
    rows += norm("norm", "final_norm", bias=False)
    return rows + (dense("lm_head", "readout", bias=False) if c.readout == "own" else [])


def _heads(s: dict[str, Any]) -> dict[str, Any]:
    return dict(num_kv_heads=s["num_key_value_heads"], head_dim=s["head_dim"]) | read_rope(s)


def _head_settings(c: Any) -> dict[str, Any]:
    sizes = c.heads.sizes
    return dict(num_key_value_heads=sizes["K"], head_dim=sizes["H"]) | write_rope(c)


def _rows(c: Any, s: dict[str, Any]) -> list[Row]:
    def heads(at: str, slot: int) -> list[Row]:
        rows: list[Row] = []
        for n in "qkvo":
            bias = n in c.heads.biases
            rows += dense(f"{at}{n}_proj", "layers", "attention", n, slot=slot, bias=bias)
        for n in ("q_norm", "k_norm") if c.qk_norm else ():
            rows += same(f"{at}{n}.weight", "layers", "attention", n, slot=slot)
        return rows

    return decoder_rows(c, heads)


def _llama(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    return decoder_fields(s, architecture) | _heads(s)


def named(c: Any, name: str) -> str:
    """The architecture of a family's `name` that has what `c` has."""
    return f"{name}Model" if c.readout == "none" else f"{name}ForCausalLM"


def _describe_llama(c: Any) -> tuple[dict[str, Any], str]:
    return decoder_settings(c) | _head_settings(c), named(c, "Llama")


def _mistral(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    plain = s | dict(attention_bias=False, mlp_bias=False)
    window = s["sliding_window"]
    # They count the token itself.
    return _llama(plain, tensors, architecture) | dict(window=window and window - 1)


def _describe_mistral(c: Any) -> tuple[dict[str, Any], str]:
    settings = decoder_settings(c) | _head_settings(c)
    del settings["attention_bias"], settings["mlp_bias"]
    window = None if c.window is None else c.window + 1
    return settings | dict(sliding_window=window), named(c, "Mistral")


def _qwen3(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    window = s["sliding_window"] if s["use_sliding_window"] else None
    layers = range(s["num_hidden_layers"])
    slides = [window is not None and i >= s["max_window_layers"] for i in layers]
    types = [SLIDING if slide else FULL for slide in slides]
    types = types if s["layer_types"] is None else s["layer_types"]
    if types not in ([one] * len(layers) for one in (SLIDING, FULL)):
        raise ValueError(
            f"config.json: layer_types = {types!r} is not supported, only one type for all layers"
        )
    if SLIDING not in types:
        window = None
    elif window is None:
        raise ValueError("config.json: layer_types that slide need use_sliding_window = true")
    return _llama(s | dict(mlp_bias=False), tensors, architecture) | dict(
        qk_norm="rms", head_norm_eps=s["rms_norm_eps"], window=window and window - 1
    )


def _describe_qwen3(c: Any) -> tuple[dict[str, Any], str]:
    settings = decoder_settings(c) | _head_settings(c)
    del settings["mlp_bias"]
    slides = c.window is not None
    kind = SLIDING if slides else FULL
    return settings | dict(
        sliding_window=c.window + 1 if slides else None,
        use_sliding_window=slides,
        max_window_layers=0 if slides else c.num_layers,
        layer_types=[kind] * c.num_layers,
    ), named(c, "Qwen3")


def family(
    name: str, settings: dict[str, Any], fields: Any, describe: Any, rows: Any, **more: Any
) -> Family:
    """A family whose files name things as Llama's do."""
    return Family(
        name=name,
        settings=settings,
        fields=fields,
        describe=describe,
        rows=rows,
        prefix="model.",
        readouts=("lm_head.",),
        # Rates of the rotary positions, which follow from config.json.
        ignored=("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
        ignored_for=lambda c: ("lm_head.weight",) if c.readout == "tied" else (),
        **more,
    )


def without(*names: str) -> dict[str, Any]:
    """The settings of Llama but these."""
    return {name: value for name, value in SETTINGS.items() if name not in names}


LLAMA = family("llama", SETTINGS, _llama, _describe_llama, _rows)
MISTRAL = family(
    "mistral",
    without("attention_bias", "mlp_bias")
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": OrNull(8),
        "max_position_embeddings": 131072,
        "sliding_window": OrNull(4096),
    },
    _mistral,
    _describe_mistral,
    _rows,
)
QWEN3 = family(
    "qwen3",
    without("mlp_bias")
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": OrNull(32),
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": OrNull(4096),
        "max_window_layers": 28,
        "layer_types": None,
    },
    _qwen3,
    _describe_qwen3,
    _rows,
)
