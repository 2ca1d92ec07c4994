"""What a family of published models says about itself, as data."""

import dataclasses
from collections.abc import Mapping

from attnlab.models.config import ModelConfig
from attnlab.pretrained.attributes import JSON, Attribute
from attnlab.pretrained.fields import Field, Source, Values, build_config
from attnlab.pretrained.name_table import NameTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
      name: the `model_type`.
      base: what no attribute sets.
      fields: how attributes and config become each other.
      other_attributes: those that set no field of the config.
      written: constant attributes that are written.
      table: the names of the weights.
      prefix: of the names of the bare model in the files of its task models.
      task_modules: how names begin that belong to a task and never have the prefix.
      ignored: patterns of tensors that hold no weight, or one that is stored elsewhere too.
      ignored_if_tied: more such patterns where the LM head is tied.
      shares_layers: fewer tensors than layers are stored.
      unused: tensors that transformers stores and never reads where the LM head is not tied: name
        -> the one it copies.
      fixed: attributes that may only have this value.
      renamed: (ending of an older checkpoint, ending of today).
    """

    name: str
    base: ModelConfig
    fields: tuple[Field, ...]
    table: NameTable
    other_attributes: tuple[Attribute, ...] = ()
    written: Mapping[str, object] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    task_modules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    ignored_if_tied: tuple[str, ...] = ()
    shares_layers: bool = False
    unused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All attributes that are read."""
        return (*(one for field in self.fields for one in field.attributes), *self.other_attributes)

    def config(self, given: JSON, source: Source) -> ModelConfig:
        """Attributes -> config. Raises ValueError for what is not supported, or no model."""
        values: Values = {}
        for field in self.fields:
            values |= field.read(given, source)
        try:
            return build_config(self.base, values)
        except ValueError as error:
            raise ValueError(f"config.json describes no model of attnlab: {error}") from None

    def describe(self, config: ModelConfig) -> JSON:
        """Config -> attributes and architectures, as far as the format can express it."""
        given: JSON = {}
        for field in self.fields:
            given |= field.write(config)
        for one in self.other_attributes:
            if one.compute is not None:
                given[one.name] = one.compute(given)
        return given | dict(self.written)

    def ignores(self, config: ModelConfig) -> tuple[str, ...]:
        """Patterns of tensors that are not read for this model."""
        tied = self.ignored_if_tied if config.output.kind == "tied" else ()
        return (*self.ignored, *tied, *self.unused_in(config))

    def unused_in(self, config: ModelConfig) -> Mapping[str, str]:
        """`unused` of this model."""
        return self.unused if config.output.kind == "own" else {}
