"""ALBERT (Lan et al. 2019), in the names and with the group rule of Hugging Face."""

from attnlab.models import Dropout
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained import fields as f
from attnlab.pretrained import tasks as t
from attnlab.pretrained.attributes import MAX_LAYERS, Attribute, bad_value
from attnlab.pretrained.families.bert import EMBEDDINGS, PER_TOKEN, QKV, MaskedHead, like_bert
from attnlab.pretrained.name_table import Layers, Module, linears
from attnlab.sharing.plan import Plan, inner_groups

GROUPS = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


class AlbertGroups(f.Field):
    """The sharing plan: each of `num_hidden_layers` calls applies the layers of one group."""

    attributes = (
        Attribute("num_hidden_layers", 12, is_depth=True),
        Attribute("num_hidden_groups", 1),
        Attribute("inner_group_num", 1),
    )

    def read(self, attributes: JSON, source: f.Source) -> f.Values:
        calls, groups, inner = (attributes[name] for name in GROUPS)
        if groups > calls:
            why = f"is more than num_hidden_layers = {calls}; keep the tensors of the groups that"
            why += " are run, renumbered"
            raise bad_value("num_hidden_groups", groups, why)
        if calls * inner > MAX_LAYERS:
            why = f"times inner_group_num = {inner} is more than {MAX_LAYERS:,} layers"
            raise bad_value("num_hidden_layers", calls, why)
        layer_groups = inner_groups(calls, groups, inner)
        plan = Plan(attention=layer_groups, ffn=layer_groups)
        return {"num_layers": len(layer_groups), "sharing": plan}

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


ALBERT = like_bert(
    "albert",
    MaskedHead(
        stem="Albert",
        transform="predictions.dense",
        norm="predictions.LayerNorm",
        lm_head="predictions.decoder",
        lm_head_bias="predictions",
        pooler="pooler",
        classifier="sop_classifier.classifier",
    ),
    f.value("embedding_size", int, "embedding.width"),
    AlbertGroups(),
    f.Words(
        only={"embedding_hidden_mapping_in": None, "net_structure_type": 0, "gap_size": 0}
        | {"num_memory_blocks": 0, "down_scale_factor": 1}
    ),
    modules=(*EMBEDDINGS, Module("encoder.embedding_hidden_mapping_in", "embedding_projection")),
    layers=Layers(
        "",
        (
            *linears("attention.", "attention", **QKV, o="dense"),
            Module("attention.LayerNorm", "attention.norm", "norm"),
            *linears("", "ffn", up="ffn", down="ffn_output"),
            Module("full_layer_layer_norm", "ffn.norm", "norm"),
        ),
        places=_places,
    ),
    # transformers has no dropout behind the FFN.
    dropout=Dropout(places=("embeddings", "attention")),
    tasks=(t.pooled("pooler", "classifier"), *PER_TOKEN),
)
