"""Rotary positions in a config.json, of today (`rope_parameters`) and before transformers 5; and
`layer_types`: layers with a sliding window and layers without."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import cast

from attnlab.heads.positions import SCALINGS, read_scaling
from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.models.specs import NoPositions, Positions, Rotary
from attnlab.nested import JSON
from attnlab.pretrained.attributes import LARGEST_NUMBER, Attribute, bad_value, shown
from attnlab.pretrained.fields import Field, Source, Values
from attnlab.sharing.scan import repeating_pattern

SLIDING, FULL = "sliding_attention", "full_attention"
LENGTH = "original_max_position_embeddings"


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
      length: an attribute that says original_max_position_embeddings before `rope_parameters`.
      of_part: they are of a part of each query and key, and YaRN's mscale_all_dim scales the scores
        of all (DeepSeek).
    """

    base: str = "rope_theta"
    fraction: str = ""
    default_fraction: float = 1.0
    default_base: float = 10000.0
    required: tuple[str, ...] = ()
    scalings: tuple[str, ...] = tuple(SCALINGS)
    length: str = ""
    of_part: bool = False

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = [Attribute(name) for name in (self.base, self.fraction, self.length) if name]
        objects = (Attribute(name, kind=dict) for name in ("rope_parameters", "rope_scaling"))
        return (*objects, *own)

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
        own = {"rope_theta": self.base, "partial_rotary_factor": self.fraction}
        found = _collect(attributes, own)
        for name in self.required:
            if name not in found:
                raise ValueError(
                    f"config.json: rope_parameters has no {name}, and its default is not the same "
                    "in all versions of transformers; write it"
                )
        kind = found.pop("rope_type", "default")
        kind = "longrope" if kind == "su" else kind  # its first name
        if self.length and kind != "default" and attributes[self.length] is not None:
            found[LENGTH] = attributes[self.length]
        factors = _pop_longrope(found, attributes) if kind == "longrope" else []
        yarn = _pop_yarn(found) if kind == "yarn" else {}
        kind = "yarn_smooth" if yarn.pop("truncate", True) is False else kind
        if kind != "default" and (not isinstance(kind, str) or kind not in self.scalings):
            why = f"is not supported; known: {', '.join(('default', *self.scalings))}"
            raise bad_value("rope_type", kind, why)
        names = () if kind == "default" else SCALINGS[kind].numbers
        numbers: JSON = {
            "rope_theta": self.default_base,
            "partial_rotary_factor": self.default_fraction,
        }
        _check_numbers(found, (*numbers, *names, *("attention_factor",) * bool(factors)), kind)
        numbers |= found
        if LENGTH in names:
            usual = attributes["max_position_embeddings"]
            numbers[LENGTH] = usual if kind == "dynamic" else numbers.get(LENGTH, usual)
        if missing := [n for n in names if n not in numbers]:
            raise ValueError(f"config.json: rope_type {kind!r} needs {missing[0]}")
        share = numbers["partial_rotary_factor"]
        if not self.fraction and share != 1:
            why = "is not supported in this family, only 1.0"
            raise bad_value("partial_rotary_factor", share, why)
        scales, rotated = 1.0, float(found.get("attention_factor", 1.0))
        if yarn:
            scales, rotated = self._scales(numbers["factor"], yarn, whole=share == 1)
        scaling = [_short(number) for number in (*(numbers[name] for name in names), *factors)]
        positions = Rotary(
            base=float(numbers["rope_theta"]),
            fraction=float(share),
            scaling=f"{kind}:{','.join(scaling)}" if names else None,
            scale=rotated,
        )
        return positions, scales

    def _scales(self, factor: float, said: JSON, *, whole: bool) -> tuple[float, float]:
        """What YaRN multiplies scores by, and rotated numbers; `whole`: all are rotated."""
        weights = [said[name] for name in ("mscale", "mscale_all_dim") if said[name]]
        sizes = [_yarn_size(factor, weight) for weight in weights or (1.0,)]
        usual = sizes[0] / sizes[1] if len(sizes) == 2 else _yarn_size(factor, 1.0)
        own = float(said["attention_factor"] or usual)
        if not self.of_part:
            return (own**2, 1.0) if whole else (1.0, own)
        return (sizes[-1] ** 2 if said["mscale_all_dim"] else 1.0), own

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
            scaled |= zip(names, numbers, strict=not SCALINGS[kind].by_length)
            if LENGTH in scaled:
                scaled[LENGTH] = int(scaled[LENGTH])
            scaled["rope_type"] = kind.removesuffix("_smooth")
            if kind == "longrope":
                half = len(numbers) // 2
                scaled |= {"short_factor": [*numbers[1 : half + 1]]}
                scaled |= {"long_factor": [*numbers[half + 1 :]]}
                scaled["attention_factor"] = positions.scale
            if kind.startswith("yarn"):
                scaled |= self._write_yarn(scale, scaled["factor"]) | {"truncate": kind == "yarn"}
                scaled |= {"attention_factor": positions.scale} if positions.scale != 1 else {}
            if kind == "dynamic":
                del scaled[LENGTH]
        today = {"rope_type": "default"} | scaled | {"rope_theta": positions.base}
        today |= {"partial_rotary_factor": positions.fraction} if self.fraction else {}
        own: JSON = {self.fraction: positions.fraction} if self.fraction else {}
        own |= {self.length: scaled[LENGTH]} if self.length and LENGTH in scaled else {}
        own |= {self.base: positions.base}
        return own | {"rope_scaling": scaled or None, "rope_parameters": today}

    def _write_yarn(self, scale: float, factor: float) -> JSON:
        """The attributes from which `_score_scale` reads this."""
        root = math.sqrt(scale)
        if not self.of_part or scale == 1:
            roots = [one for one in _near(root) if one**2 == scale]
            return {"attention_factor": (roots or [root])[0]}
        weight = (root - 1) / (0.1 * math.log(factor))
        near = (round(weight, 9), *_near(weight))
        exact = (one for one in near if _yarn_size(factor, one) ** 2 == scale)
        return dict.fromkeys(("mscale", "mscale_all_dim"), next(exact, weight))


