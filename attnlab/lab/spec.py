"""`RunSpec`: the identity of a run. `product`: many of them from a base and lists of values."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attnlab.lab.experiment import Experiment
from attnlab.models import config_dict
from attnlab.models.budget import Budget, match_budget, with_layout
from attnlab.names import nearest

Tag: TypeAlias = str | int | float | bool | None
LAYOUT, SHARING = "model.heads.layout", "model.sharing"


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run: what it trains and with which seed. Its JSON is what is stored.

    Attributes:
      id: names its folder; unique within a sweep.
      config: what it trains.
      seed: of initial weights, batches and dropout.
      tags: what tables and figures group by; they change nothing in the run.
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
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of 0 or more, not {self.seed!r}")

    @property
    def title(self) -> str:
        """The values of its tags, for people; never read back."""
        return ", ".join(str(value) for value in self.tags.values()) or self.id

    @property
    def digest(self) -> str:
        """Of the config and the seed: what decides the numbers."""
        return hashlib.sha256(f"{self.seed} {self.config.to_json()}".encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` reads them as the same spec."""
        tags = dict(self.tags)
        return {"id": self.id, "seed": self.seed, "tags": tags, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RunSpec":
        """The spec that `to_dict` described. Raises ValueError."""
        config = Experiment.from_dict(fields["config"])
        return cls(fields["id"], config, fields["seed"], dict(fields["tags"]))


def product(
    base: Experiment | None = None,
    /,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    match: Budget | None = None,
    **variants: Sequence[Any],
) -> list[RunSpec]:
    """A spec for each combination of values and each seed.

    Args:
      base: what the runs have in common; None: `Experiment()`.
      seeds: of each combination.
      match: "parameters" or "flops": the FFN width of each combination is solved for the budget of
        `base` (`attnlab.models.match_budget`).
      **variants: field -> its values. A field is a path with two underscores between its parts
        ("model__width", "train__learning_rate"); `layout` and `sharing` are those of the model.
        Other paths can be given with `**{"model.ffn.width": [...]}`.

    Raises:
      ValueError: an unknown field, a value that makes no model, or nothing to run.

    >>> specs = product(layout=["standard", "wide"], sharing=["separate"], seeds=[0, 1])
    >>> [spec.id for spec in specs][:3]
    ['standard-separate-seed0', 'standard-separate-seed1', 'wide-separate-seed0']
    """
    base = base or Experiment()
    short = {"layout": LAYOUT, "sharing": SHARING}
    paths = [short.get(name, name.replace("__", ".")) for name in variants]
    combinations = list(itertools.product(*variants.values()))
    if not combinations or not seeds:
        raise ValueError("nothing to run: give each field at least one value, and one seed")
    specs = []
    for values in combinations:
        given = dict(zip(paths, values, strict=True))
        config = with_values(base, given)
        if match:
            length = base.train.length
            model = match_budget(config.model, base.model, match, length=length).config
            config = dataclasses.replace(config, model=model)
        tags: dict[str, Tag] = {
            path.rpartition(".")[2]: value if isinstance(value, Tag) else str(value)
            for path, value in given.items()
        }
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "-".join(map(str, tags.values()))) or "run"
        specs += [RunSpec(f"{name}-seed{seed}", config, seed, tags) for seed in seeds]
    check_unique(specs)
    return specs


def check_unique(specs: Sequence[RunSpec]) -> None:
    """Raises ValueError where two specs have one id, or there is none."""
    if not specs:
        raise ValueError("nothing to run: the list of specs is empty")
    ids = [spec.id for spec in specs]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ValueError(f"two runs have the id {twice!r}; give each its own")


def with_values(base: Experiment, values: Mapping[str, Any]) -> Experiment:
    """`base` with other values of fields, by path ("train.steps").

    Raises:
      ValueError: an unknown field, saying which are known; or a value that makes no experiment.

    >>> with_values(Experiment(), {"train.steps": 70}).train.steps
    70
    """
    model = base.model
    if LAYOUT in values or SHARING in values:
        layout = values.get(LAYOUT, model.heads.name)
        model = with_layout(model, layout, values.get(SHARING, model.sharing))
    fields: dict[str, Any] = {
        "task": base.task,
        "model": config_dict.to_dict(model),
        "train": dataclasses.asdict(base.train),
        "data": dataclasses.asdict(base.data),  # type: ignore[call-overload]
    }
    for path, value in values.items():
        if path not in (LAYOUT, SHARING):
            _set(fields, path, value)
    return Experiment(
        model=config_dict.from_dict(fields["model"]),
        train=dataclasses.replace(base.train, **fields["train"]),
        data=dataclasses.replace(base.data, **fields["data"]),  # type: ignore[type-var]
        task=fields["task"],
    )


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    place: Any = fields
    for name in outer:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        known = place if isinstance(place, dict) else fields
        near = nearest(last, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"no field {path!r}: {hint}known: {', '.join(known)}")
    place[last] = value


def write_specs(specs: Sequence[RunSpec]) -> str:
    """Specs as a JSON text."""
    return json.dumps([spec.to_dict() for spec in specs], indent=1, allow_nan=False)


def read_specs(text: str) -> list[RunSpec]:
    """The specs that `write_specs` wrote. Raises ValueError."""
    return [RunSpec.from_dict(fields) for fields in json.loads(text)]
