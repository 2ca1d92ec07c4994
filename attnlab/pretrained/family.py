"""`Family`: how the config.json and tensors of published models become a model, as data."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from attnlab.models.config import ModelConfig
from attnlab.nested import JSON
from attnlab.pretrained.attributes import SAME, Attribute, default_values, read_attributes
from attnlab.pretrained.fields import NO_FOLDER, Field, Source, Values, Words, build_config
from attnlab.pretrained.metadata import kept_words, metadata_of
from attnlab.pretrained.name_table import NameTable
from attnlab.pretrained.tasks import Task, count_labels, write_labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
      name: the `model_type`.
      base: what no attribute sets.
      fields: how attributes and config become each other.
      table: the names of the weights.
      tasks: task models with a classifier; the `stem` of a field begins the names of their
        architectures.
      defaults: attribute -> its default, where it is not that of transformers.
    """

    name: str
    base: ModelConfig
    fields: tuple[Field, ...]
    table: NameTable
    tasks: tuple[Task, ...] = ()
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        known = default_values(self.name) | dict(self.defaults)
        object.__setattr__(self, "defaults", known)

    def variant(
        self,
        name: str,
        *changes: Field | Mapping[str, object],
        without: str = "",
        table: NameTable | None = None,
        tasks: tuple[Task, ...] | None = None,
        **base: Any,
    ) -> "Family":
        """A family that differs from this one in some points.

        Args:
          name: its `model_type`.
          *changes: fields in the place of those that read one of their attributes, or dicts of
            attribute -> default, where it is not that of transformers.
          without: attributes, with the fields that read one of them, that it does not have.
          table, tasks: as in `Family`; None: those of this one.
          **base: what no attribute sets, fields of `ModelConfig`.
        """
        new = [one for one in changes if isinstance(one, Field)]
        gone = {*without.split(), *(a.name for field in new for a in field.attributes)}
        kept = [one for one in self.fields if not gone & {a.name for a in one.attributes}]
        defaults = {n: default for n, default in self.defaults.items() if n not in gone}
        defaults |= default_values(name)
        for one in changes:
            defaults |= {} if isinstance(one, Field) else one
        return Family(
            name=name,
            base=dataclasses.replace(self.base, **base),
            fields=(*kept, *new),
            table=table or self.table,
            tasks=self.tasks if tasks is None else tasks,
            defaults=defaults,
        )

    @functools.cached_property
    def attributes(self) -> tuple[Attribute, ...]:
        """All attributes that are read."""
        of_fields = [one for field in self.fields for one in field.attributes]
        labels = Attribute("id2label", kind=dict), Attribute("num_labels", kind=int)
        of_fields += labels if self.tasks else ()
        new = self.defaults
        return tuple(dataclasses.replace(a, default=new.get(a.name, a.default)) for a in of_fields)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those whose output heads are read."""
        return tuple(name for field in self.fields for name in field.architectures)

    @property
    def task_architectures(self) -> dict[str, Task]:
        """Name -> task model."""
        stem = next((name for f in self.fields if (name := getattr(f, "stem", ""))), "")
        return {stem + task.end: task for task in self.tasks}

    def task(self, source: Source) -> Task | None:
        """The task model of a folder: its architecture, or the only one whose head is stored."""
        if source.architecture:
            return self.task_architectures.get(source.architecture)
        stored = [task for task in self.tasks if task.is_stored(source.tensors)]
        return stored[0] if len(stored) == 1 else None

    def table_of(self, source: Source) -> NameTable:
        """The names of the weights in a folder."""
        task = self.task(source)
        return self.table.of_head(task.modules, task.prefix) if task else self.table

    def read(
        self, raw: JSON, source: Source = NO_FOLDER, ignore: tuple[str, ...] = ()
    ) -> tuple[JSON, ModelConfig]:
        """config.json -> its attributes and the config.

        Args:
          raw: the object in config.json.
          source: what else is in the folder.
          ignore: patterns of words to leave out.

        Raises:
          ValueError: an attribute is unknown, not supported or does not fit.
        """
        raw = {n: a for n, a in raw.items() if (n, a) not in SAME.get(self.base.kind, ())}
        attributes = read_attributes(raw, self.attributes, ignore, self.name)
        values: Values = {}
        for field in self.fields:
            values |= field.read(attributes, source)
        values |= task.read(attributes) if (task := self.task(source)) else {}
        try:
            return attributes, build_config(self.base, values)
        except ValueError as error:
            raise ValueError(f"config.json does not fit a model of attnlab: {error}") from None

    def write(self, config: ModelConfig) -> JSON:
        """Config -> attributes and architectures, as far as the format can express it."""
        attributes: JSON = {}
        for field in self.fields:
            attributes |= field.write(config)
        fit = [name for name, task in self.task_architectures.items() if task.can_write(config)]
        if fit:
            loaded = metadata_of(config).get("architectures") or fit
            first = loaded[0] if loaded[0] in fit else fit[0]
            attributes |= {"architectures": [first]} | write_labels(config)
        for one in self.attributes:
            if one.compute is not None and one.name not in attributes:
                attributes[one.name] = one.compute(attributes)
        read = {a.name for f in self.fields if not isinstance(f, Words) for a in f.attributes}
        kept = kept_words(config, self.name)
        if fit and count_labels(kept) != config.output.num_classes:  # those of another classifier
            read |= {"id2label", "label2id", "num_labels", "problem_type"}
        kept = {n: a for n, a in kept.items() if n not in read}
        return attributes | kept if config.metadata else kept | attributes