def _yarn_size(factor: float, weight: float) -> float:
    """1 + 0.1 weight log(factor) (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _near(number: float) -> tuple[float, float, float]:
    """A number and the next ones, one of which may be exact where it is rounded."""
    return number, math.nextafter(number, 0), math.nextafter(number, math.inf)


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
    pairs += [(key, n, attributes[n]) for key, n in own.items() if n and attributes[n] is not None]
    found: JSON = {}
    for key, name, value in pairs:
        if found.setdefault(key, value) != value:
            why = "contradicts another attribute of the rotary positions, which says "
            raise bad_value(name, value, f"{why}{shown(found[key])}")
    return found


def _pop_yarn(found: JSON) -> JSON:
    """The words of YaRN that `Rotary` does not hold; leaves the others with their defaults."""
    yarn = {n: found.pop(n, None) for n in ("attention_factor", "mscale", "mscale_all_dim")}
    for name, number in yarn.items():
        if number is not None and (not isinstance(number, int | float) or number <= 0):
            raise bad_value(name, number, "must be above 0")
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        found[name] = found.get(name) or default
    yarn["truncate"] = found.pop("truncate", True)
    if not isinstance(yarn["truncate"], bool):
        raise bad_value("truncate", yarn["truncate"], "should be true or false")
    return yarn


def _pop_longrope(found: JSON, attributes: JSON) -> list[float]:
    """The short and the long factors; leaves the attention factor and the length of training."""
    factors = []
    for name in ("short_factor", "long_factor"):
        own = found.pop(name, None)
        if not isinstance(own, list) or not all(_is_number(one) for one in own):
            raise bad_value(
                name, own, "of rope_type 'longrope' should be a list of numbers above 0"
            )
        factors.append(own)
    if len(factors[0]) != len(factors[1]):
        why = f"has {len(factors[1])} numbers, short_factor {len(factors[0])}"
        raise bad_value("long_factor", factors[1], why)
    longest = attributes["max_position_embeddings"]
    trained, factor = found.setdefault(LENGTH, longest), found.pop("factor", None)
    if not all(_is_number(one) for one in (trained, longest if factor is None else factor)):
        raise bad_value("factor", factor, "of rope_type 'longrope' should be a number above 0")
    factor = float(longest / trained if factor is None else factor)
    growth = math.log(max(1.0, factor))
    if found.get("attention_factor") is None:
        found["attention_factor"] = math.sqrt(1 + growth / math.log(max(cast(float, trained), 2)))
    return [*factors[0], *factors[1]]


def _is_number(value: object) -> bool:
    """Whether a value is a number above 0, of a size that can be computed with."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= LARGEST_NUMBER  # type: ignore[operator]


