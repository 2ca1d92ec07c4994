"""BERT (Devlin et al. 2018), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row, dense, norm, same
from attnlab.pretrained.settings import activation, size_fields, size_settings, their_activation

SETTINGS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}


def encoder_fields(s: dict[str, Any]) -> dict[str, Any]:
    """What BERT, ALBERT and RoBERTa have in common."""
    return dict(
        kind="encoder",
        **size_fields(s),
        norm="post",
        norm_eps=s["layer_norm_eps"],
        activation=activation(s, "hidden_act"),
        token_types=s["type_vocab_size"],
        embedding_norm=True,
        dropout_rate=s["hidden_dropout_prob"],
        attention_dropout_rate=s["attention_probs_dropout_prob"],
        init_std=0.02,
    )


def readout_fields(tied: bool, readout: str | None, pooler: bool, classes: int) -> dict[str, Any]:
    """What reads the layers; `readout` is the activation of the masked-LM readout, or None."""
    found: dict[str, Any] = dict(pooled_classes=classes, readout="none")
    found["pooler"] = "first" if pooler else None
    if readout is None:
        return found
    kind = "tied" if tied else "own"
    return found | dict(readout=kind, readout_bias=True, readout_transform=readout)


def encoder_settings(c: ModelConfig) -> dict[str, Any]:
    """The inverse of `encoder_fields`."""
    return dict(
        **size_settings(c),
        hidden_act=their_activation(c.activation),
        hidden_dropout_prob=c.dropout_rate,
        attention_probs_dropout_prob=c.attention_dropout_rate,
        type_vocab_size=c.token_types,
        layer_norm_eps=c.norm_eps,
        tie_word_embeddings=c.readout != "own",
    )


def embedding_rows(token_types: int) -> list[Row]:
    """Tables and their norm."""
    at = "embeddings."
    rows = same(f"{at}word_embeddings.weight", "embedding")
    rows += same(f"{at}position_embeddings.weight", "positions")
    rows += same(f"{at}token_type_embeddings.weight", "token_types") if token_types else []
    return rows + norm(f"{at}LayerNorm", "embedding_norm")


def block_rows(config: ModelConfig, names: dict[str, str], at: str, layer: int) -> list[Row]:
    """One layer; `names` are theirs of q, k, v, o, up, down and the two norms, after `at`."""
    rows: list[Row] = []
    slots = {part: config.layer_plan.indices(part)[layer] for part in ("attention", "ffn")}
    for part, weights in (("attention", "qkvo"), ("ffn", ("up", "down"))):
        for ours in weights:
            bias = part == "ffn" or ours in config.heads.biases
            rows += dense(at + names[ours], "layers", part, ours, slot=slots[part], bias=bias)
    for part, slot in slots.items():
        rows += norm(at + names[part], "layers", part, "norm", slot=slot)
    return rows


def layer_rows(config: ModelConfig, names: dict[str, str], at: str) -> list[Row]:
    """All layers; the number of each goes into `at` (see `block_rows`)."""
    rows: list[Row] = []
    for i in range(config.num_layers):
        rows += block_rows(config, names, at.format(i), i)
    return rows


def readout_rows(
    config: ModelConfig,
    *,
    pooler: str = "",
    classes: str = "",
    transform: tuple[str, str],
    readout: tuple[str, str],
) -> list[Row]:
    """What reads the layers, under its names: the transform and its norm; the readout's bias
    where it is tied, and the readout where it is not. A family may have no pooler or classes.
    """
    rows = dense(pooler, "pooler") if pooler and config.pooler else []
    rows += dense(classes, "classes") if classes and config.pooled_classes else []
    if config.readout_transform:
        rows += dense(transform[0], "transform") + norm(transform[1], "transform_norm")
    if config.readout == "tied":
        rows += same(readout[0], "readout_bias")
    if config.readout == "own":
        rows += dense(readout[1], "readout")
    return rows


NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "ffn": "output.LayerNorm",
}
ARCHITECTURES = {  # what each needs: (masked-LM readout, pooler, classes)
    "BertModel": (False, True, False),
    "BertForMaskedLM": (True, False, False),
    "BertForPreTraining": (True, True, True),
}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    needs = ARCHITECTURES.get(architecture, (False,) * 3)
    # A bare model may come without its pooler.
    mlm = needs[0] or "cls.predictions.transform.dense.weight" in tensors
    pooler = "pooler.dense.weight" in tensors or needs[2]
    classes = 2 if needs[2] or "cls.seq_relationship.weight" in tensors else 0
    readout = activation(s, "hidden_act") if mlm else None
    return encoder_fields(s) | readout_fields(s["tie_word_embeddings"], readout, pooler, classes)


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    if c.readout == "none":
        return encoder_settings(c), "BertModel"
    return encoder_settings(c), "BertForPreTraining" if c.pooled_classes else "BertForMaskedLM"


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows = embedding_rows(c.token_types) + layer_rows(c, NAMES, "encoder.layer.{}.")
    return rows + readout_rows(
        c,
        pooler="pooler.dense",
        classes="cls.seq_relationship",
        transform=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        readout=("cls.predictions.bias", "cls.predictions.decoder"),
    )


BERT = Family(
    name="bert",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="bert.",
    readouts=("cls.",),
    ignored=("embeddings.position_ids",),
    # A tied decoder may be stored again; an own one has its own bias, and the other is unused.
    ignored_for=lambda c: ("cls.predictions.decoder.*",) if c.readout == "tied" else (),
    unused=lambda c: (
        {"cls.predictions.bias": "cls.predictions.decoder.bias"} if c.readout == "own" else {}
    ),
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
