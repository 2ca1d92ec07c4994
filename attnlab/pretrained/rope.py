"""Rotary positions in a config.json: of today (`rope_parameters`) and before transformers 5."""

import dataclasses
from typing import Any

from attnlab.heads.positions import SCALINGS, read_scaling
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Positions, Rotary
from attnlab.pretrained.attributes import JSON, LARGEST_NUMBER, Attribute, shown
from attnlab.pretrained.fields import Field, Source, Values


@dataclasses.dataclass(frozen=True)
class RotaryField(Field):
    """Rotary positions.

    Attributes:
      base, fraction: the family's own names of two numbers that `rope_parameters` calls rope_theta
        and partial_rotary_factor. A family without a `fraction` rotates whole heads.
      default_fraction, default_base: where config.json has none.
    """

    base: str = "rope_theta"
    fraction: str = ""
    default_fraction: float = 1.0
    default_base: float = 10000.0

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = [Attribute(name) for name in (self.base, self.fraction) if name]
        objects = (
            Attribute("rope_parameters", None, nullable=True, json_type=dict),
            Attribute("rope_scaling", None, nullable=True, json_type=dict),
        )
        return (*objects, *own)

    def read(self, given: JSON, source: Source) -> Values:
        return {"positions": self.positions(given)}

    def positions(self, given: JSON) -> Rotary:
        """Raises ValueError that names the attribute that is unknown, missing, given twice or no
        number."""
        found = _collect(given, {"rope_theta": self.base, "partial_rotary_factor": self.fraction})
        kind = found.pop("rope_type", "default")
        if kind != "default" and (not isinstance(kind, str) or kind not in SCALINGS):
            raise ValueError(
                f"config.json: rope_type = {shown(kind)} is not supported; known: default, "
                f"{', '.join(SCALINGS)}"
            )
        names = () if kind == "default" else SCALINGS[kind].numbers
        numbers = {"rope_theta": self.default_base, "partial_rotary_factor": self.default_fraction}
        _check_numbers(found, (*numbers, *names), kind)
        numbers |= found
        if "original_max_position_embeddings" in names:
            numbers.setdefault("original_max_position_embeddings", given["max_position_embeddings"])
        if missing := [n for n in names if n not in numbers]:
            raise ValueError(f"config.json: rope_type {kind!r} needs {missing[0]}")
        share = numbers["partial_rotary_factor"]
        if not self.fraction and share != 1:
            raise ValueError(
                f"config.json: partial_rotary_factor = {share!r} is not supported in this family, "
                "only 1.0"
            )
        scaling = f"{kind}:{','.join(_short(numbers[name]) for name in names)}" if names else None
        return Rotary(base=float(numbers["rope_theta"]), fraction=float(share), scaling=scaling)

    def write(self, config: ModelConfig) -> JSON:
        return self.describe(config.positions)

    def describe(self, positions: Positions) -> JSON:
        """The inverse of `positions`, for readers of today and of before."""
        if not isinstance(positions, Rotary):
            raise ValueError(f"positions must be rotary, not {positions.name!r}")
        scaled: JSON = {}
        if positions.scaling:
            scaling, numbers = read_scaling(positions.scaling)
            scaled = dict(zip(scaling.numbers, numbers, strict=True))
            if (length := "original_max_position_embeddings") in scaled:
                scaled[length] = int(scaled[length])
            scaled["rope_type"] = positions.scaling.partition(":")[0]
        own = {self.fraction: positions.fraction} if self.fraction else {}
        today = {"rope_type": "default"} | scaled | {"rope_theta": positions.base}
        today |= {"partial_rotary_factor": positions.fraction} if self.fraction else {}
        return own | {
            self.base: positions.base,
            "rope_scaling": scaled or None,
            "rope_parameters": today,
        }


def _collect(given: JSON, own: dict[str, str]) -> JSON:
    """What rope_scaling, rope_parameters and the family's own names say, in the words of
    `rope_parameters`."""
    found: JSON = {}

    def add(key: str, value: Any, name: str) -> None:
        if found.setdefault(key, value) != value:
            raise ValueError(
                f"config.json: {name} = {shown(value)} contradicts another attribute of the rotary "
                f"positions, which says {shown(found[key])}"
            )

    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given[name], dict | None):
            raise ValueError(
                f"config.json: {name} = {shown(given[name])} should be an object or null"
            )
        for key, value in (given[name] or {}).items():
            add("rope_type" if key == "type" else key, value, f"{name}.{key}")
    for key, name in own.items():
        if name and given[name] is not None:
            add(key, given[name], name)
    return found


def _check_numbers(found: JSON, known: tuple[str, ...], kind: str) -> None:
    """Raise ValueError unless all are known numbers, finite and above 0."""
    for key, value in found.items():
        if key not in known:
            raise ValueError(
                f"config.json: {shown(key)[1:-1]} = {shown(value)} of the rotary positions "
                f"(rope_type {kind!r}) is unknown here and may change what the model computes"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= LARGEST_NUMBER:
            raise ValueError(
                f"config.json: {key} = {shown(value)} of the rotary positions is no number above 0"
            )


def _short(number: float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))
