"""Rotary positions in a config.json: of today (`rope_parameters`) and before transformers 5."""

import dataclasses
import math

from attnlab.heads.positions import SCALINGS, read_scaling
from attnlab.models.config import ModelConfig
from attnlab.models.specs import Positions, Rotary
from attnlab.nested import JSON
from attnlab.pretrained.attributes import LARGEST_NUMBER, Attribute, bad_value, shown
from attnlab.pretrained.fields import Field, Source, Values


@dataclasses.dataclass(frozen=True)
class RotaryField(Field):
    """Rotary positions.

    Attributes:
      base, fraction: the family's own names of two numbers that `rope_parameters` calls rope_theta
        and partial_rotary_factor. A family without a `fraction` rotates whole heads.
      default_fraction, default_base: where config.json has none.
      required: what config.json must say, in the words of `rope_parameters`, as its default is not
        the same in all versions of transformers.
      scalings: the rope_type that the family may have beside "default".
      of_part: they are of a part of each query and key, and YaRN's mscale_all_dim scales the scores
        of all (DeepSeek). Then its factor of queries and keys must be 1, as in published models.
    """

    base: str = "rope_theta"
    fraction: str = ""
    default_fraction: float = 1.0
    default_base: float = 10000.0
    required: tuple[str, ...] = ()
    scalings: tuple[str, ...] = tuple(SCALINGS)
    of_part: bool = False

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = [Attribute(name) for name in (self.base, self.fraction) if name]
        objects = (
            Attribute("rope_parameters", None, nullable=True, json_type=dict),
            Attribute("rope_scaling", None, nullable=True, json_type=dict),
        )
        return (*objects, *own)

    def read(self, attributes: JSON, source: Source) -> Values:
        return {"positions": self.positions(attributes)} | score_scales(
            [self.score_scale(attributes)] * (attributes.get("num_hidden_layers") or 0)
        )

    def score_scale(self, attributes: JSON) -> float:
        """What YaRN multiplies scores by: the square of the factor of queries and keys."""
        found = _collect(attributes, {})
        if found.get("rope_type") != "yarn":
            return 1.0
        factor, given_factor = found.get("factor", 1.0), found.get("attention_factor")
        one, all_ = (found.get(name) for name in ("mscale", "mscale_all_dim"))
        sizes = [_yarn_size(factor, weight) for weight in (one, all_) if weight]
        usual = sizes[0] / sizes[1] if len(sizes) == 2 else _yarn_size(factor, 1.0)
        own = float(usual if given_factor is None else given_factor)
        if not self.of_part:
            return own**2
        if own != 1:
            raise bad_value(
                "mscale",
                one,
                f"is not supported, only mscale_all_dim = {shown(all_)}: rotated and other "
                "numbers of a head would be scaled differently",
            )
        return _yarn_size(factor, all_) ** 2 if all_ else 1.0

    def positions(self, attributes: JSON) -> Rotary:
        """Raises ValueError that names the attribute that is unknown, missing, given twice or no
        number."""
        found = _collect(
            attributes, {"rope_theta": self.base, "partial_rotary_factor": self.fraction}
        )
        for name in self.required:
            if name not in found:
                raise ValueError(
                    f"config.json: rope_parameters has no {name}, and its default is not the same "
                    "in all versions of transformers; write it"
                )
        kind = found.pop("rope_type", "default")
        kind = self._yarn(found) if kind == "yarn" else kind
        if kind != "default" and (not isinstance(kind, str) or kind not in self.scalings):
            why = f"is not supported; known: {', '.join(('default', *self.scalings))}"
            raise bad_value("rope_type", kind, why)
        names = () if kind == "default" else SCALINGS[kind].numbers
        numbers = {"rope_theta": self.default_base, "partial_rotary_factor": self.default_fraction}
        _check_numbers(found, (*numbers, *names), kind)
        numbers |= found
        if "original_max_position_embeddings" in names:
            numbers.setdefault(
                "original_max_position_embeddings", attributes["max_position_embeddings"]
            )
        if kind == "dynamic":
            numbers["original_max_position_embeddings"] = attributes["max_position_embeddings"]
        if missing := [n for n in names if n not in numbers]:
            raise ValueError(f"config.json: rope_type {kind!r} needs {missing[0]}")
        share = numbers["partial_rotary_factor"]
        if not self.fraction and share != 1:
            why = "is not supported in this family, only 1.0"
            raise bad_value("partial_rotary_factor", share, why)
        scaling = f"{kind}:{','.join(_short(numbers[name]) for name in names)}" if names else None
        if share != 1 and self.score_scale(attributes) != 1:
            raise ValueError(
                "config.json: rope_type 'yarn' with a partial_rotary_factor needs attention_factor "
                "= 1.0: only all numbers of a head are scaled"
            )
        return Rotary(base=float(numbers["rope_theta"]), fraction=float(share), scaling=scaling)

    @staticmethod
    def _yarn(found: JSON) -> str:
        """The name of the scaling; `found` without what `score_scale` reads, and with defaults."""
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            number = found.pop(name, None)
            if number is not None and (not isinstance(number, int | float) or number <= 0):
                raise bad_value(name, number, "must be above 0")
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            found[name] = found.get(name) or default
        truncate = found.pop("truncate", True)
        if not isinstance(truncate, bool):
            raise bad_value("truncate", truncate, "should be true or false")
        return "yarn" if truncate else "yarn_smooth"

    def write(self, config: ModelConfig) -> JSON:
        scales = config.attention.layer_scales or (1.0,)
        return self.describe(config.positions, scales[0])

    def describe(self, positions: Positions, scale: float = 1.0) -> JSON:
        """The inverse of `positions`, for readers of today and of before."""
        if not isinstance(positions, Rotary):
            raise ValueError(f"positions must be rotary, not {positions.name!r}")
        scaled: JSON = {}
        if positions.scaling:
            scaling, numbers = read_scaling(positions.scaling)
            scaled = dict(zip(scaling.numbers, numbers, strict=True))
            if (length := "original_max_position_embeddings") in scaled:
                scaled[length] = int(scaled[length])
            kind = positions.scaling.partition(":")[0]
            scaled["rope_type"] = kind.removesuffix("_smooth")
            if kind.startswith("yarn"):
                scaled |= self._write_yarn(scale, scaled["factor"]) | {"truncate": kind == "yarn"}
            if kind == "dynamic":
                del scaled["original_max_position_embeddings"]
        own = {self.fraction: positions.fraction} if self.fraction else {}
        today = {"rope_type": "default"} | scaled | {"rope_theta": positions.base}
        today |= {"partial_rotary_factor": positions.fraction} if self.fraction else {}
        return own | {
            self.base: positions.base,
            "rope_scaling": scaled or None,
            "rope_parameters": today,
        }

    def _write_yarn(self, scale: float, factor: float) -> JSON:
        """The attributes from which `score_scale` reads this."""
        if not self.of_part:
            return {"attention_factor": _root(scale)}
        if scale == 1:
            return {"attention_factor": 1.0}
        weight = (math.sqrt(scale) - 1) / (0.1 * math.log(factor))
        near = (round(weight, 9), weight, math.nextafter(weight, 0), math.nextafter(weight, 9))
        exact = (one for one in near if _yarn_size(factor, one) ** 2 == scale)
        return dict.fromkeys(("mscale", "mscale_all_dim"), next(exact, weight))


