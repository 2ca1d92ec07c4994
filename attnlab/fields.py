"""Checks of the fields of dataclasses by their annotations and bounds; an error says what is
allowed."""

import contextlib
import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from attnlab.names import check_keywords, lookup

T = TypeVar("T")
SpecT = TypeVar("SpecT", bound="Spec")

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of a float field: the configs of models compute in float32."""
FLOATS = (float, float | None, tuple[float, ...], tuple[float, ...] | None)
"""Types of fields whose whole numbers become floats."""

BOUNDS: dict[str, tuple[str, Callable[[Any, int | float], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}
"""Bound of a number -> (words for it, comparison)."""


def bounded(default: T, **bounds: int | float) -> T:
    """A field of a dataclass with a default and bounds, named as in `BOUNDS`."""
    field: T = dataclasses.field(default=default, metadata=bounds)
    return field


class Spec:
    """Base class of frozen dataclasses that check the types and bounds of their fields.

    A subclass with checks of its own first calls `super().__post_init__()`. A tuple may be given as
    a list. With `repr=False` the repr has the fields that differ from their defaults; `eval` of it
    is equal to the record.

    >>> from attnlab.heads import Gate
    >>> Gate(), Gate("element")
    (Gate(), Gate(by='element'))
    """

    prefix: ClassVar[str] = ""
    """Before the name of a field in an error: `class FFN(Spec, prefix="ffn.")`."""

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        super().__init_subclass__()
        cls.prefix = cls.prefix if prefix is None else prefix

    def __new__(cls: type["SpecT"], *args: object, **fields: object) -> "SpecT":
        """Raises TypeError for an unknown field, or one without its name; the message lists the
        fields."""
        assert dataclasses.is_dataclass(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        check_keywords(cls.__name__, fields, known)
        positional = sum(not field.kw_only for field in dataclasses.fields(cls))
        if len(args) > positional:
            raise TypeError(
                f"{cls.__name__}() takes fields by name, as in {cls.__name__}({known[0]}=...), not "
                f"{args[positional]!r}; known: {', '.join(known)}"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, prefix=self.prefix)
        for name, value in vars(self).items():
            if isinstance(value, list):  # of a config file; a tuple can be hashed
                object.__setattr__(self, name, tuple(value))

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # a subclass is one
            if field.repr
            and (field.default is dataclasses.MISSING or getattr(self, field.name) != field.default)
        )
        return f"{type(self).__name__}({changed})"


def check_fields(
    record: object,
    *,
    prefix: str = "",
    least: int | float = -math.inf,
    without: Collection[str] = (),
) -> None:
    """Raises ValueError unless each field of a dataclass has its type, and numbers their bounds.

    Numbers of NumPy become those of Python, so that the record is JSON and its repr plain; whole
    numbers in a field of floats become floats.

    >>> @dataclasses.dataclass
    ... class Size:
    ...     height: int = bounded(1, least=1)
    >>> check_fields(Size(0), prefix="size.")
    Traceback (most recent call last):
    ValueError: size.height must be a whole number of at least 1, not 0

    Args:
      record: the dataclass.
      prefix: before the name of each field, for the error.
      least: bound of integers whose field has no bound "least".
      without: names of fields that are not checked.
    """
    kind: type = type(record)
    for field, hint in _hints(kind):
        if field.name not in without:
            is_count = hint in (int, int | None) and least > -math.inf
            bounds = {"least": least, **field.metadata} if is_count else field.metadata
            given = getattr(record, field.name)
            value = _without_numpy(given)
            check_field(f"{prefix}{field.name}", value, hint, **bounds)
            if hint in FLOATS:
                value = _as_floats(value)
            if value is not given:
                object.__setattr__(record, field.name, value)


def _as_floats(value: object) -> object:
    """Whole numbers, also those of a list or tuple, as floats: JAX holds no int above 2**63."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_floats, value))
    return float(value) if isinstance(value, int) else value


