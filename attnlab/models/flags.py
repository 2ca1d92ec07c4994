"""`ModelConfig` as a nested dict, for flags, and as JSON, for checkpoints.

In the dict for flags, a part that is chosen by name (heads, positions) has the fields of its
choice; `choose` makes another choice. A field that is None takes its default. A field that the
choice does not have must be None, or the default of the choices that have it.

>>> from attnlab.heads import Wide
>>> fields = to_dict(ModelConfig(heads=Wide(num_heads=4)))
>>> fields["heads"]["layout"], fields["heads"]["num_heads"]
('wide', 4)
>>> fields["sharing"] = "albert"
>>> from_dict(fields)
ModelConfig(heads=Wide(num_heads=4), sharing='albert')
"""

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_origin

from attnlab.heads import EXTRAS, LAYOUTS, Extra, Layout
from attnlab.heads.layout import Bias
from attnlab.models.config import EncoderConfig, LayerOverrides, LayerType, ModelConfig
from attnlab.models.specs import POSITIONS, Positions
from attnlab.names import lookup, name_in
from attnlab.sharing import Plan

VERSION = 1
"""Of the JSON that `to_json` writes."""

Record: TypeAlias = dict[str, Any]
"""Fields by name: numbers, strings, None, tuples or lists, and records."""
Placeholder: TypeAlias = Callable[[type], object]
"""Type of an unset field -> its placeholder: `ml_collections.config_dict.placeholder`."""
T = TypeVar("T")

ALL_BIASES = "all"
"""Every bias that the layout may have, so that another layout can be chosen by one flag."""


class Choice(NamedTuple):
    """A part of the config that is chosen by name."""

    tag: str
    """The field that names the choice."""
    base: type
    classes: Mapping[str, type]


def _choices() -> tuple[Choice, Choice]:
    return Choice("layout", Layout, LAYOUTS), Choice("kind", Positions, POSITIONS)


def to_dict(config: ModelConfig, placeholder: Placeholder | None = None) -> Record:
    """The config as a nested dict with a field for every flag.

    Args:
      config: the config.
      placeholder: makes the placeholder of an unset field of a type; None leaves None. With
        `ml_collections.config_dict.placeholder` the result can be given to `ConfigDict`.

    Returns:
      A dict that `from_dict` reads as the same config.

    Raises:
      ValueError: a layout or extra that is not registered.

    >>> to_dict(ModelConfig(sharing="albert"))["sharing"]
    'albert'
    """
    return _Writer(dense=True, placeholder=placeholder or (lambda kind: None)).record(config)


def from_dict(fields: Mapping[str, object]) -> ModelConfig:
    """The config of a nested dict. Missing fields, and those that are None, have their defaults.

    Raises:
      ValueError: an unknown field, a field that the chosen layout or positions do not have, or a
        value that is no model.

    >>> from_dict({"positions": {"kind": "learned", "base": 500.0}})
    Traceback (most recent call last):
    ValueError: the position scheme 'learned' has no base: its fields are pad_token, offset; base \
is a field of rotary
    """
    return _read(ModelConfig, fields, "", none_is_unset=True)


def to_json(config: ModelConfig) -> str:
    """The config as JSON: every field of the chosen parts with its value, and a version.

    >>> from_json(to_json(ModelConfig(num_layers=2))) == ModelConfig(num_layers=2)
    True
    """
    fields = _Writer(dense=False, placeholder=lambda kind: None).record(config)
    return json.dumps({"version": VERSION, "model": fields}, indent=2, allow_nan=False)


def from_json(text: str) -> ModelConfig:
    """The config that `to_json` wrote, exactly.

    Raises:
      ValueError: no JSON of a config, or that of another version.

    >>> from_json(to_json(ModelConfig(sharing="albert")))
    ModelConfig(sharing='albert')
    """
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON of a model config: {error}") from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        raise ValueError(
            f"the model config has version {version!r}; this attnlab reads version {VERSION}: "
            "install the release that wrote it"
        )
    return _read(ModelConfig, found.get("model"), "", none_is_unset=False)


# Types of fields ----------------------------------------------------------------------------------


