"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Ministral, Qwen2 (Qwen Team 2024) and
Qwen3 (2025), in the names of Hugging Face: one family with other settings.
"""

from collections.abc import Callable
from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.layer_types import FULL, SLIDING, of_type, read_types, write_types
from attnlab.pretrained.rope import ROPE, read_rope, write_rope
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import (
    Null,
    OrNull,
    activation,
    shown,
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
    "num_key_value_heads": Null(int),
    "head_dim": Null(int),
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
NORMS = {("attention", "norm"): "input_layernorm", ("ffn", "norm"): "post_attention_layernorm"}
Heads = Callable[[str, str, int], list[Row]]
"""(name in front, name of the stack, slot) -> the name table of one attention."""


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


def decoder_settings(c: ModelConfig) -> dict[str, Any]:
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


def decoder_rows(
    c: ModelConfig, heads: Heads, norms: dict[tuple[str, str], str] = NORMS
) -> list[Row]:
    """The name table, of layers of several kinds too; `norms` are theirs of (part, ours)."""
    rows, count = same("embed_tokens.weight", "embedding"), dict.fromkeys(c.stacks, 0)
    groups = {
        name: {part: stack.layer_plan.indices(part) for part in stack.layer_plan}
        for name, stack in c.stacks.items()
    }
    for i, stack in enumerate(c.layer_names):
        at = f"layers.{i}."
        slots = {part: each[count[stack]] for part, each in groups[stack].items()}
        count[stack] += 1
        rows += heads(f"{at}self_attn.", stack, slots["attention"])
        for n in ("gate", "up", "down"):
            rows += dense(f"{at}mlp.{n}_proj", stack, "ffn", n, slot=slots["ffn"], bias=c.ffn_bias)
        for (part, ours), theirs in norms.items():
            rows += norm(at + theirs, stack, part, ours, slot=slots[part], bias=False)
    rows += norm("norm", "final_norm", bias=False)
    return rows + (dense("lm_head", "readout", bias=False) if c.readout == "own" else [])


def plain_heads(c: ModelConfig) -> Heads:
    """Of maps named as in Llama, with norms of queries and keys where there are such."""

    def heads(at: str, stack: str, slot: int) -> list[Row]:
        rows: list[Row] = []
        for n in "qkvo":
            bias = n in c.stacks[stack].heads.biases
            rows += dense(f"{at}{n}_proj", stack, "attention", n, slot=slot, bias=bias)
        for n in ("q_norm", "k_norm") if c.qk_norm else ():
            rows += same(f"{at}{n}.weight", stack, "attention", n, slot=slot)
        return rows

    return heads


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    return decoder_rows(c, plain_heads(c))


def _heads(s: dict[str, Any]) -> dict[str, Any]:
    return dict(num_kv_heads=s["num_key_value_heads"], head_dim=s["head_dim"]) | read_rope(s)


def _head_settings(c: ModelConfig) -> dict[str, Any]:
    one = of_type(c, FULL)  # the others have the same
    sizes = one.heads.sizes
    return dict(num_key_value_heads=sizes["K"], head_dim=sizes["H"]) | write_rope(one)


def _llama(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    return decoder_fields(s, architecture) | _heads(s)


def named(c: ModelConfig, name: str) -> str:
    """The architecture of a family's `name` that has what `c` has."""
    return f"{name}Model" if c.readout == "none" else f"{name}ForCausalLM"


def _describe_llama(c: ModelConfig) -> tuple[dict[str, Any], str]:
    return decoder_settings(c) | _head_settings(c), named(c, "Llama")


def _mistral(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    plain = s | dict(attention_bias=False, mlp_bias=False)
    window = s["sliding_window"]
    # They count the token itself.
    return _llama(plain, tensors, architecture) | dict(window=window and window - 1)


def _describe_mistral(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = decoder_settings(c) | _head_settings(c)
    del settings["attention_bias"], settings["mlp_bias"]
    window = None if c.window is None else c.window + 1
    return settings | dict(sliding_window=window), named(c, "Mistral")


def _windows(s: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """The fields of layers of these types; they count the token itself."""
    window = s["sliding_window"]
    return read_types(
        s, types, {FULL: dict(window=None), SLIDING: dict(window=window and window - 1)}
    )


def _ministral(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    types = s["layer_types"]
    if types is None:
        types = [FULL if s["sliding_window"] is None else SLIDING] * s["num_hidden_layers"]
    return _mistral(s, tensors, architecture) | _windows(s, types)


def _describe_ministral(c: ModelConfig) -> tuple[dict[str, Any], str]:
    return _describe_mistral(c)[0] | write_types(c), named(c, "Ministral")


def _qwen_windows(s: dict[str, Any]) -> dict[str, Any]:
    slides = s["use_sliding_window"] and s["sliding_window"] is not None
    count, types = s["num_hidden_layers"], s["layer_types"]
    if types is None:
        first = s["max_window_layers"] if slides else count
        types = [FULL if i < first else SLIDING for i in range(count)]
    if isinstance(types, list) and SLIDING in types and not s["use_sliding_window"]:
        raise ValueError(
            f"config.json: layer_types = {shown(types)} need use_sliding_window = true"
        )
    return _windows(s, types)


def _write_qwen_windows(c: ModelConfig) -> dict[str, Any]:
    told = write_types(c)
    types = told["layer_types"]
    return told | dict(
        use_sliding_window=SLIDING in types,
        max_window_layers=types.index(SLIDING) if SLIDING in types else c.num_layers,
    )


def _qwen2(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    width = s["head_dim"] or s["hidden_size"] // s["num_attention_heads"]
    plain = s | dict(attention_bias=False, mlp_bias=False, head_dim=width)
    fields = _llama(plain, tensors, architecture) | dict(attention_biases="qkv")
    return fields | _qwen_windows(s)


def _describe_qwen2(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = decoder_settings(c) | _head_settings(c) | _write_qwen_windows(c)
    del settings["mlp_bias"], settings["attention_bias"]
    return settings, named(c, "Qwen2")


def _qwen3(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    norms = dict(qk_norm="rms", head_norm_eps=s["rms_norm_eps"])
    return _llama(s | dict(mlp_bias=False), tensors, architecture) | norms | _qwen_windows(s)


def _describe_qwen3(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = decoder_settings(c) | _head_settings(c) | _write_qwen_windows(c)
    del settings["mlp_bias"]
    return settings, named(c, "Qwen3")


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
OF_MISTRAL = without("attention_bias", "mlp_bias") | {
    "intermediate_size": 14336,
    "num_key_value_heads": OrNull(8),
    "max_position_embeddings": 131072,
    "sliding_window": OrNull(4096),
}
MISTRAL = family("mistral", OF_MISTRAL, _mistral, _describe_mistral, _rows)
MINISTRAL = family(
    "ministral", OF_MISTRAL | {"layer_types": Null(list)}, _ministral, _describe_ministral, _rows
)
OF_QWEN = without("attention_bias", "mlp_bias") | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": OrNull(32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": OrNull(4096),
    "max_window_layers": 28,
    "layer_types": Null(list),
}
QWEN2 = family("qwen2", OF_QWEN, _qwen2, _describe_qwen2, _rows)
QWEN3 = family(
    "qwen3",
    OF_QWEN | {"attention_bias": False, "head_dim": 128},
    _qwen3,
    _describe_qwen3,
    _rows,
)
