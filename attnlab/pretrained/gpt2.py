"""GPT-2 (Radford et al. 2019), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import Null, activation, their_activation

SETTINGS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": Null(int),
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    own = not s["tie_word_embeddings"] and architecture != "GPT2Model"
    return dict(
        kind="decoder",
        vocab_size=s["vocab_size"],
        max_len=s["n_positions"],
        width=s["n_embd"],
        num_layers=s["n_layer"],
        num_heads=s["n_head"],
        ffn_width=s["n_inner"] or 4 * s["n_embd"],
        attention_scale=None if s["scale_attn_weights"] else 1.0,
        layer_scales=_by_layer(s["n_layer"]) if s["scale_attn_by_inverse_layer_idx"] else None,
        norm_eps=s["layer_norm_epsilon"],
        activation=activation(s, "activation_function"),
        # The bare model has the same weights: its readout is there, tied, for who asks.
        readout="own" if own else "tied",
        dropout_rate=s["resid_pdrop"],
        embedding_dropout_rate=s["embd_pdrop"],
        attention_dropout_rate=s["attn_pdrop"],
        init_std=0.02,
        init_residual="depth",
    )


def _by_layer(num_layers: int) -> tuple[float, ...]:
    return tuple(1 / (i + 1) for i in range(num_layers))


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = dict(
        vocab_size=c.vocab_size,
        n_positions=c.max_len,
        n_embd=c.width,
        n_layer=c.num_layers,
        n_head=c.num_heads,
        n_inner=c.ffn_width,
        activation_function=their_activation(c.activation),
        resid_pdrop=c.dropout_rate,
        embd_pdrop=c.dropout_rate if c.embedding_dropout_rate is None else c.embedding_dropout_rate,
        attn_pdrop=c.attention_dropout_rate,
        layer_norm_epsilon=c.norm_eps,
        scale_attn_weights=c.attention_scale is None,
        scale_attn_by_inverse_layer_idx=c.layer_scales is not None,
        tie_word_embeddings=c.readout == "tied",
    )
    return settings, "GPT2LMHeadModel"


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows = same("wte.weight", "embedding") + same("wpe.weight", "positions")
    groups = {part: c.layer_plan.indices(part) for part in c.layer_plan}
    for i in range(c.num_layers):
        at, a, f = f"h.{i}.", groups["attention"][i], groups["ffn"][i]
        attention, ffn = ("layers", "attention"), ("layers", "ffn")
        qkv: dict[str, Any] = dict(slot=a, kind="conv1d", pack=("q", "k", "v"))
        rows += dense(f"{at}attn.c_attn", *attention, **qkv)
        rows += dense(f"{at}attn.c_proj", *attention, "o", slot=a, kind="conv1d")
        rows += norm(f"{at}ln_1", *attention, "norm", slot=a)
        rows += dense(f"{at}mlp.c_fc", *ffn, "up", slot=f, kind="conv1d")
        rows += dense(f"{at}mlp.c_proj", *ffn, "down", slot=f, kind="conv1d")
        rows += norm(f"{at}ln_2", *ffn, "norm", slot=f)
    rows += norm("ln_f", "final_norm")
    return rows + (dense("lm_head", "readout", bias=False) if c.readout == "own" else [])


GPT2 = Family(
    name="gpt2",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="transformer.",
    readouts=("lm_head.",),
    # The causal mask, stored as if it were a bias.
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ignored_for=lambda c: ("lm_head.weight",) if c.readout == "tied" else (),
)
