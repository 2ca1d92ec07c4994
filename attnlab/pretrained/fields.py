"""How attributes of a config.json become fields of `ModelConfig`, and the way back.

A family lists such fields. Values go by their path in the config: "ffn.width", "heads.head_dim".
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from attnlab.heads import Layout
from attnlab.heads.layout import Bias
from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute, shown

Tensors = Mapping[str, np.ndarray | None]
"""Name -> tensor of a file; None where only the name is known."""
Values = dict[str, Any]
"""Path in a `ModelConfig` -> value."""


class Source(NamedTuple):
    """Information, other than attributes, about the model in a folder."""

    architecture: str = ""
    """The first of `architectures` in config.json."""
    tensors: Tensors = types.MappingProxyType({})
    """The tensors of the folder, by the names of the family's table."""


class Field:
    """Attributes of config.json that set fields of a `ModelConfig` together."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """The attributes that it reads and writes."""
        raise NotImplementedError

    def read(self, attributes: JSON, source: Source) -> Values:
        """Attributes of the family -> values of the config.

        Raises:
          ValueError: names the attribute whose value is not supported.
        """
        raise NotImplementedError

    def write(self, config: ModelConfig) -> JSON:
        """The inverse. Raises ValueError where no attribute can express the config."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Value(Field):
    """An attribute that is a field of the config, or several equal ones.

    Attributes:
      attribute: of config.json.
      paths: of the fields; the first is written.
      default_path: the field that stands for the first where that is None.
    """

    attribute: Attribute
    paths: tuple[str, ...]
    default_path: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (self.attribute,)

    def read(self, attributes: JSON, source: Source) -> Values:
        return dict.fromkeys(self.paths, attributes[self.attribute.name])

    def write(self, config: ModelConfig) -> JSON:
        value = config_value(config, self.paths[0])
        if value is None and self.default_path:
            value = config_value(config, self.default_path)
        return {self.attribute.name: value}


def value(name: str, default: Any, *paths: str, default_path: str = "", **options: Any) -> Value:
    """A `Value`; `options` are those of `Attribute`.

    >>> value("n_embd", 768, "width").read({"n_embd": 12}, Source())
    {'width': 12}
    """
    return Value(Attribute(name, default, **options), paths, default_path)


@dataclasses.dataclass(frozen=True)
class Choice(Field):
    """An attribute whose values are mapped to values of a field of the config.

    Attributes:
      name, default: of the attribute.
      path: of the field.
      values: of the attribute -> of the field; the first that fits is written.
    """

    name: str
    default: Any
    path: str
    values: Mapping[Any, Any]

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute(self.name, self.default),)

    def read(self, attributes: JSON, source: Source) -> Values:
        return {self.path: choose(self.name, attributes[self.name], self.values)}

    def write(self, config: ModelConfig) -> JSON:
        ours = config_value(config, self.path)
        for theirs, one in self.values.items():
            if one == ours:
                return {self.name: theirs}
        known = ", ".join(repr(one) for one in self.values.values())
        raise ValueError(f"{self.path} must be one of {known}, not {ours!r}")


def choose(name: str, value: Any, known: Mapping[Any, Any]) -> Any:
    """`known[value]`, or a ValueError that lists the known values."""
    if value not in known:
        raise ValueError(
            f"config.json: {name} = {shown(value)} is not supported; known: "
            f"{', '.join(map(str, known))}"
        )
    return known[value]


def config_value(config: ModelConfig, path: str) -> Any:
    """The value of a field of a config; sizes of heads and their biases are resolved.

    >>> config_value(ModelConfig(), "heads.head_dim")
    16
    """
    part, _, name = path.partition(".")
    owner: object = getattr(config, part) if name else config
    if not hasattr(owner, name or part):
        raise ValueError(f"the model has no {path}")
    found = getattr(owner, name or part)
    if not isinstance(owner, Layout):
        return found
    if name == "biases":
        return tuple(bias for bias in owner.bias_names if bias in owner.biases)
    known = hasattr(type(owner), f"default_{name}") and name != "query_latent_dim"
    return owner.with_width(config.width).size(name) if found is None and known else found