def _yarn_size(factor: float, weight: float) -> float:
    """1 + 0.1 weight log(factor) (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def score_scales(scales: list[float]) -> Values:
    """`attention.layer_scales`, if any layer scales its scores."""
    return {"attention.layer_scales": tuple(scales)} if any(s != 1 for s in scales) else {}


def _root(square: float) -> float:
    """The number whose square this is exactly, if there is one."""
    root = math.sqrt(square)
    near = (root, math.nextafter(root, 0), math.nextafter(root, math.inf))
    return next((one for one in near if one**2 == square), root)


def _collect(attributes: JSON, own: dict[str, str]) -> JSON:
    """What rope_scaling, rope_parameters and the family's own names say, in the words of
    `rope_parameters`."""
    found: JSON = {}

    def add(key: str, value: object, name: str) -> None:
        if found.setdefault(key, value) != value:
            raise bad_value(
                name,
                value,
                "contradicts another attribute of the rotary positions, which says "
                f"{shown(found[key])}",
            )

    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(attributes[name], dict | None):
            raise bad_value(name, attributes[name], "should be an object or null")
        for key, value in (attributes[name] or {}).items():
            add("rope_type" if key == "type" else key, value, f"{name}.{key}")
    for key, name in own.items():
        if name and attributes[name] is not None:
            add(key, attributes[name], name)
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
            raise bad_value(key, value, "of the rotary positions must be above 0")


def _short(number: int | float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))
