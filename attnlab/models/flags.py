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
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from attnlab.heads import EXTRAS, LAYOUTS, Extra, Layout
from attnlab.heads.layout import Bias
from attnlab.heads.standard import UNTIED
from attnlab.models.config import EncoderConfig, LayerOverrides, ModelConfig
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


def _no_placeholder(kind: type) -> None:
    """`Placeholder` of a dict in which unset fields are None."""


def _choice(cls: type) -> tuple[str, Mapping[str, type]] | None:
    """Of a part that is chosen by name: the field that names it, and the classes by name."""
    if issubclass(cls, Layout):
        return "layout", LAYOUTS
    return ("kind", POSITIONS) if issubclass(cls, Positions) else None


def to_dict(config: ModelConfig, placeholder: Placeholder = _no_placeholder) -> Record:
    """The config as a nested dict with a field for every flag.

    Args:
      config: the config.
      placeholder: makes the placeholder of an unset field of a type; by default None. With
        `ml_collections.config_dict.placeholder` the result can be given to `ConfigDict`.

    Returns:
      A dict that `from_dict` reads as the same config.

    Raises:
      ValueError: a layout or extra that is not registered.

    >>> to_dict(ModelConfig(sharing="albert"))["sharing"]
    'albert'
    """
    made, heads = _record(config, placeholder), config.heads
    biases = ALL_BIASES if heads.biases == _all_biases(heads) != () else ",".join(heads.biases)
    made["heads"]["biases"] = biases
    for name, cls in EXTRAS.items():
        defaults = _fields(cls, _defaults(cls), placeholder)
        made["heads"]["extras"].setdefault(name, {"on": False, **defaults})
    if config.encoder is not None:
        # Unset where it has its default, so that a flag can choose a model without encoder.
        default, written = EncoderConfig(), made["encoder"]
        for name, kind in field_types(EncoderConfig).items():
            if getattr(config.encoder, name) == getattr(default, name):
                written[name] = _unset(kind, placeholder)
    return made


def from_dict(fields: Mapping[str, object]) -> ModelConfig:
    """The config of a nested dict. Missing fields, and those that are None, have their defaults.

    Raises:
      ValueError: an unknown field, a field that the chosen layout or positions do not have, or a
        value that is no model.

    >>> from_dict({"positions": {"kind": "learned", "base": 500.0}})
    Traceback (most recent call last):
    ValueError: positions has no field 'base': the fields of Learned are pad_token, offset
    """
    return _read(ModelConfig, _set_fields(fields), "")


def to_json(config: ModelConfig) -> str:
    """The config as JSON: every field of the chosen parts with its value, and a version.

    >>> from_json(to_json(ModelConfig(num_layers=2))) == ModelConfig(num_layers=2)
    True
    """
    fields = _record(config)
    if not config.metadata:
        del fields["metadata"]  # so that the JSON, and digests of it, are those of before
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
        raise ValueError(f"a config of version {version!r}; this attnlab reads version {VERSION}")
    return _read(ModelConfig, found.get("model"), "")


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


def choose(
    fields: Mapping[str, Any], name: str, placeholder: Placeholder = _no_placeholder
) -> Record:
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
    tag, classes = ("layout", LAYOUTS) if "layout" in fields else ("kind", POSITIONS)
    cls: type = _registered(classes, name, tag)
    made: Record = {tag: name} | _fields(cls, _defaults(cls) | dict(fields), placeholder)
    if made.get("biases", ALL_BIASES) != ALL_BIASES:
        known = cast(type[Layout], cls).bias_names
        made["biases"] = ",".join(n for n in _bias_names(made["biases"]) if n in known)
    return made


# Writing ------------------------------------------------------------------------------------------


def _record(value: object, placeholder: Placeholder | None = None) -> Record:
    """The fields of a dataclass by name. Heads and positions begin with the name of their class; a
    layer type has the fields that it overrides; extras are a record by name.

    Args:
      value: the dataclass.
      placeholder: of unset fields; None leaves them None, as JSON does.
    """
    cls = type(value)
    fields: Record = {name: getattr(value, name) for name in field_types(cls)}
    made: Record = {}
    if (choice := _choice(cls)) is not None:
        made[choice[0]] = name_in(choice[1], cls, what="class")
    if isinstance(value, LayerOverrides):
        defaults = _defaults(cls)
        fields = {name: a for name, a in fields.items() if a != defaults[name]}
    made |= _fields(cls, fields, placeholder)
    if isinstance(value, Layout):
        del made["extras"]
        made["extras"] = {}  # the last field
        for extra in value.extras:
            name = name_in(EXTRAS, type(extra), what="class")
            made["extras"][name] = {"on": True, **_record(extra, placeholder)}
    return made


def _fields(cls: type, values: Record, placeholder: Placeholder | None) -> Record:
    """Those of the values that are fields of the class, as `_value` writes them."""
    kinds = field_types(cls)
    return {n: _value(values[n], kind, placeholder) for n, kind in kinds.items() if n in values}