def _without_numpy(value: object) -> object:
    """A number of NumPy as Python's, a list or tuple of some as a tuple; else `value` itself."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and any(isinstance(one, np.generic) for one in value):
        return tuple(_without_numpy(one) for one in value)
    return value


def check_field(name: str, value: object, hint: object, **bounds: int | float) -> None:
    """Raises ValueError unless `value` is of the type `hint`, and a number within its bounds.

    Args:
      name: of the field, for the error.
      value: of the field; of a tuple, each element that is no tuple.
      hint: the type. Numbers are finite. Strings, generic types other than tuples, and types that
        cannot be checked at run time are not checked.
      bounds: of numbers, named as in `BOUNDS`.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return
    plain = [kind for kind in kinds if kind is not types.NoneType]
    if len(plain) > 1 or (isinstance(plain[0], type) and plain[0] not in (bool, int, float)):
        _check_type(name, value, kinds)
        return
    try:
        _check_kind(name, value, plain[0], bounds)
    except ValueError as error:
        if types.NoneType in kinds:
            raise ValueError(f"{error}; None is allowed") from None
        raise


def _check_kind(name: str, value: object, kind: object, bounds: dict[str, int | float]) -> None:
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
    elif kind is int:
        check_count(name, value, bounds.get("least", -math.inf))
    elif kind is float:
        check_number(name, value, **bounds)
    elif get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a tuple, not {value!r}; write ({value!r},) for one")
        element, *rest = get_args(kind)
        is_checked = rest == [...] and get_origin(element) is not tuple
        for one in value if is_checked else ():
            check_field(name, one, element, **bounds)


def _check_type(name: str, value: object, kinds: tuple[Any, ...]) -> None:
    if all(isinstance(kind, type) for kind in kinds) and not isinstance(value, kinds):
        wanted = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
        examples = [example for kind in kinds if (example := _example(kind))]
        write = f"; write {examples[0]}" if examples else ""
        raise ValueError(f"{name} must be of type {wanted}, not {value!r}{write}")


def _example(kind: type[Any]) -> str:
    """How to write a record of this type; "" for other types."""
    if hasattr(kind, "example") or not issubclass(kind, Spec):
        return getattr(kind, "example", "")
    return " or ".join(f"{one.__name__}(...)" for one in kind.__subclasses__() or [kind])


def check_choice(field: str, value: object, known: tuple[str, ...] | list[str]) -> None:
    """Raises ValueError unless `value` is one of the known names."""
    if not isinstance(value, str):
        raise ValueError(
            f"{field} must be one of {', '.join(one or repr(one) for one in known)}, not {value!r}"
        )
    lookup(dict.fromkeys(known), value, what=field)


def check_count(field: str, value: object, least: int | float = -math.inf) -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        bound = f" of at least {least}" if least > -math.inf else ""
        raise ValueError(f"{field} must be a whole number{bound}, not {value!r}")


def as_count(field: str, value: object, least: int | float = -math.inf) -> int:
    """`value` as an int, where it may be one of NumPy or JAX; else the ValueError of `check_count`.

    >>> import numpy as np
    >>> as_count("rank", np.int32(2))
    2
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            value = operator.index(value)  # type: ignore[arg-type]  # raises TypeError
    check_count(field, value, least)
    assert isinstance(value, int)
    return value


def check_number(field: str, value: object, **bounds: int | float) -> None:
    """Raises ValueError unless `value` is a finite number within bounds, named as in `BOUNDS`."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good and abs(value) > LARGEST:  # type: ignore[arg-type]  # a number
        size = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else value
        raise ValueError(f"{field} must be a finite number of at most {LARGEST:g}, not {size}")
    good = good and not math.isnan(value)  # type: ignore[arg-type]  # a number
    if not good or not all(BOUNDS[name][1](value, limit) for name, limit in bounds.items()):
        allowed = " and".join(f" {BOUNDS[name][0]} {limit:g}" for name, limit in bounds.items())
        raise ValueError(f"{field} must be a finite number{allowed}, not {value!r}")


@functools.cache
def _hints(cls: type) -> list[tuple[dataclasses.Field[Any], object]]:
    """The fields of a dataclass with their types."""
    fields = dataclasses.fields(cls)
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # an annotation has a name that only type checkers know
        hints = {field.name: field.type for field in fields}
    return [(field, hints[field.name]) for field in fields]
