"""What a report needs to know beside the results: question, comparisons, expected results. Typed,
with defaults, stored as JSON in the workdir of a sweep."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from attnlab.atomic import write_atomic
from attnlab.fields import Spec, bounded, check_field
from attnlab.lab.spec import Tag
from attnlab.nested import JSON, naming_file

FILE = "description.json"
"""In the workdir of a sweep. It may change while the runs stay."""
VERSION = 2
Tags: TypeAlias = Mapping[str, Tag]
"""As many tags of a variant as are needed to name it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation(Spec):
    """An expected result: every seed of a number is at most, at least or exactly `value`.

    Raises ValueError for another relation, and for a text with other names in braces.

    Attributes:
      tags: of the variant.
      relation, value: what is expected.
      text: in words, with {mean}, {min}, {max} (over seeds) or {ratio} for what was found: "one
        head is right in {max:.1f} % of the cases at most".
      over: tags of a second variant: the mean divided by that of the second is compared.
      number: a metric of the held-out part, or a name in metrics.jsonl, whose last value counts;
        "": the main metric.
    """

    tags: Tags
    relation: Literal["at most", "at least", "exactly"]
    value: float
    text: str
    over: Tags | None = None
    number: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("mean", "min", "max", "ratio") if self.over else ("mean", "min", "max")
        try:
            self.text.format(**dict.fromkeys(names, 0.0))
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"text {self.text!r} ({error!r}): in braces write {', '.join(names)}; ratio needs "
                "`over`"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description(Spec):
    """What a sweep is to decide.

    Attributes:
      question: the title of the report; "": made of the tags.
      baseline: tags of the variant that the others are compared with; {}: the first variant.
      pairs: (variant, baseline) by their tags, if only these are to be compared.
      margin: equivalence margin in the unit of the metric; 0: no test of equivalence.
      seeds_added: could seeds be added after looking at scores?
      planned_seeds: seeds that were fixed before any score was seen; (): all.
      matched: the budget that is equal for all variants ("parameters"), in words; "": none.
      source: who expects what is in `expectations`.
      expectations: known beforehand.
      notes: sentences for the limits of the report.

    Raises:
      ValueError: a field of another type, or a margin below 0.

        about = Description(
            question="Do wide heads learn faster?",
            baseline={"layout": "standard"},
            margin=0.01,  # in the unit of the metric
        )
        about.write(Path("runs/layouts"))  # read by the report
    """

    question: str = ""
    baseline: Tags = dataclasses.field(default_factory=dict)
    pairs: tuple[tuple[Tags, Tags], ...] = ()
    margin: float = bounded(0.0, least=0.0)
    seeds_added: bool = False
    planned_seeds: tuple[int, ...] = ()
    matched: str = ""
    source: str = ""
    expectations: tuple[Expectation, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for pair in self.pairs:
            check_field("pairs", pair, tuple[Tags, Tags])

    @property
    def named(self) -> list[Tags]:
        """The tags that name the variants of comparisons."""
        return [one for one in (self.baseline, *(t for pair in self.pairs for t in pair)) if one]

    def to_json(self) -> str:
        """As JSON.

        >>> about = Description(question="Which?", pairs=(({"a": 1}, {"a": 2}),))
        >>> Description.from_json(about.to_json()) == about
        True
        """
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """What `to_json` wrote. Raises ValueError for another version, or unknown fields."""
        fields: JSON = json.loads(text)
        if (version := fields.pop("version", None)) != VERSION:
            raise ValueError(
                f"the description has version {version!r}; this attnlab reads {VERSION}"
            )
        try:
            fields["pairs"] = [(a, b) for a, b in fields.get("pairs", ())]
            found = [Expectation(**one) for one in fields.get("expectations", ())]
            return cls(**fields | {"expectations": found})
        except TypeError as error:
            raise ValueError(f"not a description of this version of attnlab: {error}") from None

    def write(self, workdir: Path) -> None:
        """Writes it to the workdir of a sweep."""
        write_atomic(workdir / FILE, self.to_json().encode())


def read_description(workdir: Path, given: Description | None = None) -> Description:
    """The description in the workdir of a sweep; the default one where there is none.

    Args:
      workdir: of a sweep.
      given: returned in its place; but if seeds were added in the workdir, that stays.

    Raises:
      ValueError: the file is of another version.

    >>> read_description(Path("no_such_sweep")) == Description()
    True
    """
    path, found = workdir / FILE, Description()
    if path.exists():
        with naming_file(path):
            found = Description.from_json(path.read_text(encoding="utf-8"))
    if given and found.seeds_added:
        return dataclasses.replace(given, seeds_added=True, planned_seeds=found.planned_seeds)
    return given or found
