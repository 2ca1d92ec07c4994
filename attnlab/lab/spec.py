"""`RunSpec`: the identity of a run. `Variant`: what one changes in a base; lists of both."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnlab.fields import check_field
from attnlab.lab.experiment import Experiment
from attnlab.load import IMPORTS
from attnlab.models import flags
from attnlab.models.budget import Budget, match_budget, with_layout
from attnlab.names import lookup, nearest, reference
from attnlab.nested import JSON, flatten
from attnlab.training.config import TrainConfig
from attnlab.training.objectives import Objective

Tag: TypeAlias = str | int | float | bool | None
LAYOUT, SHARING = "model.heads.layout", "model.sharing"
POSITIONS = "model.positions.kind"


def as_tag(value: object) -> Tag:
    """A value as a tag: a number of NumPy becomes one of Python, an object without a text of its
    own, also in a tuple, gets its name in its module."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Tag):
        return value
    if _has_name(value):
        return reference(value).rpartition(":")[2]
    if isinstance(value, tuple) and any(map(_has_name, value)):  # callbacks
        value = tuple(as_tag(one) if _has_name(one) else one for one in value)
    return str(value)


def _has_name(value: object) -> bool:
    is_function = callable(value) and not dataclasses.is_dataclass(value)
    return is_function or isinstance(value, Objective)


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run: what it trains and with which seed. Its JSON is what is stored.

    Attributes:
      id: names its folder; unique within a sweep.
      config: what it trains.
      seed: of initial weights, batches and dropout.
      tags: what tables and figures group by; they change nothing in the run.

    Raises:
      ValueError: an id that is no name of a folder, or a seed that is no whole number from 0 to
        2**32 - 1.

    >>> one, other = RunSpec("a", Experiment()), RunSpec("b", Experiment(), tags={"group": 1})
    >>> one.digest == other.digest  # id and tags change no number
    True
    """

    id: str
    config: Experiment
    seed: int = 0
    tags: Mapping[str, Tag] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,150}", self.id):
            raise ValueError(
                f"id {self.id!r} names a folder: letters, digits and . _ = + - only, at most 151"
            )
        object.__setattr__(self, "seed", check_field("seed", self.seed, int, least=0, below=2**32))
        object.__setattr__(self, "tags", {name: as_tag(value) for name, value in self.tags.items()})

    @property
    def title(self) -> str:
        """The values of its tags, for people; never read back."""
        return ", ".join(str(value) for value in self.tags.values()) or self.id

    @property
    def digest(self) -> str:
        """Of the seed and the config without `train.seeds`: what decides the numbers."""
        config = self.config.to_dict()
        config["train"]["seeds"] = [self.seed]
        config.pop(IMPORTS, None)
        text = json.dumps(config, sort_keys=True, allow_nan=False)
        return hashlib.sha256(f"{self.seed} {text}".encode()).hexdigest()[:12]

    def to_dict(self) -> JSON:
        """JSON values; `from_dict` reads them as the same spec."""
        tags = dict(self.tags)
        return {"id": self.id, "seed": self.seed, "tags": tags, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RunSpec":
        """The spec that `to_dict` described. Raises ValueError."""
        config = Experiment.from_dict(fields["config"])
        return cls(fields["id"], config, fields["seed"], dict(fields["tags"]))


class Match(NamedTuple):
    """A budget that all variants have: that of a reference.

    The reference is the model of the base with another layout and sharing plan.

    Attributes:
      budget: of the reference: "parameters", "flops" or "cache". To meet it, `model.ffn.width` is
        solved for ("cache": `model.heads.num_heads`). In a config "" turns this off.
      layout: of the reference.
      sharing: of the reference.

    >>> from attnlab.models import ModelConfig
    >>> base = Experiment(model=ModelConfig(width=32, num_layers=2))
    >>> specs = specs_of(base, grid(layout=["standard", "wide"]), [0], Match("parameters"))
    >>> [spec.config.model.ffn.width for spec in specs]  # wide heads leave less for the FFN
    [256, 63]
    """

    budget: Budget
    layout: str = "standard"
    sharing: str = "separate"


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one configuration in a comparison changes in the base.

    Attributes:
      values: field ("train.steps") -> value.
      name: what tables call it; "": the values.
      tags: of its runs; None: {"name": name}, or without a name the last part of each field (of
        "train.optimizer.name": "optimizer") and its value.

    >>> Variant({"model.heads.layout": "wide", "model.sharing": "albert"}).all_tags
    {'layout': 'wide', 'sharing': 'albert'}
    >>> Variant({"model.heads.num_heads": 1}, "one head").all_tags
    {'name': 'one head'}
    """

    values: Mapping[str, object]
    name: str = ""
    tags: Mapping[str, Tag] | None = None

    @property
    def all_tags(self) -> dict[str, Tag]:
        """The tags of its runs."""
        if self.tags is not None:
            return dict(self.tags)
        if self.name:
            return {"name": self.name}
        # Of "train.optimizer.name" the last part is "optimizer".
        lasts = [path.removesuffix(".name").rpartition(".")[2] for path in self.values]
        return {
            path if lasts.count(last) > 1 else last: as_tag(value)
            for last, (path, value) in zip(lasts, self.values.items(), strict=True)
        }

    @property
    def id(self) -> str:
        """Its tags as a part of a folder's name."""
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "-".join(map(str, self.all_tags.values())))
        return re.sub(r"^[^A-Za-z0-9]+", "", name)[:120]