def field_types(cls: type) -> dict[str, type]:
    """Field -> its type, without None: a dataclass, tuple, or int, float, bool, str.

    >>> from attnlab.heads import Gate
    >>> field_types(Gate)
    {'by': <class 'str'>}
    """
    hints = typing.get_type_hints(cls)
    skipped = {"width"} if issubclass(cls, Layout) else set()  # that of the model
    return {
        f.name: _plain_type(hints[f.name]) for f in dataclasses.fields(cls) if f.name not in skipped
    }


def _plain_type(hint: object) -> type:
    """The type of a hint: `int | None` is int, `Literal["a"]` str, `tuple[int, ...]` tuple."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_plain_type(one) for one in get_args(hint) if one is not types.NoneType]
        if str in kinds:  # a string or what it stands for, such as a sharing plan
            return str
        return float if set(kinds) == {int, float} else kinds[0]
    if origin is Literal:
        return type(get_args(hint)[0])
    return cast(type, origin or hint)


def choose(fields: Mapping[str, Any], name: str, placeholder: Placeholder | None = None) -> Record:
    """The record of heads or of positions in a dict of `to_dict`, with another choice: fields that
    both choices have keep their values, the others have their defaults.

    Args:
      fields: the record.
      name: of the layout ("layout" in `fields`) or of the position scheme ("kind").
      placeholder: as of `to_dict`.

    Raises:
      ValueError: an unknown name.

    >>> choose({"kind": "learned", "offset": 2, "pad_token": None}, "none")
    {'kind': 'none'}
    """
    choice = next(one for one in _choices() if one.tag in fields)
    cls: type = _registered(choice.classes, name, choice.tag)
    writer = _Writer(dense=True, placeholder=placeholder or (lambda kind: None))
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    made: Record = {choice.tag: name}
    for field, kind in field_types(cls).items():
        default = defaults[field]
        given = fields.get(field, None if default is dataclasses.MISSING else default)
        made[field] = given if isinstance(given, Mapping) else writer.value(given, kind)
    if "biases" in made and made["biases"] != ALL_BIASES:
        known = cast(type[Layout], cls).bias_names
        names = _read_biases(made["biases"], cast(type[Layout], cls), {})
        made["biases"] = ",".join(name for name in names if name in known)
    return made


# Writing ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Writer:
    """`dense`: with all extras, those that are off too, and fields of None as placeholders (flags).
    Else what there is, with its values (JSON)."""

    dense: bool
    placeholder: Placeholder

    def record(self, value: object, skip: Iterable[str] = ()) -> Record:
        """The fields of a dataclass."""
        kinds = field_types(type(value)).items()
        made = {n: self.value(getattr(value, n), kind) for n, kind in kinds if n not in skip}
        if not self.dense and not made.get("metadata", True):
            del made["metadata"]  # so that the JSON, and digests of it, are those of before
        return made

    def value(self, value: object, kind: type) -> object:
        """One value, of a field of this type."""
        if isinstance(value, Layout):
            return self.layout(value)
        if isinstance(value, Positions):
            return self.choice(value, _choices()[1])
        if isinstance(value, LayerOverrides):
            return self.overrides(value)
        if isinstance(value, Plan):
            return repr(value)
        if isinstance(value, EncoderConfig) and self.dense:
            # Left out where it is the default, so that a flag can choose a model without encoder.
            made: Record = {}
            for field in dataclasses.fields(value):
                a = getattr(value, field.name)
                one = field_types(EncoderConfig)[field.name]
                made[field.name] = self.value(None if a == field.default else a, one)
            return made
        if dataclasses.is_dataclass(value):
            return self.record(value)
        if value is None and self.dense:
            return self.unset(kind)
        if isinstance(value, tuple | list):
            return tuple(self.value(a, type(a)) for a in value)
        return value

    def unset(self, kind: type) -> object:
        """The placeholder of a field without a value; of a record, of all its fields."""
        if dataclasses.is_dataclass(kind):
            return {name: self.unset(one) for name, one in field_types(kind).items()}
        return self.placeholder(kind)

    def choice(self, value: Layout | Positions, choice: Choice) -> Record:
        """A part that is chosen by name."""
        name = _registered_name(value, choice.classes, "@register_layout(name)")
        return {choice.tag: name} | self.record(value, skip=("extras",))

    def layout(self, layout: Layout) -> Record:
        """Heads: fields of the layout, and its extras by name."""
        made = self.choice(layout, _choices()[0])
        if self.dense:
            biases = layout.biases
            is_all = biases == _all_biases(type(layout), _given_fields(layout))
            made["biases"] = ALL_BIASES if is_all and biases else ",".join(biases)
        made["extras"] = {
            _registered_name(extra, EXTRAS, "@register_extra(name)"): {
                "on": True, **self.record(extra),
            }
            for extra in layout.extras
        }  # fmt: skip
        for name, cls in EXTRAS.items() if self.dense else ():
            kinds = field_types(cls)
            defaults = {f.name: f.default for f in dataclasses.fields(cls)}
            given = {n: None if a is dataclasses.MISSING else a for n, a in defaults.items()}
            fields = {n: self.value(a, kinds[n]) for n, a in given.items()}
            made["extras"].setdefault(name, {"on": False, **fields})
        return made

    def overrides(self, overrides: LayerOverrides) -> Record:
        """Of a layer type, the fields that differ from the config; a flag cannot name them."""
        writer = _Writer(dense=False, placeholder=self.placeholder)
        defaults = {f.name: f.default for f in dataclasses.fields(overrides)}
        return {n: a for n, a in writer.record(overrides).items() if a != defaults[n]}


def _registered_name(value: object, classes: Mapping[str, type], decorator: str) -> str:
    try:
        return name_in(classes, type(value), what="class")
    except ValueError as error:
        raise ValueError(f"{error}; or register it, as with {decorator}") from None


# Reading ------------------------------------------------------------------------------------------


def _read(cls: type[T], fields: object, path: str, *, none_is_unset: bool) -> T:
    """A record as an instance of `cls`. `path` is that of the record, for errors."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path or 'a model config'} must be a dict of fields, not {fields!r}")
    kinds = field_types(cls)
    for name in fields:
        if name not in kinds:
            raise ValueError(
                f"{path + ' has' if path else 'a model config has'} no field {name!r}: its fields "
                f"are {', '.join(kinds)}"
            )
    given = {}
    for name, value in fields.items():
        inner = f"{path}.{name}" if path else name
        read = _read_value(value, kinds[name], inner, none_is_unset)
        if read is not None or not none_is_unset:
            given[name] = read
    missing = dataclasses.MISSING
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = (field.default, field.default_factory) != (missing, missing)
        if not has_default and field.name not in given:
            raise ValueError(f"{path}.{field.name} is not set; give it a value")
    return cls(**given)


