"""`layer_types` of a config.json: layers with a sliding window and layers without."""

import dataclasses
from collections.abc import Callable, Mapping

from attnlab.models.config import LayerOverrides, ModelConfig
from attnlab.models.specs import Positions
from attnlab.nested import JSON
from attnlab.pretrained.attributes import Attribute, bad_value
from attnlab.pretrained.fields import Field, Source, Values
from attnlab.pretrained.rope import RotaryField, score_scales
from attnlab.sharing.scan import repeating_pattern

SLIDING, FULL = "sliding_attention", "full_attention"


def every(num_layers: int, pattern: int) -> list[str]:
    """Every layer whose number `pattern` divides has no window, counted from 1.

    >>> every(5, 2)[:2]
    ['sliding_attention', 'full_attention']
    """
    return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]


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
    """sliding_window of all layers; it counts the token itself."""

    default: int | None = 4096

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        return (Attribute("sliding_window", self.default, nullable=True, json_type=int),)

    def read(self, attributes: JSON, source: Source) -> Values:
        window = attributes["sliding_window"]
        return {"attention.window": None if window is None else window - 1}

    def write(self, config: ModelConfig) -> JSON:
        window = config.attention.window
        return {"sliding_window": None if window is None else window + 1}


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
    """

    default_window: int = 4096
    default_types: Callable[[JSON], list[str]] = _by_window
    more: tuple[Attribute, ...] = ()
    rope: RotaryField = RotaryField()

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        types = Attribute("layer_types", None, nullable=True, json_type=list)
        return (types, self.window_attribute, *self.more, *self.rope.attributes)

    @property
    def window_attribute(self) -> Attribute:
        """The attribute for the width of the window."""
        return Attribute("sliding_window", self.default_window, nullable=True)

    def window(self, attributes: JSON) -> int:
        """The number of previous tokens that a token with a window attends to."""
        if attributes["sliding_window"] is None:
            raise ValueError(
                f"config.json: sliding_window = None, but some layer_types are {SLIDING}"
            )
        return int(attributes["sliding_window"]) - 1

    def write_window(self, window: int | None) -> JSON:
        """The inverse; None where no layer has a window."""
        return {"sliding_window": None if window is None else window + 1}

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

    def positions(self, attributes: JSON) -> dict[str, Positions]:
        """Type of a layer -> its positions."""
        return dict.fromkeys((FULL, SLIDING), self.rope.positions(attributes))

    def score_scales(self, attributes: JSON) -> dict[str, float]:
        """Type of a layer -> factor of its scores."""
        return dict.fromkeys((FULL, SLIDING), self.rope.score_scale(attributes))

    def read(self, attributes: JSON, source: Source) -> Values:
        types, positions = self.types(attributes), self.positions(attributes)
        scales = self.score_scales(attributes)
        window = self.window(attributes) if SLIDING in types else None
        base = FULL if FULL in types else SLIDING
        values: Values = {
            "positions": positions[base],
            "attention.window": None if base == FULL else window,
        }
        values |= score_scales([scales[type_] for type_ in types])
        own = positions[SLIDING] if positions[SLIDING] != positions[FULL] else None
        slides = LayerOverrides(window=window, positions=own)
        return values | types_of([slides if t == SLIDING else LayerOverrides() for t in types])

    def write(self, config: ModelConfig) -> JSON:
        """Raises ValueError if windows have different sizes."""
        windows = {c.attention.window for c in config.stacks.values()} - {None}
        if len(windows) > 1:
            raise ValueError(f"all layers with a window must have the same, not {windows}")
        slides = {name: c.attention.window is not None for name, c in config.stacks.items()}
        return self.write_positions(config) | {
            "layer_types": [SLIDING if slides[name] else FULL for name in config.layer_names],
            **self.write_window(next(iter(windows), None)),
        }

    def write_positions(self, config: ModelConfig) -> JSON:
        """The attributes of rotary positions."""
        return self.rope.describe(positions_of(config, FULL), _scale_of(config, FULL))


@dataclasses.dataclass(frozen=True)
class TypedRotary(LayerTypes):
    """Layers with a window have rotary positions of their own; rope_scaling is of the others.

    Attributes:
      bases: type of a layer -> what configs before transformers 5 call its base, and its default;
        None: there is none.
    """

    bases: Mapping[str, tuple[str, float | None]] = dataclasses.field(default_factory=dict)

    def positions(self, attributes: JSON) -> dict[str, Positions]:
        return {t: self.rope.positions(self._of_type(attributes, t)) for t in self.bases}

    def score_scales(self, attributes: JSON) -> dict[str, float]:
        return {t: self.rope.score_scale(self._of_type(attributes, t)) for t in self.bases}

    def _of_type(self, attributes: JSON, type_: str) -> JSON:
        """The attributes of rotary positions, for the layers of one type alone."""
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

    def write_positions(self, config: ModelConfig) -> JSON:
        ropes = {
            t: self.rope.describe(positions_of(config, t), _scale_of(config, t)) for t in self.bases
        }
        own: JSON = {}
        for type_, (name, _) in self.bases.items():
            base = ropes[type_]["rope_theta"]
            # One attribute cannot have both bases.
            own[name] = base if own.get(name, base) == base else None
        parameters = {type_: rope["rope_parameters"] for type_, rope in ropes.items()}
        return ropes[FULL] | own | {"rope_parameters": parameters}


def _scale_of(config: ModelConfig, type_: str) -> float:
    """What multiplies the scores of the layers of a type; of all, if there are none."""
    scales = config.attention.layer_scales or (1.0,) * config.num_layers
    windows = [config.stacks[name].attention.window for name in config.layer_names]
    mine = [s for s, w in zip(scales, windows, strict=True) if (w is None) == (type_ == FULL)]
    return (mine or list(scales))[0]


def positions_of(config: ModelConfig, type_: str) -> Positions:
    """The positions of the layers of a type; if there are none, those of the others."""
    stacks = sorted(
        config.stacks.values(), key=lambda c: (c.attention.window is None) == (type_ == SLIDING)
    )
    return stacks[0].positions