def _check_numbers(found: JSON, known: tuple[str, ...], kind: str) -> None:
    """Raise ValueError unless all are known numbers, finite and above 0."""
    for key, value in found.items():
        if key not in known:
            raise ValueError(
                f"config.json: {shown(key)[1:-1]} = {shown(value)} of the rotary positions "
                f"(rope_type {kind!r}) is unknown here and may change what the model computes"
            )
        if not _is_number(value):
            raise bad_value(key, value, "of the rotary positions must be above 0")


def _short(number: int | float) -> str:
    """8.0 -> "8", and any other number so that it is read again exactly."""
    return repr(int(number)) if float(number).is_integer() else repr(float(number))


# Layers of several types -----------------------------------------------------------------------


def every(pattern: int | str) -> Callable[[JSON], list[str]]:
    """Every layer whose number `pattern` divides has no window, counted from 1; a string is the
    attribute with the pattern.

    >>> every(2)({"num_hidden_layers": 3})[:2]
    ['sliding_attention', 'full_attention']
    """

    def types(attributes: JSON) -> list[str]:
        number = attributes[pattern] if isinstance(pattern, str) else pattern
        layers = range(attributes["num_hidden_layers"])
        return [SLIDING if number and (i + 1) % number else FULL for i in layers]

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
    must be true for it."""

    default: int | None = 4096
    switch: str = ""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        own = Attribute("sliding_window", self.default, int, nullable=True)
        return (own, Attribute(self.switch, False)) if self.switch else (own,)

    def read(self, attributes: JSON, source: Source) -> Values:
        window = attributes["sliding_window"] if attributes.get(self.switch, True) else None
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
    """

    default_window: int | None = 4096
    default_types: Callable[[JSON], list[str]] = _by_window
    more: tuple[Attribute, ...] = ()
    rope: RotaryField = RotaryField()
    bases: Mapping[str, tuple[str, float | None]] = dataclasses.field(default_factory=dict)

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        types = Attribute("layer_types", kind=list)
        return (types, self.window_attribute, *self.more, *self.rope.attributes)

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
        types = attributes["layer_types"]
        types = self.default_types(attributes) if types is None else types
        if not types or any(t not in (SLIDING, FULL) for t in types):
            why = f"is not supported, only a list of {SLIDING!r} and {FULL!r}"
            raise bad_value("layer_types", types, why)
        if len(types) != attributes["num_hidden_layers"]:
            why = f"are {len(types)}, num_hidden_layers is {attributes['num_hidden_layers']}"
            raise bad_value("layer_types", types, why)
        return list(types)

    def of_type(self, attributes: JSON, type_: str) -> JSON:
        """The attributes of rotary positions, for the layers of one type alone."""
        if not self.bases:
            return attributes
        today, (name, base) = attributes["rope_parameters"] or {}, self.bases[type_]
        objects = all(isinstance(one, dict | None) for one in today.values())
        if set(today) - set(self.bases) or not objects:
            why = f"should be an object with {FULL!r} and {SLIDING!r}"
            raise bad_value("rope_parameters", today, why)
        own = today.get(type_) or {"rope_type": "default"}
        if own.get("truncate") is False:
            why = "is not supported beside rotary positions of each type of layer: versions of "
            raise bad_value("truncate", False, f"{why}transformers that have these pass it over")
        missing = attributes[name] is None and "rope_theta" not in own
        return attributes | {
            "rope_parameters": own,
            "rope_scaling": attributes["rope_scaling"] if type_ == FULL else None,
            "rope_theta": base if missing else attributes[name],
        }

    def read(self, attributes: JSON, source: Source) -> Values:
        types = self.types(attributes)
        ropes = {t: self.rope.rotary(self.of_type(attributes, t)) for t in (FULL, SLIDING)}
        window = self.window(attributes) if SLIDING in types else None
        base = FULL if FULL in types else SLIDING
        values: Values = {
            "positions": ropes[base][0],
            "attention.window": None if base == FULL else window,
        }
        own = ropes[SLIDING][0] if ropes[SLIDING][0] != ropes[FULL][0] else None
        slides = LayerOverrides(window=window, positions=own)
        values |= score_scales([ropes[type_][1] for type_ in types])
        return values | types_of([slides if t == SLIDING else LayerOverrides() for t in types])

    def write(self, config: ModelConfig) -> JSON:
        """Windows of several sizes are written as one of them."""
        windows = [config.stacks[name].attention.window for name in config.layer_names]
        ropes = {t: self.rope.describe(*_rotary_of(config, windows, t)) for t in (FULL, SLIDING)}
        written = ropes[FULL] | {
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            **self.write_window(next((w for w in windows if w is not None), None)),
        }
        if not self.bases:
            return written
        own: JSON = {}
        for type_, (name, _) in self.bases.items():
            base = ropes[type_]["rope_theta"]
            # One attribute cannot have both bases.
            own[name] = base if own.get(name, base) == base else None
        parameters = {type_: rope["rope_parameters"] for type_, rope in ropes.items()}
        return written | own | {"rope_parameters": parameters}