def build_config(base: ModelConfig, values: Values) -> ModelConfig:
    """`base` with these values. Raises ValueError if they do not fit each other.

    >>> build_config(ModelConfig(), {"width": 8, "ffn.width": 3}).ffn.width
    3
    """
    whole = {path: new for path, new in values.items() if "." not in path}
    parts: dict[str, Values] = {}
    for path, new in values.items():
        part, _, name = path.partition(".")
        if name:
            parts.setdefault(part, {})[name] = new
    for part, own in parts.items():
        try:
            whole[part] = dataclasses.replace(whole.get(part, getattr(base, part)), **own)
        except TypeError as error:
            raise ValueError(f"{part}: {error}") from None
    return dataclasses.replace(base, **whole)


def changed(
    fields: tuple[Field, ...], *new: Field, without: tuple[str, ...] = ()
) -> tuple[Field, ...]:
    """`fields` with `new` in the place of those with one of its attributes, and none that has an
    attribute of `without`."""
    gone = {*without, *(a.name for field in new for a in field.attributes)}
    kept = [one for one in fields if not gone & {a.name for a in one.attributes}]
    return (*kept, *new)


# Fields of several families -----------------------------------------------------------------------

BIASES: tuple[Bias, ...] = ("q", "k", "v", "o")
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_len",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "heads.num_heads",
    "intermediate_size": "ffn.width",
}
"""Hugging Face's names of sizes, from BERT to Llama -> path."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
}
"""Hugging Face's names of activations -> ours."""
GATED = {theirs: f"gated_{ours}" for theirs, ours in ACTIVATIONS.items()}


def sizes(**defaults: int) -> tuple[Field, ...]:
    """The attributes of `SIZES` with these defaults.

    >>> sizes(hidden_size=768)[0].write(ModelConfig())
    {'hidden_size': 64}
    """
    depth = "num_hidden_layers"
    return tuple(value(n, d, SIZES[n], is_depth=n == depth) for n, d in defaults.items())


@dataclasses.dataclass(frozen=True)
class AllBiases(Field):
    """One attribute for the biases of all matrices."""

    name: str
    default: bool

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute(self.name, self.default),)

    def read(self, attributes: JSON, source: Source) -> Values:
        there = attributes[self.name]
        return {"heads.biases": BIASES if there else (), "ffn.bias": there}

    def write(self, config: ModelConfig) -> JSON:
        if set(config.heads.biases) != (set(BIASES) if config.ffn.bias else set()):
            raise ValueError(
                "heads.biases must be those of all matrices where ffn.bias is, or none"
            )
        return {self.name: config.ffn.bias}


@dataclasses.dataclass(frozen=True)
class CausalHead(Field):
    """The LM head of a decoder.

    Attributes:
      bare, causal: names of the architectures without and with an LM head.
      tied: the default of tie_word_embeddings.
      bare_kind: the LM head of the bare architecture where it is not tied.
      bias: the LM head has one.
    """

    bare: str
    causal: str
    tied: bool = False
    bare_kind: str = "none"
    bias: bool = False

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("tie_word_embeddings", self.tied),)

    def read(self, attributes: JSON, source: Source) -> Values:
        is_bare = source.architecture == self.bare
        own = self.bare_kind if is_bare else "own"
        # The bare architecture has a tied LM head too, but not its bias.
        tied = attributes["tie_word_embeddings"] and not (is_bare and self.bias)
        kind = "tied" if tied else own
        return {"output.kind": kind, "output.bias": self.bias and kind != "none"}

    def write(self, config: ModelConfig) -> JSON:
        kind = config.output.kind
        if kind != "none" and config.output.bias != self.bias:
            raise ValueError(f"output.bias must be {self.bias}")
        name = self.bare if kind == "none" else self.causal
        return {"tie_word_embeddings": kind == "tied", "architectures": [name]}


