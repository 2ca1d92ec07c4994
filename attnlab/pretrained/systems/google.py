"""BERT and ALBERT in the names of their authors' repositories (google-research), whose gelu is the
tanh kind.
"""

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.albert import ALBERT
from attnlab.pretrained.attributes import read_attributes
from attnlab.pretrained.bert import BASE, BERT, QKV
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import Source, Values, build_config, changed
from attnlab.pretrained.name_table import Layers, Module, NameTable, Suffixes, linears
from attnlab.pretrained.systems.arrays import Built
from attnlab.pretrained.tensors import Arrays
from attnlab.pretrained.weights import Entry
from attnlab.sharing.plan import GROUP_RULES, Plan


def _classifier(config: ModelConfig) -> list[Entry]:
    if not config.output.num_classes:
        return []
    at = "cls/seq_relationship/output_"
    return [
        Entry(f"{at}weights", (("classifier",),), ..., "linear"),
        Entry(f"{at}bias", (("classifier_bias",),), ..., "vector"),
    ]


def _table(layers: Layers) -> NameTable:
    at = "bert/embeddings/"
    return NameTable(
        modules=(
            Module(f"{at}word_embeddings", "embedding", "table"),
            Module(f"{at}position_embeddings", "positions", "table"),
            Module(f"{at}token_type_embeddings", "token_types", "table"),
            Module(f"{at}LayerNorm", "embedding_norm", "norm"),
            Module("bert/encoder/embedding_hidden_mapping_in", "embedding_projection"),
            Module("bert/pooler/dense", "pooler"),
            Module("cls/predictions/transform/dense", "transform"),
            Module("cls/predictions/transform/LayerNorm", "transform_norm", "norm"),
            Module("cls/predictions/output_bias", "lm_head_bias", "vector"),
        ),
        layers=(layers,),
        suffixes=Suffixes("/kernel", "/bias", "/gamma", "/beta", table="", linear="conv1d"),
        special=_classifier,
    )


BERT_LAYERS = Layers(
    "bert/encoder/layer_{}/",
    (
        *linears("attention/self/", "attention", **QKV),
        Module("attention/output/dense", "attention.o"),
        Module("attention/output/LayerNorm", "attention.norm", "norm"),
        *linears("", "ffn", up="intermediate/dense", down="output/dense"),
        Module("output/LayerNorm", "ffn.norm", "norm"),
    ),
)
ALBERT_MODULES = (
    *linears("attention_1/self/", "attention", **QKV),
    Module("attention_1/output/dense", "attention.o"),
    Module("LayerNorm", "attention.norm", "norm"),
    *linears("ffn_1/", "ffn", up="intermediate/dense", down="intermediate/output/dense"),
    Module("LayerNorm_1", "ffn.norm", "norm"),
)


def _read(family: Family, config: JSON, tensors: Arrays, without: tuple[str, ...]) -> Values:
    """The values of a bert_config.json, with the output heads that the variables have."""
    attributes = read_attributes(config, family.attributes, family.other_attributes.fixed)
    values: Values = {}
    for field in changed(family.fields, without=("tie_word_embeddings", *without)):
        values |= field.read(attributes, Source())
    if values["ffn.activation"] == "gelu":
        values["ffn.activation"] = "gelu_tanh"
    has_head = "cls/predictions/output_bias" in tensors
    return values | {
        "output.kind": "tied" if has_head else "none",
        "output.bias": has_head,
        "output.transform": values["ffn.activation"] if has_head else None,
        "output.pooler": "first" if "bert/pooler/dense/kernel" in tensors else None,
        "output.num_classes": 2 if "cls/seq_relationship/output_weights" in tensors else 0,
    }


def build_bert(config: JSON, tensors: Arrays) -> Built:
    """`config` is a bert_config.json."""
    model = build_config(BASE, _read(BERT, config, tensors, ()))
    return model, _table(BERT_LAYERS).entries(model)


def build_albert(config: JSON, tensors: Arrays) -> Built:
    """`config` is an albert_config.json. Some groups may never be applied, and have no weights."""
    values = _read(ALBERT, config, tensors, ("num_hidden_groups", "embedding_size"))
    attributes = read_attributes(config, ALBERT.attributes, ALBERT.other_attributes.fixed)
    calls, inner = attributes["num_hidden_layers"], attributes["inner_group_num"]
    groups = [
        GROUP_RULES["google"](i, calls, attributes["num_hidden_groups"]) for i in range(calls)
    ]
    used = sorted(set(groups))
    layer_groups = tuple(used.index(g) * inner + k for g in groups for k in range(inner))
    width = attributes["embedding_size"]
    values |= {
        "num_layers": len(layer_groups),
        "sharing": Plan(attention=layer_groups, ffn=layer_groups),
        "embedding.width": None if width == attributes["hidden_size"] else width,
    }
    model = build_config(BASE, values)

    def places(config: ModelConfig, attributes: JSON) -> list[tuple[str, int]]:
        at = "bert/encoder/transformer/group_{}/inner_group_{}/"
        return [
            (at.format(used[group // inner], group % inner), layer_groups.index(group))
            for group in range(len(used) * inner)
        ]

    return model, _table(Layers("", ALBERT_MODULES, places=places)).entries(model)
