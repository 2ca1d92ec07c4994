"""BERT and ALBERT in the names of their authors' repositories (google-research), whose gelu is the
tanh kind.
"""

import dataclasses
from typing import cast

from attnlab.models import Dropout, OutputHead
from attnlab.models.config import ModelConfig
from attnlab.models.specs import PlainActivation
from attnlab.nested import JSON
from attnlab.pretrained.families.albert import ALBERT, GROUPS, AlbertGroups
from attnlab.pretrained.families.bert import BERT, EMBEDDING_SIZE, EMBEDDINGS, LAYERS, QKV
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import Field, Source, Values, Words
from attnlab.pretrained.name_table import Layers, Module, NameTable, Suffixes, linears
from attnlab.pretrained.systems.arrays import Built
from attnlab.pretrained.tensors import Arrays
from attnlab.sharing.plan import Plan, inner_groups, renumber


def _named(prefix: str, modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """Modules of Hugging Face's files, with the names of a graph."""
    return tuple(one._replace(name=prefix + one.name.replace(".", "/")) for one in modules)


def _table(layers: Layers) -> NameTable:
    return NameTable(
        modules=(
            *_named("bert/", EMBEDDINGS),
            Module("bert/encoder/embedding_hidden_mapping_in", "embedding_projection"),
            Module("bert/pooler/dense", "pooler"),
            Module("cls/predictions/transform/dense", "transform"),
            Module("cls/predictions/transform/LayerNorm", "transform_norm", "norm"),
            Module("cls/predictions/output_bias", "lm_head_bias", "vector"),
            Module("cls/seq_relationship/output_weights", "classifier", "swapped"),
            Module("cls/seq_relationship/output_bias", "classifier_bias", "vector"),
        ),
        layers=(layers,),
        suffixes=Suffixes("/kernel", "/bias", "/gamma", "/beta", table="", linear="conv1d"),
    )


BERT_LAYERS = Layers("bert/encoder/layer_{}/", _named("", LAYERS.modules))
ALBERT_MODULES = (
    *linears("attention_1/self/", "attention", **QKV),
    Module("attention_1/output/dense", "attention.o"),
    Module("LayerNorm", "attention.norm", "norm"),
    *linears("ffn_1/", "ffn", up="intermediate/dense", down="intermediate/output/dense"),
    Module("LayerNorm_1", "ffn.norm", "norm"),
)


WITHOUT_HEAD = Words(ignored="tie_word_embeddings")


class _Groups(Field):
    """The sharing plan, with the group rule of google-research."""

    attributes = AlbertGroups.attributes

    def read(self, attributes: JSON, source: Source) -> Values:
        groups = renumber(_stored_layers(attributes))
        return {"num_layers": len(groups), "sharing": Plan(attention=groups, ffn=groups)}


def _stored_layers(attributes: JSON) -> tuple[int, ...]:
    """For each layer the number of the stored one; those of some groups may never be applied."""
    calls, count, inner = (attributes[name] for name in GROUPS)
    return inner_groups(calls, count, inner, "google")


BERT_WORDS = BERT.variant("google_bert", WITHOUT_HEAD)
ALBERT_WORDS = ALBERT.variant(
    "google_albert",
    dict(embedding_size=128),
    WITHOUT_HEAD,
    _Groups(),
    EMBEDDING_SIZE,
    dropout=Dropout(),
)


def _build(family: Family, config: JSON, tensors: Arrays, layers: Layers) -> Built:
    """The model of a bert_config.json, with the output heads that the variables have."""
    attributes, model = family.read(config)
    activation = model.ffn.activation
    activation = "gelu_tanh" if activation == "gelu" else activation
    has_head = "cls/predictions/output_bias" in tensors
    output = OutputHead(
        kind="tied" if has_head else "none",
        bias=has_head,
        transform=cast(PlainActivation, activation) if has_head else None,
        pooler="first" if "bert/pooler/dense/kernel" in tensors else None,
        num_classes=2 if "cls/seq_relationship/output_weights" in tensors else 0,
    )
    ffn = dataclasses.replace(model.ffn, activation=activation)
    model = dataclasses.replace(model, ffn=ffn, output=output)
    return model, _table(layers).entries(model, attributes)


def build_bert(config: JSON, tensors: Arrays) -> Built:
    """`config` is a bert_config.json."""
    return _build(BERT_WORDS, config, tensors, BERT_LAYERS)


def build_albert(config: JSON, tensors: Arrays) -> Built:
    """`config` is an albert_config.json. Some groups may never be applied, and have no weights."""

    def places(config: ModelConfig, attributes: JSON) -> list[tuple[str, int]]:
        stored, inner = _stored_layers(attributes), attributes["inner_group_num"]
        at = "bert/encoder/transformer/group_{}/inner_group_{}/"
        return [(at.format(*divmod(i, inner)), stored.index(i)) for i in sorted(set(stored))]

    return _build(ALBERT_WORDS, config, tensors, Layers("", ALBERT_MODULES, places=places))
