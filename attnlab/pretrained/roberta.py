"""RoBERTa (Liu et al. 2019), in the names of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.bert import (
    NAMES,
    embedding_rows,
    encoder_fields,
    encoder_settings,
    layer_rows,
    readout_fields,
    readout_rows,
)
from attnlab.pretrained.bert import SETTINGS as OF_BERT
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row

SETTINGS = OF_BERT | {"vocab_size": 50265, "pad_token_id": 1}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    mlm = architecture == "RobertaForMaskedLM" or "lm_head.dense.weight" in tensors
    # Its readout has the exact gelu whatever hidden_act says.
    readout = readout_fields(
        s["tie_word_embeddings"], "gelu" if mlm else None, "pooler.dense.weight" in tensors, 0
    )
    positions = dict(positions="learned_unpadded", pad_token=s["pad_token_id"])
    return encoder_fields(s) | readout | positions


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    settings = encoder_settings(c) | dict(pad_token_id=c.pad_token)
    return settings, "RobertaModel" if c.readout == "none" else "RobertaForMaskedLM"


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows = embedding_rows(c.token_types) + layer_rows(c, NAMES, "encoder.layer.{}.")
    return rows + readout_rows(
        c,
        pooler="pooler.dense",
        transform=("lm_head.dense", "lm_head.layer_norm"),
        readout=("lm_head.bias", "lm_head.decoder"),
    )


ROBERTA = Family(
    name="roberta",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="roberta.",
    readouts=("lm_head.",),
    ignored=("embeddings.position_ids",),
    ignored_for=lambda c: ("lm_head.decoder.*",) if c.readout == "tied" else (),
    unused=lambda c: {"lm_head.bias": "lm_head.decoder.bias"} if c.readout == "own" else {},
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
