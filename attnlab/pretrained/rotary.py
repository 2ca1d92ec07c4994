"""Rotary positions in a config.json, of today (`rope_parameters`) and before transformers 5; and
`layer_types`: layers with a sliding window and layers without."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from attnlab.heads.positions import SCALINGS, read_scaling
from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.models.specs import NoPositions, Positions, Rotary
from attnlab.nested import JSON
from attnlab.pretrained.attributes import LARGEST_NUMBER, Attribute, bad_value, shown
from attnlab.pretrained.fields import Field, Source, Values
from attnlab.sharing.scan import repeating_pattern

SLIDING, FULL = "sliding_attention", "full_attention"
LENGTH = "original_max_position_embeddings"
FRACTION = "partial_rotary_factor"
FACTORS = ("short_factor", "long_factor")
BY_LENGTH = ("llama3", "longrope", "yarn")
"""The kinds that read it, also where it stands beside `rope_parameters`."""
OPTIONAL: JSON = {
    "yarn": dict(factor=None, beta_fast=32.0, beta_slow=1.0, truncate=True)
    | dict(attention_factor=None, mscale=None, mscale_all_dim=None),
    "longrope": dict(factor=None, attention_factor=None),
}
"""rope_type -> its words that may be missing or null -> their defaults; None: from others."""


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
      outside: original_max_position_embeddings is written beside `rope_parameters` too, and is
        4096 where a file has none there. The one beside counts, in every family.
      of_part: they are of a part of each query and key, and YaRN's mscale_all_dim scales the scores
        of all (DeepSeek).
    """

    base: str = "rope_theta"
    fraction: str = ""
    default_fraction: float = 1.0
    default_base: float = 10000.0
    required: tuple[str, ...] = ()
    scalings: tuple[str, ...] = tuple(kind for kind in SCALINGS if kind != "yarn_smooth")
    outside: bool = False
    of_part: bool = False

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = map(Attribute, (self.base, self.fraction or FRACTION))
        objects = (Attribute(name, kind=dict) for name in ("rope_parameters", "rope_scaling"))
        return (*objects, *own, Attribute(LENGTH, 4096 if self.outside else None))

    def read(self, attributes: JSON, source: Source) -> Values:
        positions, scale = self.rotary(attributes)
        count = attributes.get("num_hidden_layers") or 0
        return {"positions": positions} | score_scales([scale] * count)

    def rotary(self, attributes: JSON) -> tuple[Rotary, float]:
        """The positions, and what YaRN multiplies scores by: the square of its factor of queries
        and keys, where all of these are rotated.

        Raises:
          ValueError: names the attribute that is unknown, missing, given twice or no number.
        """
        found = _collect(attributes, {"rope_theta": self.base, FRACTION: self.fraction or FRACTION})
        for name in self.required:
            if name not in found:
                raise ValueError(
                    f"config.json: rope_parameters has no {name}, and its default is not the same "
                    "in all versions of transformers; write it"
                )
        kind = found.pop("rope_type", "default")
        kind = "longrope" if kind == "su" else kind  # its first name
        if kind != "default" and (not isinstance(kind, str) or kind not in self.scalings):
            why = f"is not supported; known: {', '.join(('default', *self.scalings))}"
            raise bad_value("rope_type", kind, why)
        if kind not in BY_LENGTH:  # which passes these over
            found = {n: a for n, a in found.items() if n not in (LENGTH, "attention_factor")}
        elif attributes[LENGTH] is not None:
            found[LENGTH] = attributes[LENGTH]
        names = () if kind == "default" else SCALINGS[kind].numbers
        said = self._words(found, kind, names, attributes["max_position_embeddings"])
        if kind == "yarn" and not said["truncate"]:
            kind = "yarn_smooth"
        scores, rotated, factors = 1.0, 1.0, list[float]()
        if kind == "longrope":
            rotated, factors = said["attention_factor"], said["short_factor"] + said["long_factor"]
        elif kind.startswith("yarn"):
            scores, rotated = self._yarn_scales(said)
        numbers = [_short(number) for number in (*(said[name] for name in names), *factors)]
        positions = Rotary(
            base=float(said["rope_theta"]),
            fraction=float(said["partial_rotary_factor"]),
            scaling=f"{kind}:{','.join(numbers)}" if names else None,
            scale=float(rotated),
        )
        return positions, scores

    def _words(self, found: JSON, kind: str, names: tuple[str, ...], usual: int) -> JSON:
        """Every word of a `rope_type`, with its default; `usual` is max_position_embeddings."""
        optional = OPTIONAL.get(kind, {})
        found = {n: a for n, a in found.items() if a is not None or n not in optional}
        said: JSON = {
            "rope_theta": self.default_base,
            "partial_rotary_factor": self.default_fraction,
            **optional,
        }
        factors = FACTORS if kind == "longrope" else ()
        _check_words(found, (*said, *names, *factors), kind)
        said |= found
        if LENGTH in names:
            said[LENGTH] = usual if kind == "dynamic" else said.get(LENGTH, usual)
        for name in (*names, *factors):
            if name not in said:
                raise ValueError(f"config.json: rope_type {kind!r} needs {name}")
        if not self.fraction and said["partial_rotary_factor"] != 1:
            why = "is not supported in this family, only 1.0"
            raise bad_value("partial_rotary_factor", said["partial_rotary_factor"], why)
        if "factor" in optional:
            said["factor"] = said["factor"] or usual / said[LENGTH]
        if factors:
            short, long = (len(said[name]) for name in factors)
            if short != long:
                why = f"has {long} numbers, short_factor {short}"
                raise bad_value("long_factor", said["long_factor"], why)
            growth = math.log(max(1.0, said["factor"]))
            said["attention_factor"] = said["attention_factor"] or math.sqrt(
                1 + growth / math.log(max(said[LENGTH], 2))
            )
        return said

    def _yarn_scales(self, said: JSON) -> tuple[float, float]:
        """What YaRN multiplies scores by, and rotated numbers."""
        factor = said["factor"]
        weights = [said[name] for name in ("mscale", "mscale_all_dim") if said[name]]
        sizes = [_yarn_size(factor, weight) for weight in weights or (1.0,)]
        usual = sizes[0] / sizes[1] if len(sizes) == 2 else _yarn_size(factor, 1.0)
        own = float(said["attention_factor"] or usual)
        if self.of_part:
            return (sizes[-1] ** 2 if said["mscale_all_dim"] else 1.0), own
        return (own * own, 1.0) if said["partial_rotary_factor"] == 1 else (1.0, own)

    def write(self, config: ModelConfig) -> JSON:
        scales = config.attention.layer_scales or (1.0,)
        return self.describe(config.positions, scales[0])

    def describe(self, positions: Positions, scale: float = 1.0) -> JSON:
        """The inverse of `rotary`, for readers of today and of before."""
        if not isinstance(positions, Rotary):
            raise ValueError(f"positions must be rotary, not {positions.name!r}")
        scaled: JSON = {}
        if positions.scaling:
            kind, numbers = read_scaling(positions.scaling)
            names = SCALINGS[kind].numbers
            scaled = {"rope_type": kind.removesuffix("_smooth")}
            scaled |= zip(names, numbers, strict=not SCALINGS[kind].by_length)
            if LENGTH in scaled:
                scaled[LENGTH] = int(scaled[LENGTH])
            if kind == "longrope":
                half = len(numbers) // 2
                scaled |= {"short_factor": [*numbers[1 : half + 1]]}
                scaled |= {"long_factor": [*numbers[half + 1 :]]}
                scaled |= {"attention_factor": positions.scale}
            elif kind == "dynamic":
                del scaled[LENGTH]
            elif scaled["rope_type"] == "yarn":
                scaled |= self._write_scales(scaled["factor"], scale, positions.scale)
                scaled |= {"truncate": kind == "yarn"}
        today = {"rope_type": "default"} | scaled | {"rope_theta": positions.base}
        today |= {"partial_rotary_factor": positions.fraction} if self.fraction else {}
        own: JSON = {self.fraction: positions.fraction} if self.fraction else {}
        own |= {LENGTH: scaled[LENGTH]} if self.outside and LENGTH in scaled else {}
        own |= {self.base: positions.base}
        return own | {"rope_scaling": scaled or None, "rope_parameters": today}

    def _write_scales(self, factor: float, scale: float, rotated: float) -> JSON:
        """The words from which `_yarn_scales` reads these."""
        root = math.sqrt(scale)
        if not self.of_part or scale == 1:
            return {"attention_factor": root if rotated == 1 else rotated}
        weight = (root - 1) / (0.1 * math.log(factor))
        # As somebody may have written it, or one of the numbers that rounding leaves.
        near = round(weight, 9), weight, math.nextafter(weight, 0), math.nextafter(weight, math.inf)
        exact = (one for one in near if _yarn_size(factor, one) ** 2 == scale)
        words = dict.fromkeys(("mscale", "mscale_all_dim"), next(exact, weight))
        return words | ({} if rotated == 1 else {"attention_factor": rotated})