@dataclasses.dataclass(frozen=True)
class MaskedHead(Field):
    """The masked-LM head, pooler and classifier of an encoder: those that the architecture needs,
    or whose tensors are there.

    Attributes:
      name: architectures are NAMEModel, NAMEForMaskedLM and maybe NAMEForPreTraining.
      transform, pooler, classifier: names of modules whose tensors decide; "" : there is none.
      activation: attribute that names the activation of the transform, as that of the FFN; an
        `Attribute`: one that no other field has; "": it is the exact gelu.
      bias, transform_bias: attribute that says whether the LM head, and the transform, has a bias
        (with its default); None: it has one.
    """

    name: str
    transform: str
    pooler: str = ""
    classifier: str = ""
    activation: str | Attribute = "hidden_act"
    bias: Attribute | None = None
    transform_bias: Attribute | None = None

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        maybe = (self.activation, self.bias, self.transform_bias)
        own = (one for one in maybe if isinstance(one, Attribute))
        return (Attribute("tie_word_embeddings", True), *own)

    def read(self, attributes: JSON, source: Source) -> Values:
        has = {
            name: f"{name}.weight" in source.tensors
            for name in (self.transform, self.pooler, self.classifier)
        }
        both = bool(self.classifier) and source.architecture == f"{self.name}ForPreTraining"
        name = self.activation if isinstance(self.activation, str) else self.activation.name
        act = choose(name, attributes[name], ACTIVATIONS) if name else ""
        values: Values = {
            "output.pooler": "first" if both or has[self.pooler] else None,
            "output.num_classes": 2 if both or has[self.classifier] else 0,
            "output.kind": "none",
        }
        if both or source.architecture == f"{self.name}ForMaskedLM" or has[self.transform]:
            values["output.kind"] = "tied" if attributes["tie_word_embeddings"] else "own"
            values |= {
                "output.bias": self.bias is None or attributes[self.bias.name],
                "output.transform": act or "gelu",
                "output.transform_bias": self.transform_bias is None
                or attributes[self.transform_bias.name],
            }
        return values

    def write(self, config: ModelConfig) -> JSON:
        output = config.output
        task = "ForPreTraining" if output.num_classes and self.classifier else "ForMaskedLM"
        name = self.name + ("Model" if output.kind == "none" else task)
        attributes: JSON = {"tie_word_embeddings": output.kind != "own", "architectures": [name]}
        attributes |= {self.bias.name: output.bias} if self.bias else {}
        if self.transform_bias:
            attributes[self.transform_bias.name] = output.transform_bias
        if isinstance(self.activation, Attribute):
            field = Choice(self.activation.name, "", "output.transform", ACTIVATIONS)
            usual = {self.activation.name: self.activation.default}
            attributes |= field.write(config) if output.transform else usual
        return attributes


def classes_of(attributes: JSON) -> int:
    """The number of classes in id2label; 2 without it, as in transformers."""
    labels = attributes["id2label"]
    return 2 if labels is None else len(labels)


def labels_of(config: ModelConfig) -> JSON:
    """id2label and label2id, with the names that transformers gives classes without one."""
    labels = {str(i): f"LABEL_{i}" for i in range(config.output.num_classes)}
    return {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}


def _head_dim(attributes: JSON) -> int | None:
    width, heads = attributes["hidden_size"], attributes["num_attention_heads"]
    return None if width % heads else int(width // heads)


def hidden_size(attributes: JSON) -> int:
    """For `Attribute.compute`."""
    return int(attributes["hidden_size"])


def num_attention_heads(attributes: JSON) -> int:
    """For `Attribute.compute`."""
    return int(attributes["num_attention_heads"])


def grouped_heads(
    num_kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[Field, ...]:
    """num_key_value_heads and head_dim; null is a key head for each head, and the width per head.

    Args:
      num_kv_heads, head_dim: where config.json has none.
    """
    return (
        value(
            "num_key_value_heads",
            num_kv_heads,
            "heads.num_kv_heads",
            compute=num_attention_heads,
            json_type=int,
        ),
        value("head_dim", head_dim, "heads.head_dim", compute=_head_dim, json_type=int),
    )
