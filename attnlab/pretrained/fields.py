"""How attributes of a config.json become fields of `ModelConfig`, and the way back.

A family lists such fields. Values go by their path in the config: "ffn.width", "heads.head_dim".
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attnlab.heads import Layout
from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value

T = TypeVar("T")

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
    def architectures(self) -> tuple[str, ...]:
        """What `architectures` may say, where the field decides about output heads."""
        return ()

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


def value(name: str, default: object, *paths: str, default_path: str = "", **options: Any) -> Value:
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
    default: str | bool
    path: str
    values: Mapping[Any, object]

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


def choose(name: str, value: object, known: Mapping[Any, T]) -> T:
    """`known[value]`, or a ValueError that lists the known values."""
    if value not in known:
        raise bad_value(name, value, f"is not supported; known: {', '.join(map(str, known))}")
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
