"""Checks of the fields of dataclasses by their annotations and bounds; an error says what is
allowed."""

import contextlib
import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from attnlab.names import lookup

T = TypeVar("T")

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of a float field: the configs of models compute in float32."""
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

    def __post_init__(self) -> None:
        check_fields(self, prefix=self.prefix)

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # a subclass is one
            if field.repr
            and (field.default is dataclasses.MISSING or getattr(self, field.name) != field.default)
        )
        return f"{type(self).__name__}({changed})"


def check_fields(record: object, *, prefix: str = "", least: int | float = -math.inf) -> None:
    """Raises ValueError unless each field of a dataclass has its type, and numbers their bounds.

    Numbers of NumPy become those of Python, so that the record is JSON and its repr plain; whole
    numbers in a field of floats become floats, lists become tuples.

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
    """
    kind: type = type(record)
    for field, hint in _hints(kind):
        is_count = hint in (int, int | None) and least > -math.inf
        bounds = {"least": least, **field.metadata} if is_count else field.metadata
        value = check_field(f"{prefix}{field.name}", getattr(record, field.name), hint, **bounds)
        object.__setattr__(record, field.name, value)


def check_field(name: str, value: Any, hint: Any, **bounds: int | float) -> Any:
    """The value as a field of the type `hint` holds it, or a ValueError.

    Args:
      name: of the field, for the error.
      value: of the field; of a tuple, each element that is no tuple.
      hint: the type. Numbers are finite. Strings, generic types other than tuples and mappings, and
        types that cannot be checked at run time are not checked.
      bounds: of numbers, named as in `BOUNDS`.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    value = value.item() if isinstance(value, np.generic) else value
    value = tuple(value) if isinstance(value, list) else value
    kind, *others = [kind for kind in kinds if kind is not types.NoneType]
    none = ", or None" * (types.NoneType in kinds)
    if others or (isinstance(kind, type) and kind not in (bool, int, float)):
        if all(isinstance(kind, type) for kind in kinds) and not isinstance(value, kinds):
            names = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
            raise ValueError(f"{name} must be of type {names}, not {value!r}")
    elif get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False{none}, not {value!r}")
    elif kind in (int, float):
        check_number(name, value, kind, none, **bounds)
        return kind(value)
    elif get_origin(kind) is Mapping and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict{none}, not {value!r}")
    elif get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a tuple{none}, not {value!r}; for one ({value!r},)")
        element, *rest = get_args(kind)
        if rest == [...] and get_origin(element) is not tuple:
            return tuple(check_field(name, one, element, **bounds) for one in value)
        if rest == [...]:
            return tuple(one.item() if isinstance(one, np.generic) else one for one in value)
        if len(value) != 1 + len(rest):
            raise ValueError(f"{name} must be a tuple of {1 + len(rest)}{none}, not {value!r}")
        pairs = zip(value, (element, *rest), strict=True)
        return tuple(check_field(name, one, own, **bounds) for one, own in pairs)
    return value


def check_choice(field: str, value: object, known: tuple[str, ...] | list[str]) -> None:
    """Raises ValueError unless `value` is one of the known names."""
    if not isinstance(value, str):
        raise ValueError(
            f"{field} must be one of {', '.join(one or repr(one) for one in known)}, not {value!r}"
        )
    lookup(types.MappingProxyType(dict.fromkeys(known)), value, what=field)


def check_number(
    name: str, value: Any, kind: type = float, none: str = "", **bounds: int | float
) -> None:
    """Raises ValueError unless `value` is a number within bounds, named as in `BOUNDS`.

    Args:
      name: of the field, for the error.
      value: of any type.
      kind: int for a whole number; of float, whole numbers too, and all are finite.
      none: words for the error, where None is allowed.
      bounds: named as in `BOUNDS`.
    """
    good = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if good and kind is float and not abs(value) <= LARGEST:  # too large, or NaN
        good, bounds = False, {"most": LARGEST, **bounds}
    if not good or not all(BOUNDS[bound][1](value, limit) for bound, limit in bounds.items()):
        words = "a whole number" if kind is int else "a finite number"
        of = " of" * bool(bounds)
        allowed = " and".join(f" {BOUNDS[bound][0]} {limit:g}" for bound, limit in bounds.items())
        raise ValueError(f"{name} must be {words}{of}{allowed}{none}, not {value!r:.80}")


def as_count(field: str, value: object, least: int | float = -math.inf) -> int:
    """`value` as an int of at least `least`, where it may be one of NumPy or JAX; or a ValueError.

    >>> import numpy as np
    >>> as_count("rank", np.int32(2))
    2
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            value = operator.index(value)  # type: ignore[arg-type]  # raises TypeError
    check_number(field, value, int, "", **({} if least == -math.inf else {"least": least}))
    assert isinstance(value, int)
    return value


@functools.cache
def _hints(cls: type) -> list[tuple[dataclasses.Field[Any], object]]:
    """The fields of a dataclass with their types."""
    fields = dataclasses.fields(cls)
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # an annotation has a name that only type checkers know
        hints = {field.name: field.type for field in fields}
    return [(field, hints[field.name]) for field in fields]
