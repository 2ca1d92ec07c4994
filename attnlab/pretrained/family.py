"""`Family`: how the config.json and tensors of published models become a model, as data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute
from attnlab.pretrained.fields import Field, Source, Values, build_config
from attnlab.pretrained.metadata import kept_words
from attnlab.pretrained.name_table import NameTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherAttributes:
    """Attributes of config.json that set no field of the config.

    Attributes:
      read: those that are read, to compute or check others.
      ignored: those that change nothing that a model computes.
      fixed: name -> the only value that is supported.
      written: name -> the value that is written.
    """

    read: tuple[Attribute, ...] = ()
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    written: Mapping[str, object] = dataclasses.field(default_factory=dict)


NO_OTHERS = OtherAttributes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnreadTensors:
    """Tensors of a file that are not read.

    Attributes:
      always: patterns of tensors that hold no weight.
      repeated: tensor that may be stored again -> the one that is read, whose numbers it must have.
      if_tied: more of these where the LM head is tied.
      copies: tensors that transformers stores and never reads where the LM head is not tied: name
        -> the one it copies.
    """

    always: tuple[str, ...] = ()
    repeated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    if_tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
      name: the `model_type`.
      base: what no attribute sets.
      fields: how attributes and config become each other.
      table: the names of the weights.
      other_attributes: those that set no field of the config.
      prefix: of the names of the bare model in the files of its task models.
      task_modules: how names begin that belong to a task and never have the prefix.
      unread: tensors that are not read.
      renamed: (ending of an older checkpoint, ending of today).
    """

    name: str
    base: ModelConfig
    fields: tuple[Field, ...]
    table: NameTable
    other_attributes: OtherAttributes = NO_OTHERS
    prefix: str = ""
    task_modules: tuple[str, ...] = ()
    unread: UnreadTensors = UnreadTensors()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def shares_layers(self) -> bool:
        """Whether fewer layers are stored than are applied."""
        return any(layers.places is not None for layers in self.table.layers)

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All attributes that are read."""
        of_fields = (one for field in self.fields for one in field.attributes)
        others = self.other_attributes
        return (*of_fields, *others.read, *map(Attribute, others.ignored))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those whose output heads are read."""
        of_fields = tuple(name for field in self.fields for name in field.architectures)
        written: Any = self.other_attributes.written.get("architectures", ())
        return of_fields or tuple(written)

    def config(self, attributes: JSON, source: Source) -> ModelConfig:
        """Attributes -> config. Raises ValueError if they are not supported or do not fit."""
        values: Values = {}
        for field in self.fields:
            values |= field.read(attributes, source)
        try:
            return build_config(self.base, values)
        except ValueError as error:
            raise ValueError(f"config.json does not fit a model of attnlab: {error}") from None

    def describe(self, config: ModelConfig) -> JSON:
        """Config -> attributes and architectures, as far as the format can express it."""
        attributes: JSON = {}
        for field in self.fields:
            attributes |= field.write(config)
        for one in self.other_attributes.read:
            if one.compute is not None:
                attributes[one.name] = one.compute(attributes)
        attributes |= self.other_attributes.written
        own = {one.name for field in self.fields for one in field.attributes}
        kept = {n: a for n, a in kept_words(config, self.name).items() if n not in own}
        return attributes | kept if config.metadata else kept | attributes

    def ignores(self, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of tensors that are not read for this model."""
        return (*self.unread.always, *self.repeated_in(config), *self.copies_in(config))

    def repeated_in(self, config: ModelConfig) -> Mapping[str, str]:
        """Tensor that is not read for this model -> the one whose numbers it must have."""
        tied = self.unread.if_tied if config.output.kind == "tied" else {}
        return {**self.unread.repeated, **tied}

    def copies_in(self, config: ModelConfig) -> Mapping[str, str]:
        """Tensor of this model that is never read -> the one it copies."""
        return self.unread.copies if config.output.kind == "own" else {}
