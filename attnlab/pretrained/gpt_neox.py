"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.llama import named
from attnlab.pretrained.rope import ROPE, read_rope, write_rope
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import activation, size_fields, size_settings, their_activation

SETTINGS = ROPE | {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": None,
    "rotary_emb_base": None,
}
PARTS: dict[str, Any] = {"base": "rotary_emb_base", "fraction": "rotary_pct", "part": 0.25}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    bare = architecture == "GPTNeoXModel" and not s["tie_word_embeddings"]
    return read_rope(s, **PARTS) | dict(
        kind="decoder",
        **size_fields(s),
        attention_biases="qkvo" if s["attention_bias"] else "",
        norm="parallel" if s["use_parallel_residual"] else "pre",
        norm_eps=s["layer_norm_eps"],
        activation=activation(s, "hidden_act"),
        readout="none" if bare else "tied" if s["tie_word_embeddings"] else "own",
        dropout_rate=s["hidden_dropout"],
        attention_dropout_rate=s["attention_dropout"],
        init_std=0.02,
    )


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = dict(
        **size_settings(c),
        attention_bias=bool(c.attention_biases),
        use_parallel_residual=c.norm == "parallel",
        layer_norm_eps=c.norm_eps,
        hidden_act=their_activation(c.activation),
        tie_word_embeddings=c.readout == "tied",
        hidden_dropout=c.dropout_rate,
        attention_dropout=c.attention_dropout_rate,
    )
    return settings | write_rope(c, **PARTS), named(c, "GPTNeoX")


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows, bias = same("embed_in.weight", "embedding"), bool(c.attention_biases)
    attention, ffn = ("layers", "attention"), ("layers", "ffn")
    groups = {part: c.layer_plan.indices(part) for part in c.layer_plan}
    for i in range(c.num_layers):
        at, a, f = f"layers.{i}.", groups["attention"][i], groups["ffn"][i]
        qkv: dict[str, Any] = dict(slot=a, bias=bias, pack=("q", "k", "v"), by_head=True)
        rows += dense(f"{at}attention.query_key_value", *attention, **qkv)
        rows += dense(f"{at}attention.dense", *attention, "o", slot=a, bias=bias)
        rows += norm(f"{at}input_layernorm", *attention, "norm", slot=a)
        rows += dense(f"{at}mlp.dense_h_to_4h", *ffn, "up", slot=f)
        rows += dense(f"{at}mlp.dense_4h_to_h", *ffn, "down", slot=f)
        rows += norm(f"{at}post_attention_layernorm", *ffn, "norm", slot=f)
    rows += norm("final_layer_norm", "final_norm")
    return rows + (dense("embed_out", "readout", bias=False) if c.readout == "own" else [])


GPT_NEOX = Family(
    name="gpt_neox",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="gpt_neox.",
    readouts=("embed_out.",),
    # The causal mask, stored as if it were a bias; rates of the rotary positions.
    ignored=(
        "layers.*.attention.bias",
        "layers.*.attention.masked_bias",
        "layers.*.attention.rotary_emb.inv_freq",
    ),
    ignored_for=lambda c: ("embed_out.weight",) if c.readout == "tied" else (),
    renamed=(("lm_head.weight", "embed_out.weight"),),
)
