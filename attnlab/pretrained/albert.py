"""ALBERT (Lan et al. 2019), in the names and with the group rule of Hugging Face."""

from typing import Any

from attnlab.model.config import ModelConfig
from attnlab.pretrained.bert import SETTINGS as OF_BERT
from attnlab.pretrained.bert import (
    block_rows,
    embedding_rows,
    encoder_fields,
    encoder_settings,
    readout_fields,
    readout_rows,
)
from attnlab.pretrained.families import Family, Tensors
from attnlab.pretrained.rows import Row, dense
from attnlab.pretrained.settings import MAX_LAYERS, activation
from attnlab.sharing.plan import Plan, inner_groups

SETTINGS = OF_BERT | {
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NAMES = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "o": "attention.dense",
    "attention": "attention.LayerNorm",
    "up": "ffn",
    "down": "ffn_output",
    "ffn": "full_layer_layer_norm",
}
ARCHITECTURES = {  # what each needs: (masked-LM readout, pooler, classes)
    "AlbertModel": (False, True, False),
    "AlbertForMaskedLM": (True, False, False),
    "AlbertForPreTraining": (True, True, True),
}


def _fields(s: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    calls, groups = s["num_hidden_layers"], s["num_hidden_groups"]
    if groups > calls:
        raise ValueError(
            f"config.json: num_hidden_groups = {groups} is more than num_hidden_layers = {calls}: "
            f"only {calls} groups are ever run; keep their tensors, renumbered, and say {calls}"
        )
    inner = s["inner_group_num"]
    if calls * inner > MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers = {calls} times inner_group_num = {inner} is more "
            f"than {MAX_LAYERS:,} layers"
        )
    slots = inner_groups(calls, groups, inner)
    needs = ARCHITECTURES.get(architecture, (False,) * 3)
    mlm = needs[0] or "predictions.dense.weight" in tensors
    pooler = "pooler.weight" in tensors or needs[2]
    classes = 2 if needs[2] or "sop_classifier.classifier.weight" in tensors else 0
    readout = activation(s, "hidden_act") if mlm else None
    return (
        encoder_fields(s)
        | readout_fields(s["tie_word_embeddings"], readout, pooler, classes)
        | dict(
            num_layers=len(slots),
            plan=Plan(attention=slots, ffn=slots),
            embedding_width=s["embedding_size"],
            # transformers has no dropout behind the feed-forward part.
            dropout_places=("embeddings", "attention"),
        )
    )


def _groups(plan: Plan) -> tuple[int, int, int]:
    """(calls, groups, inner) of a plan; where no groups make it, every layer is a group."""
    length, count = plan.num_layers, max(plan.num_groups.values())
    for inner in (n for n in range(1, count + 1) if length % n == count % n == 0):
        slots = inner_groups(length // inner, count // inner, inner)
        if plan == Plan(attention=slots, ffn=slots):
            return length // inner, count // inner, inner
    return length, length, 1


def _describe(c: ModelConfig) -> tuple[dict[str, Any], str]:
    calls, groups, inner = _groups(c.layer_plan)
    settings = encoder_settings(c) | dict(
        embedding_size=c.embedding_width,
        num_hidden_layers=calls,
        num_hidden_groups=groups,
        inner_group_num=inner,
    )
    if c.readout == "none":
        return settings, "AlbertModel"
    return settings, "AlbertForPreTraining" if c.pooled_classes else "AlbertForMaskedLM"


def _rows(c: ModelConfig, s: dict[str, Any]) -> list[Row]:
    rows = embedding_rows(c.token_types)
    rows += dense("encoder.embedding_hidden_mapping_in", "embedding_map")
    calls, groups, inner = (
        s[name] for name in ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
    )
    stored = inner_groups(calls, groups, inner)
    for slot in range(groups * inner):
        first = stored.index(slot)  # an application that uses this block tells its parts
        at = f"encoder.albert_layer_groups.{slot // inner}.albert_layers.{slot % inner}."
        rows += block_rows(c, NAMES, at, first)
    return rows + readout_rows(
        c,
        pooler="pooler",
        classes="sop_classifier.classifier",
        transform=("predictions.dense", "predictions.LayerNorm"),
        readout=("predictions.bias", "predictions.decoder"),
    )


ALBERT = Family(
    name="albert",
    settings=SETTINGS,
    fields=_fields,
    describe=_describe,
    rows=_rows,
    prefix="albert.",
    readouts=("predictions.", "sop_classifier."),
    ignored=("embeddings.position_ids",),
    ignored_for=lambda c: ("predictions.decoder.*",) if c.readout == "tied" else (),
    unused=lambda c: {"predictions.bias": "predictions.decoder.bias"} if c.readout == "own" else {},
    fixed={"embedding_hidden_mapping_in": None, "net_structure_type": 0, "gap_size": 0}
    | {"num_memory_blocks": 0, "down_scale_factor": 1},
    renamed=((".gamma", ".weight"), (".beta", ".bias")),
)
