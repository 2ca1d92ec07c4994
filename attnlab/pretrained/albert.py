"""ALBERT (Lan et al. 2019), in the names and with the group rule of Hugging Face."""

import dataclasses

from attnlab.models.config import ModelConfig
from attnlab.models.specs import Dropout
from attnlab.pretrained.attributes import JSON, MAX_LAYERS, Attribute
from attnlab.pretrained.bert import BASE, EMBEDDINGS, FIELDS, OLD_NORMS, QKV, masked_head
from attnlab.pretrained.family import Family, OtherAttributes, UnreadTensors
from attnlab.pretrained.fields import (
    ACTIVATIONS,
    Choice,
    Field,
    MaskedHead,
    Source,
    Values,
    changed,
    sizes,
    value,
)
from attnlab.pretrained.name_table import Layers, Module, NameTable, linears
from attnlab.sharing.plan import Plan, inner_groups

GROUPS = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


class _Groups(Field):
    """The sharing plan: each of `num_hidden_layers` calls applies the layers of one group."""

    attributes = (
        Attribute("num_hidden_layers", 12, is_depth=True),
        Attribute("num_hidden_groups", 1),
        Attribute("inner_group_num", 1),
    )

    def read(self, attributes: JSON, source: Source) -> Values:
        calls, groups, inner = (attributes[name] for name in GROUPS)
        if groups > calls:
            raise ValueError(
                f"config.json: num_hidden_groups = {groups} is more than num_hidden_layers = "
                f"{calls}: only {calls} groups are ever run; keep their tensors, renumbered, and "
                f"say {calls}"
            )
        if calls * inner > MAX_LAYERS:
            raise ValueError(
                f"config.json: num_hidden_layers = {calls} times inner_group_num = {inner} is more "
                f"than {MAX_LAYERS:,} layers"
            )
        layer_groups = inner_groups(calls, groups, inner)
        return {
            "num_layers": len(layer_groups),
            "sharing": Plan(attention=layer_groups, ffn=layer_groups),
        }

    def write(self, config: ModelConfig) -> JSON:
        """Where no groups make the plan, every layer is a group of its own."""
        plan = config.plan
        length, count = plan.num_layers, max(plan.num_groups.values())
        sizes = (length, length, 1)
        for inner in (n for n in range(1, count + 1) if length % n == count % n == 0):
            layer_groups = inner_groups(length // inner, count // inner, inner)
            if plan == Plan(attention=layer_groups, ffn=layer_groups):
                sizes = (length // inner, count // inner, inner)
                break
        return dict(zip(GROUPS, sizes, strict=True))


def _places(config: ModelConfig, attributes: JSON) -> list[tuple[str, int]]:
    """Each block of each group, and the first layer that applies it."""
    calls, groups, inner = (attributes[name] for name in GROUPS)
    stored = inner_groups(calls, groups, inner)
    at = "encoder.albert_layer_groups.{}.albert_layers.{}."
    return [(at.format(*divmod(i, inner)), stored.index(i)) for i in range(groups * inner)]


LAYERS = Layers(
    "",
    (
        *linears("attention.", "attention", **QKV, o="dense"),
        Module("attention.LayerNorm", "attention.norm", "norm"),
        *linears("", "ffn", up="ffn", down="ffn_output"),
        Module("full_layer_layer_norm", "ffn.norm", "norm"),
    ),
    places=_places,
)
HEAD = MaskedHead(
    "Albert", transform="predictions.dense", pooler="pooler", classifier="sop_classifier.classifier"
)
ALBERT = Family(
    name="albert",
    base=dataclasses.replace(
        BASE,
        # transformers has no dropout behind the FFN.
        dropout=Dropout(places=("embeddings", "attention")),
    ),
    fields=changed(
        FIELDS,
        *sizes(vocab_size=30000, hidden_size=4096, num_attention_heads=64, intermediate_size=16384),
        value("embedding_size", 128, "embedding.width"),
        _Groups(),
        Choice("hidden_act", "gelu_new", "ffn.activation", ACTIVATIONS),
        value("hidden_dropout_prob", 0.0, "dropout.rate"),
        value("attention_probs_dropout_prob", 0.0, "dropout.attention"),
        HEAD,
    ),
    table=NameTable(
        modules=(
            *EMBEDDINGS,
            Module("encoder.embedding_hidden_mapping_in", "embedding_projection"),
            Module("pooler", "pooler"),
            Module("sop_classifier.classifier", "classifier"),
            *masked_head(
                "predictions.dense", "predictions.LayerNorm", "predictions", "predictions.decoder"
            ),
        ),
        layers=(LAYERS,),
    ),
    prefix="albert.",
    task_modules=("predictions.", "sop_classifier."),
    shares_layers=True,
    renamed=OLD_NORMS,
    other_attributes=OtherAttributes(
        fixed={"embedding_hidden_mapping_in": None, "net_structure_type": 0, "gap_size": 0}
        | {"num_memory_blocks": 0, "down_scale_factor": 1}
    ),
    unread=UnreadTensors(
        always=("embeddings.position_ids",),
        if_tied=("predictions.decoder.*",),
        copies={"predictions.bias": "predictions.decoder.bias"},
    ),
)