def _yarn_size(factor: float, weight: float) -> float:
    """1 + 0.1 weight log(factor) (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def score_scales(scales: list[float]) -> Values:
    """`attention.layer_scales`, if any layer scales its scores."""
    return {"attention.layer_scales": tuple(scales)} if any(s != 1 for s in scales) else {}


def _collect(attributes: JSON, own: dict[str, str]) -> JSON:
    """What rope_scaling, rope_parameters and the family's own names say, in the words of
    `rope_parameters`."""
    pairs = [
        ("rope_type" if key == "type" else key, f"{name}.{key}", value)
        for name in ("rope_scaling", "rope_parameters")
        for key, value in (attributes[name] or {}).items()
    ]
    pairs += [(key, n, attributes[n]) for key, n in own.items() if attributes[n] is not None]
    before = {key for key, name, _ in pairs if not name.startswith("rope_parameters.")}
    found: JSON = {}
    for key, name, value in pairs:
        if attributes["rope_scaling"] and key not in before:
            raise bad_value(name, value, "is not read beside rope_scaling; write it there too")
        if found.setdefault(key, value) != value:
            why = "contradicts another attribute of the rotary positions, which says "
            raise bad_value(name, value, f"{why}{shown(found[key])}")
    return found


def is_number(value: object) -> bool:
    """Whether a value is a number above 0, of a size that can be computed with."""
    return isinstance(value, int | float) and value is not True and 0 < value <= LARGEST_NUMBER


def _check_words(found: JSON, known: tuple[str, ...], kind: str) -> None:
    """Raise ValueError unless all are known, and numbers are finite and above 0."""
    for key, value in found.items():
        if key not in known:
            raise ValueError(
                f"config.json: {shown(key)[1:-1]} = {shown(value)} of the rotary positions "
                f"(rope_type {kind!r}) is unknown here and may change what the model computes; if "
                "it does not, delete it from config.json"
            )
        if key == "truncate":
            fits, allowed = isinstance(value, bool), "true or false"
        elif key in FACTORS:
            fits = isinstance(value, list) and all(map(is_number, value))
            allowed = "a list of numbers above 0"
        else:
            fits, allowed = is_number(value), "a number above 0"
        if not fits:
            raise bad_value(key, value, f"of the rotary positions must be {allowed}")


def _short(number: int | float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))


# Layers of several types -----------------------------------------------------------------------


TYPES = Attribute("layer_types", kind=list)


def every(pattern: int | str) -> Callable[[JSON], list[str]]:
    """Every layer whose number `pattern` divides has no window, counted from 1; a string is the
    attribute with the pattern.

    >>> every(2)({"num_hidden_layers": 3})[:2]
    ['sliding_attention', 'full_attention']
    """

    def types(attributes: JSON) -> list[str]:
        number = attributes[pattern] if isinstance(pattern, str) else pattern
        if not isinstance(number, int) or number < 1:
            raise bad_value(str(pattern), number, "needs layer_types; it is no number above 0")
        layers = range(attributes["num_hidden_layers"])
        return [SLIDING if (i + 1) % number else FULL for i in layers]

    return types


def types_of(layers: list[LayerOverrides]) -> Values:
    """`layer_types` for what each layer overrides; nothing where all layers are of one type.

    >>> types_of([LayerOverrides(), LayerOverrides()])
    {}
    """
    if len(set(layers)) == 1:
        return {}
    runs, _ = repeating_pattern(layers)[0]
    return {"layer_types": tuple((count, one) for one, count in runs)}


def overrides_of(values: Values, num_layers: int) -> list[LayerOverrides]:
    """The overrides of each layer: the inverse of `types_of`."""
    pattern = values.get("layer_types", ((1, LayerOverrides()),))
    turn = [overrides for count, overrides in pattern for _ in range(count)]
    return [turn[i % len(turn)] for i in range(num_layers)]


@dataclasses.dataclass(frozen=True)
class Window(Field):
    """sliding_window of all layers, which counts the token itself; `switch` is the attribute that
    must be true for it. layer_types may say the same."""

    switch: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = TYPES, Attribute("sliding_window", kind=int, nullable=True)
        return (*own, Attribute(self.switch, False)) if self.switch else own

    def read(self, attributes: JSON, source: Source) -> Values:
        window = attributes["sliding_window"] if attributes.get(self.switch, True) else None
        types, own = attributes["layer_types"] or (), FULL if window is None else SLIDING
        if any(one != own for one in types):
            raise bad_value("layer_types", types, f"is not supported, only {own!r} for every layer")
        return {"attention.window": None if window is None else window - 1}

    def write(self, config: ModelConfig) -> JSON:
        window = config.attention.window
        switch = {self.switch: window is not None} if self.switch else {}
        return switch | {"sliding_window": None if window is None else window + 1}


def _by_window(attributes: JSON) -> list[str]:
    one = FULL if attributes["sliding_window"] is None else SLIDING
    return [one] * int(attributes["num_hidden_layers"])


@dataclasses.dataclass(frozen=True)
class LayerTypes(Field):
    """layer_types and sliding_window.

    Attributes:
      default_window: where config.json has none.
      default_types: attributes -> the types where config.json has none.
      more: attributes that `default_types` reads.
      rope: the rotary positions.
      bases: where layers with a window have rotary positions of their own, and rope_scaling is of
        the others: type of a layer -> what configs before transformers 5 call its base, and its
        default; None: there is none.
      switch: the attribute that must be true for any window.
    """

    default_window: int | None = 4096
    default_types: Callable[[JSON], list[str]] = _by_window
    more: tuple[Attribute, ...] = ()
    rope: RotaryField = RotaryField()
    bases: Mapping[str, tuple[str, float | None]] = dataclasses.field(default_factory=dict)
    switch: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        switch = (Attribute(self.switch, False),) if self.switch else ()
        return (TYPES, self.window_attribute, *switch, *self.more, *self.rope.attributes)

    @property
    def window_attribute(self) -> Attribute:
        """The attribute for the width of the window."""
        return Attribute("sliding_window", self.default_window, int, nullable=True, least=0)

    def window(self, attributes: JSON) -> int:
        """The number of previous tokens that a token with a window attends to."""
        if not attributes["sliding_window"]:
            said = attributes["sliding_window"]
            raise bad_value("sliding_window", said, f"but some layer_types are {SLIDING}")
        return int(attributes["sliding_window"]) - 1

    def write_window(self, window: int | None) -> JSON:
        """The inverse; None where no layer has a window: transformers asks for one all the same."""
        return {"sliding_window": self.default_window if window is None else window + 1}

    def types(self, attributes: JSON) -> list[str]:
        """The type of every layer. Raises ValueError for another number of them than of layers."""
        types, count = attributes["layer_types"], attributes["num_hidden_layers"]
        types = self.default_types(attributes) if types is None else types
        if len(types) != count or any(t not in (SLIDING, FULL) for t in types):
            why = f"is not supported, only {SLIDING!r} or {FULL!r} for each of {count} layers"
            raise bad_value("layer_types", types, why)
        if SLIDING in types and not attributes.get(self.switch, True):
            raise bad_value("layer_types", types, f"need {self.switch} = true")
        return list(types)

    def rotates(self, attributes: JSON, types: list[str]) -> list[bool]:
        """Whether each layer has rotary positions; those without have none."""
        return [True] * len(types)

    def of_type(self, attributes: JSON, type_: str) -> JSON:
        """The attributes of rotary positions, for the layers of one type alone."""
        if not self.bases:
            return attributes
        today, (name, base) = attributes["rope_parameters"] or {}, self.bases[type_]
        objects = all(isinstance(one, dict | None) for one in today.values())
        if set(today) - set(self.bases) or not objects:
            why = f"should be an object with {FULL!r} and {SLIDING!r}"
            raise bad_value("rope_parameters", today, why)
        own, before = today.get(type_) or {}, attributes["rope_scaling"] if type_ == FULL else None
        if any(one.get("truncate") is False for one in (own, before or {})):
            why = "is not supported beside rotary positions of each type of layer: versions of "
            raise bad_value("truncate", False, f"{why}transformers that have these pass it over")
        if before and "rope_type" not in before:
            why = "needs rope_type; versions of transformers that have rotary positions of each "
            raise bad_value("rope_scaling", before, f"{why}type of layer do not read type")
        missing = attributes[name] is None
        return attributes | {
            "rope_parameters": own,
            "rope_scaling": before,
            "rope_theta": own.get("rope_theta", base) if missing else attributes[name],
            LENGTH: None,
        }

    def read(self, attributes: JSON, source: Source) -> Values:
        types = self.types(attributes)
        ropes = {t: self.rope.rotary(self.of_type(attributes, t)) for t in (FULL, SLIDING)}
        window, usual = self.window(attributes) if SLIDING in types else None, ropes[FULL][0]
        scales, layers = list[float](), list[LayerOverrides]()
        for type_, rotates in zip(types, self.rotates(attributes, types), strict=True):
            positions, scale = ropes[type_] if rotates else (NoPositions(), 1.0)
            scales.append(scale)
            layers.append(
                LayerOverrides(
                    window=window if type_ == SLIDING else None,
                    positions=None if positions == usual else positions,
                )
            )
        same, several = layers[0], types_of(layers)
        return {
            "positions": usual if several else same.positions or usual,
            "attention.window": None if several else same.window,
            **score_scales(scales),
            **several,
        }

    def write(self, config: ModelConfig) -> JSON:
        """Windows of several sizes are written as one of them."""
        windows = [config.stacks[name].attention.window for name in config.layer_names]
        types = [FULL if window is None else SLIDING for window in windows]
        ropes = {type_: self._write_rope(config, types, type_) for type_ in (FULL, SLIDING)}
        written = ropes[FULL] | {"layer_types": types}
        written |= self.write_window(next((w for w in windows if w is not None), None))
        written |= {self.switch: SLIDING in types} if self.switch else {}
        if not self.bases:
            return written
        own: JSON = {}
        for type_, (name, _) in self.bases.items():
            base = ropes[type_]["rope_theta"]
            # One attribute cannot have both bases.
            own[name] = base if own.get(name, base) == base else None
        parameters = {type_: rope["rope_parameters"] for type_, rope in ropes.items()}
        return written | own | {"rope_parameters": parameters}

    def _write_rope(self, config: ModelConfig, types: list[str], type_: str) -> JSON:
        """Of the layers of a type; of others where none of these is rotary."""
        positions = [config.stacks[name].positions for name in config.layer_names]
        scales = config.attention.layer_scales or (1.0,) * config.num_layers
        layers = sorted(zip(types, positions, scales, strict=True), key=lambda one: one[0] != type_)
        rotary = [one[1:] for one in layers if one[1].is_rotary]
        unused = Rotary(base=self.rope.default_base), 1.0
        return self.rope.describe(*(rotary or [unused])[0])


class StillTypes(LayerTypes):
    """`LayerTypes` where layers without a window have no positions."""

    def rotates(self, attributes: JSON, types: list[str]) -> list[bool]:
        return [type_ == SLIDING for type_ in types]