STILL = NoPositions()


class StillTypes(LayerTypes):
    """`LayerTypes` where some layers have no positions: here those without a window."""

    def turns(self, attributes: JSON, types: list[str]) -> list[bool]:
        """Whether each layer has rotary positions."""
        return [type_ == SLIDING for type_ in types]

    def write_turns(self, turns: list[bool]) -> JSON:
        """The inverse, beyond layer_types."""
        return {}

    def read(self, attributes: JSON, source: Source) -> Values:
        types = self.types(attributes)
        turns = self.turns(attributes, types)
        rotary, scale = self.rope.rotary(attributes)
        window = self.window(attributes) if SLIDING in types else None
        layers = [
            LayerOverrides(
                window=window if type_ == SLIDING else None, positions=None if turn else STILL
            )
            for type_, turn in zip(types, turns, strict=True)
        ]
        first, same = layers[0], len(set(layers)) == 1
        return {
            "positions": (first.positions if same else None) or rotary,
            "attention.window": first.window if same else None,
            **score_scales([scale if turn else 1.0 for turn in turns]),
            **types_of(layers),
        }

    def write(self, config: ModelConfig) -> JSON:
        stacks = [config.stacks[name] for name in config.layer_names]
        scales = config.attention.layer_scales or (1.0,) * config.num_layers
        turns = [stack.positions.is_rotary for stack in stacks]
        first = turns.index(True) if any(turns) else None
        unused = (Rotary(base=self.rope.default_base), 1.0)
        rotary = unused if first is None else (stacks[first].positions, scales[first])
        windows = [stack.attention.window for stack in stacks]
        return {
            **self.rope.describe(*rotary),
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            **self.write_window(next((w for w in windows if w is not None), None)),
            **self.write_turns(turns),
        }


def _rotary_of(
    config: ModelConfig, windows: list[int | None], type_: str
) -> tuple[Positions, float]:
    """The positions, and the factor of scores, of the layers of a type; of others if there are
    none."""
    scales = config.attention.layer_scales or (1.0,) * config.num_layers
    layers = list(zip(config.layer_names, scales, windows, strict=True))
    layers.sort(key=lambda layer: (layer[2] is None) != (type_ == FULL))
    return config.stacks[layers[0][0]].positions, layers[0][1]