def grid(**values: Sequence[object]) -> list[Variant]:
    """A variant for each combination of values of some fields.

    Args:
      **values: field -> its values. A field is a path with two underscores between its parts
        ("model__width", "train__optimizer__learning_rate"); `layout` and `sharing` are those of
        the model.
        A value may be a record that replaces the field: `layout=[OneQuery(num_heads=4)]`,
        `data=[Rows(1000), Rows(500)]`.
        Other paths can be given with `**{"model.ffn.width": [...]}`.

    Raises:
      ValueError: no list of values.

    >>> [variant.id for variant in grid(layout=["standard", "wide"], sharing=["albert"])]
    ['standard-albert', 'wide-albert']
    """
    for name, some in values.items():
        _check_list(name, some)
    short = {"layout": LAYOUT, "sharing": SHARING}
    paths = [short.get(name, name.replace("__", ".")) for name in values]
    return [
        Variant(dict(zip(paths, combination, strict=True)))
        for combination in itertools.product(*values.values())
    ]


def specs_of(
    base: Experiment,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    match: Match | Budget | None = None,
) -> list[RunSpec]:
    """A spec for each variant and seed.

    Args:
      base: what the runs have in common.
      variants: what they change in it.
      seeds: of each, but of variants that set "train.seeds".
      match: the budget that is made equal, to that of a reference model; without a `Match`, to that
        of the model of `base`.

    Raises:
      ValueError: an unknown field, a value that makes no model, two variants of one name, or
        nothing to run.

    >>> variants = [Variant({"model.heads.num_heads": n}, f"{n} heads") for n in (1, 2)]
    >>> [(spec.id, spec.tags) for spec in specs_of(Experiment(), variants, seeds=[7])]
    [('1_heads-seed7', {'name': '1 heads'}), ('2_heads-seed7', {'name': '2 heads'})]
    """
    _check_list("seeds", seeds)
    reference = base.model
    if isinstance(match, Match):
        reference = with_layout(base.model, match.layout, match.sharing)
        match = match.budget
    specs = []
    for variant in variants:
        config, stem = with_values(base, variant.values), variant.id and f"{variant.id}-"
        if match:
            found = match_budget(config.model, reference, match, length=config.train.length)
            config = dataclasses.replace(config, model=found.config, matched=match)
        if "start" in variant.values:
            config.check_start()
        tags = variant.all_tags
        own = config.train.seeds if "train.seeds" in variant.values else seeds
        specs += [RunSpec(f"{stem}seed{seed}", config, seed, tags) for seed in own]
    check_unique(specs)
    return specs


