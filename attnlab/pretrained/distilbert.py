"""DistilBERT (Sanh et al. 2019), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.bert import embedding_rows, layer_rows, readout_fields, readout_rows
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row
from attnlab.pretrained.settings import activation, their_activation

SETTINGS = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    # The table of sinusoids is stored as a weight: nothing differs but how it was made.
    "sinusoidal_pos_embds": False,
    "n_layers": 6,
    "n_heads": 12,
    "dim": 768,
    "hidden_dim": 3072,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation": "gelu",
    "tie_word_embeddings": True,
}
NAMES = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "attention": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "ffn": "output_layer_norm",
}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    mlm = architecture == "DistilBertForMaskedLM" or "vocab_transform.weight" in tensors
    readout = activation(s, "activation") if mlm else None
    return readout_fields(s["tie_word_embeddings"], readout, False, 0) | dict(
        kind="encoder",
        vocab_size=s["vocab_size"],
        max_len=s["max_position_embeddings"],
        width=s["dim"],
        num_layers=s["n_layers"],
        num_heads=s["n_heads"],
        ffn_width=s["hidden_dim"],
        norm="post",
        norm_eps=1e-12,  # no attribute says it
        activation=activation(s, "activation"),
        embedding_norm=True,
        dropout_rate=s["dropout"],
        attention_dropout_rate=s["attention_dropout"],
        dropout_places=("embeddings", "ffn"),
        init_std=0.02,
    )


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = dict(
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_len,
        sinusoidal_pos_embds=False,
        n_layers=c.num_layers,
        n_heads=c.num_heads,
        dim=c.width,
        hidden_dim=c.ffn_width,
        dropout=c.dropout_rate,
        attention_dropout=c.attention_dropout_rate,
        activation=their_activation(c.activation),
        tie_word_embeddings=c.readout != "own",
    )
    return settings, "DistilBertModel" if c.readout == "none" else "DistilBertForMaskedLM"


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows = embedding_rows(0) + layer_rows(c, NAMES, "transformer.layer.{}.")
    return rows + readout_rows(
        c,
        transform=("vocab_transform", "vocab_layer_norm"),
        readout=("vocab_projector.bias", "vocab_projector"),
    )


DISTILBERT = Family(
    name="distilbert",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="distilbert.",
    readouts=("vocab_",),
    ignored=("embeddings.position_ids",),
    ignored_for=lambda c: ("vocab_projector.weight",) if c.readout == "tied" else (),
    fixed={"tie_weights_": True},
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