def _read_value(value: object, kind: type, path: str, none_is_unset: bool) -> object:
    if path == "layer_types" and isinstance(value, Iterable):
        return tuple(_read_layer_type(pair, none_is_unset) for pair in value)
    if value is None:
        return None
    if isinstance(value, str) and value.startswith("Plan("):
        return _read_plan(value, path)
    if kind is tuple:
        return _as_tuple(value)
    if not dataclasses.is_dataclass(kind) or not isinstance(value, Mapping):
        return value
    for choice in _choices():
        if issubclass(kind, choice.base):
            return _read_choice(value, choice, path, none_is_unset)
    if all(a is None for a in _leaves(value)):
        return None
    return _read(kind, value, path, none_is_unset=none_is_unset)


def _read_choice(
    fields: Mapping[str, Any], choice: Choice, path: str, none_is_unset: bool
) -> object:
    """A part that is chosen by name. A set field that the choice does not have is an error."""
    set_fields = dict(fields)
    name = set_fields.pop(choice.tag, None)
    if name is None:
        if all(a is None for a in _leaves(set_fields)):
            return None
        raise ValueError(f"{path}.{choice.tag} is not set; known: {', '.join(choice.classes)}")
    what = "layout" if choice.tag == "layout" else f"{path}.{choice.tag}"
    cls: type = _registered(choice.classes, name, what)
    extras = set_fields.pop("extras", None) or {}
    kinds = field_types(cls)
    for field, value in set_fields.items():
        is_set = any(a is not None for a in _leaves(value))
        if field not in kinds and is_set and not _is_default(choice, field, value):
            _raise_unknown(choice, name, field)
    given = {field: value for field, value in set_fields.items() if field in kinds}
    if not issubclass(cls, Layout):
        return _read(cls, given, path, none_is_unset=none_is_unset)
    biases = given.pop("biases", None)
    layout = _read(cls, given, path, none_is_unset=none_is_unset)
    return dataclasses.replace(
        layout,
        biases=_read_biases(biases, cls, _given_fields(layout)),
        extras=_read_extras(extras, f"{path}.extras", none_is_unset),
    )