def product(
    base: Experiment | None = None,
    /,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    match: Budget | None = None,
    **values: Sequence[object],
) -> list[RunSpec]:
    """A spec for each combination of values of some fields and each seed.

    Args:
      base: what the runs have in common; None: `Experiment()`.
      seeds: of each combination.
      match: "parameters", "flops" or "cache": a size of each combination is solved for the budget
        of `base` (`attnlab.models.match_budget`).
      **values: as of `grid`.

    Raises:
      ValueError: an unknown field, a value that makes no model, or nothing to run.

    >>> specs = product(layout=["standard", "wide"], sharing=["separate"], seeds=[0, 1])
    >>> [spec.id for spec in specs][:3]
    ['standard-separate-seed0', 'standard-separate-seed1', 'wide-separate-seed0']
    """
    return specs_of(base or Experiment(), grid(**values), seeds, match)


def _check_list(name: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: give a list of values, such as [{values!r}], not {values!r}")


def check_unique(specs: Sequence[RunSpec]) -> None:
    """Raises ValueError where two specs have one id, or there is none; TypeError for others."""
    if not specs:
        raise ValueError("nothing to run: give each field at least one value, and one seed")
    known: set[str] = set()
    for spec in specs:
        if not isinstance(spec, RunSpec):
            raise TypeError(
                f"specs must be RunSpecs, as lab.product makes, not {type(spec).__name__}"
            )
        if spec.id in known:
            raise ValueError(f"two runs have the id {spec.id!r}; give each its own")
        known.add(spec.id)


def with_values(base: Experiment, values: Mapping[str, object]) -> Experiment:
    """`base` with other values of fields, by path ("train.steps").

    A layout or a plan by its name keeps what the other layout can have of the heads.

    Raises:
      ValueError: an unknown field, saying which are known; or a value that makes no experiment.

    >>> with_values(Experiment(), {"train.steps": 70}).train.steps
    70
    """
    parts: JSON = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    plain = dict(values)
    for path in sorted(p for p, one in values.items() if dataclasses.is_dataclass(one)):
        name, *inner = ("model.heads" if path == LAYOUT else path).split(".")
        outer = lookup(MappingProxyType(parts), name, what="field")
        parts[name] = _replaced(outer, inner, plain.pop(path))  # an outer record before its parts
    model, train, data = flags.to_dict(parts["model"]), parts["train"].to_dict(), parts["data"]
    given = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    for path, part in ((LAYOUT, "heads"), (POSITIONS, "positions")):
        if path in plain:
            model[part] = flags.choose(model[part], str(plain[path]))
    fields = parts | {"model": model, "train": train, "data": given}
    for path, value in plain.items():
        _set(fields, path, value)
    return Experiment(
        **fields
        | {
            "model": flags.from_dict(fields["model"]),
            "train": TrainConfig.from_dict(fields["train"]),
            "data": dataclasses.replace(data, **fields["data"]),
        }
    )


def _replaced(record: Any, path: Sequence[str], value: object) -> Any:
    """`record` with another value at a path of fields."""
    if not path:
        return value
    name, *inner = path
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.init}
    value = _replaced(lookup(MappingProxyType(fields), name, what="field"), inner, value)
    return dataclasses.replace(record, **{name: value})


def _set(fields: JSON, path: str, value: object) -> None:
    *outer, last = path.split(".")
    place: Any = fields
    for name in outer:
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, dict) and last in place:
        if not outer and isinstance(place[last], dict) and not isinstance(value, Mapping):
            raise ValueError(
                f"{path} has fields of its own, so it cannot be {value!r}; give one of them, such "
                f"as {path}.{next(iter(place[last]))}"
            )
        place[last] = value
        return
    known = list(place) if isinstance(place, dict) else list(fields)
    known += [] if outer else ["layout", "sharing"]
    near = nearest(last, known)
    hint = f"did you mean {near!r}? " if near else ""
    if found := [one for one in flatten(fields) if one.endswith(f".{path}")]:
        hint = f"write {' or '.join(found)}; "
    raise ValueError(f"no field {path!r}: {hint}known: {', '.join(known)}")


def write_specs(specs: Sequence[RunSpec]) -> str:
    """Specs as a JSON text."""
    return json.dumps([spec.to_dict() for spec in specs], indent=1, allow_nan=False)


@functools.lru_cache(maxsize=4)
def read_specs(text: str) -> tuple[RunSpec, ...]:
    """The specs that `write_specs` wrote. Raises ValueError."""
    return tuple(RunSpec.from_dict(fields) for fields in json.loads(text))