def _value(value: object, kind: type, placeholder: Placeholder | None) -> object:
    """One value, of a field of this type. Layer types, which flags cannot name, are as in JSON."""
    if value is None:
        return None if placeholder is None else _unset(kind, placeholder)
    if isinstance(value, Plan):
        return repr(value)
    if isinstance(value, LayerOverrides):
        return _record(value)
    if dataclasses.is_dataclass(value):
        return _record(value, placeholder)
    if isinstance(value, tuple | list):
        return tuple(_value(one, type(one), placeholder) for one in value)
    return value


def _unset(kind: type, placeholder: Placeholder) -> object:
    """The placeholder of a type; of a record, those of all its fields."""
    if dataclasses.is_dataclass(kind):
        return {name: _unset(one, placeholder) for name, one in field_types(kind).items()}
    return placeholder(kind)


def _defaults(cls: type) -> Record:
    """Field -> its default; None where it has none."""
    fields = ((f.name, f.default) for f in dataclasses.fields(cls))
    return {name: None if a is dataclasses.MISSING else a for name, a in fields}


# Reading ------------------------------------------------------------------------------------------


def _set_fields(fields: Mapping[str, Any]) -> Record:
    """Without fields that are None, and records that then are empty."""
    kept = {n: _set_fields(a) if isinstance(a, Mapping) else a for n, a in fields.items()}
    return {n: a for n, a in kept.items() if a is not None and a != {}}


def _read(cls: type[T], fields: object, path: str) -> T:
    """A record as an instance of `cls`. `path` is that of the record, for errors."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path or 'a model config'} must be a dict of fields, not {fields!r}")
    kinds = field_types(cls)
    if unknown := [name for name in fields if name not in kinds]:
        raise ValueError(
            f"{path or 'a model config'} has no field {unknown[0]!r}: the fields of {cls.__name__} "
            f"are {', '.join(kinds) or 'none'}"
        )
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = {field.default, field.default_factory} != {dataclasses.MISSING}
        if not has_default and field.name not in fields:
            raise ValueError(f"{path}.{field.name} is not set; give it a value")
    outer = f"{path}." if path else ""
    return cls(**{n: _read_value(a, kinds[n], f"{outer}{n}") for n, a in fields.items()})


def _read_value(value: object, kind: type, path: str) -> object:
    if path == "layer_types" and isinstance(value, Iterable):
        return tuple(map(_read_layer_type, value))
    if isinstance(value, str) and value.startswith("Plan("):
        return _read_plan(value, path)
    if not dataclasses.is_dataclass(kind) or not isinstance(value, Mapping):
        return value
    if (choice := _choice(kind)) is None:
        return _read(kind, value, path)
    (tag, classes), given = choice, dict(value)
    if (name := given.pop(tag, None)) is None:
        raise ValueError(f"{path}.{tag} is not set; known: {', '.join(classes)}")
    cls: type = _registered(classes, name, "layout" if tag == "layout" else f"{path}.{tag}")
    if not issubclass(cls, Layout):
        return _read(cls, given, path)
    biases, extras = given.pop("biases", ()), given.pop("extras", {})
    layout = _read(cls, given, path)
    names = _all_biases(layout) if biases == ALL_BIASES else _bias_names(biases)
    return dataclasses.replace(layout, biases=names, extras=_read_extras(extras, f"{path}.extras"))


def _registered(classes: Mapping[str, type[T]], name: str, what: str) -> type[T]:
    """The class of a name.

    Raises:
      ValueError: an unknown name; the message says how to register a class.
    """
    try:
        return lookup(classes, name, what=what)
    except ValueError as error:
        raise ValueError(
            f"{error}. Your own is known once its file is imported, as by --import=FILE.py"
        ) from None


def _read_extras(fields: object, path: str) -> tuple[Extra, ...]:
    """The extras that are on, in their order."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path} must be a dict of extras by name, not {fields!r}")
    made = []
    for name, given in fields.items():
        cls = _registered(EXTRAS, name, "extra")
        if not isinstance(given, Mapping):
            raise ValueError(f"{path}.{name} must be a dict of its fields, not {given!r}")
        own = {field: value for field, value in given.items() if field != "on"}
        if given.get("on", True):
            made.append(_read(cls, own, f"{path}.{name}"))
        elif changed := [n for n, value in own.items() if value != _defaults(cls).get(n)]:
            raise ValueError(
                f"{path}.{name}.{changed[0]}={own[changed[0]]!r} has no effect while the extra is "
                f"off; set {path}.{name}.on=True, or give {changed[0]} its default"
            )
    return tuple(made)


def _bias_names(biases: str | Sequence[Bias]) -> tuple[Bias, ...]:
    """Names separated by commas, or a sequence of names; the layout checks them."""
    if not isinstance(biases, Iterable):
        raise ValueError(f"biases must be names such as 'q,k', not {biases!r}")
    names = biases.replace(",", " ").split() if isinstance(biases, str) else biases
    return cast(tuple[Bias, ...], tuple(names))


def _all_biases(layout: Layout) -> tuple[Bias, ...]:
    """The biases that a layout with these fields may have."""
    absent = {*UNTIED[getattr(layout, "tie", "")]}
    if not layout.output_projection:
        absent.add("o")
    return tuple(bias for bias in layout.bias_names if bias not in absent)


def _read_layer_type(pair: object) -> object:
    """(count, overrides) of a layer type; the config refuses what is none."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], Mapping):
        return pair
    return pair[0], _read(LayerOverrides, pair[1], "layer_types")


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