def _registered(classes: Mapping[str, type[T]], name: str, what: str) -> type[T]:
    """The class of a name.

    Raises:
      ValueError: an unknown name; the message says how to register a class.
    """
    if name in classes:
        return classes[name]
    try:
        return lookup(classes, name, what=what)
    except ValueError as error:
        raise ValueError(
            f"{error}. One of your own is known once the file that registers it is imported; "
            "commands do so with --import=FILE.py"
        ) from None


def _is_default(choice: Choice, field: str, value: object) -> bool:
    """Is it the default in every class with this field? Then a flag leaves it unset."""
    owners = [cls for cls in choice.classes.values() if field in field_types(cls)]
    defaults = [f.default for cls in owners for f in dataclasses.fields(cls) if f.name == field]
    return bool(defaults) and all(value == default for default in defaults)


def _raise_unknown(choice: Choice, name: str, field: str) -> None:
    own = sorted(field_types(choice.classes[name]), key=lambda field: field == "extras")
    owners = [other for other, cls in choice.classes.items() if field in field_types(cls)]
    hint = f"; {field} is a field of {', '.join(owners)}" if owners else ""
    what = "layout" if choice.tag == "layout" else "the position scheme"
    raise ValueError(
        f"{what} {name!r} has no {field}: its fields are {', '.join(own) or 'none'}{hint}"
    )


def _read_extras(fields: object, path: str, none_is_unset: bool) -> tuple[Extra, ...]:
    """The extras that are on, in their order."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path} must be a dict of extras by name, not {fields!r}")
    made = []
    for name, given in fields.items():
        cls = _registered(EXTRAS, name, "extra")
        rest = {field: value for field, value in given.items() if field != "on"}
        if given.get("on", True):
            made.append(_read(cls, rest, f"{path}.{name}", none_is_unset=none_is_unset))
    return tuple(made)


def _read_biases(
    biases: str | Sequence[Bias] | None, cls: type[Layout], fields: Record
) -> tuple[Bias, ...]:
    """ "all", names separated by commas, or a sequence of names."""
    if biases == ALL_BIASES:
        return _all_biases(cls, fields)
    if isinstance(biases, str):
        names = [name.strip() for name in biases.split(",") if name.strip()]
        return cast(tuple[Bias, ...], tuple(names))  # the layout checks them
    return tuple(biases or ())


def _all_biases(cls: type[Layout], fields: Record) -> tuple[Bias, ...]:
    """The biases that a layout with these fields may have, in the order of its class."""

    # Any number of heads divides it, and the heads have an even width.
    width = 4 * int(fields["num_heads"])

    def is_allowed(bias: Bias) -> bool:
        try:
            cls(**{**fields, "width": width, "biases": (bias,)})
        except ValueError:
            return False
        return True

    return tuple(bias for bias in cls.bias_names if is_allowed(bias))


def _given_fields(layout: Layout) -> Record:
    """Fields of a layout that decide which biases it may have."""
    kept = {"num_heads", "tie", "output_projection"}
    return {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout) if f.name in kept}


def _read_layer_type(pair: object, none_is_unset: bool) -> LayerType:
    """(count, overrides) of a layer type."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ValueError(f"layer_types holds pairs (count, overrides), not {pair!r}")
    count, fields = pair
    overrides = _read(LayerOverrides, fields, "layer_types", none_is_unset=none_is_unset)
    return count, overrides


def _read_plan(text: str, path: str) -> Plan:
    """A plan of `repr(plan)`."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        groups = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(
            f"{path}: cannot parse {text!r}; write a plan as 'Plan(attention=(0, 0), ffn=(0, 1))'"
        ) from None
    return Plan(**groups)


def _as_tuple(value: object) -> object:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _leaves(value: object) -> list[object]:
    """Values of a record and of the records in it."""
    if not isinstance(value, Mapping):
        return [value]
    return [leaf for inner in value.values() for leaf in _leaves(inner)]
