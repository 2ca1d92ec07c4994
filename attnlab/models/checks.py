"""Checks of config fields: each raises a ValueError with the field, its value, what is allowed."""

import dataclasses
import math
import operator
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from attnlab.names import check_count, lookup

T = TypeVar("T")

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


def check_field(name: str, value: object, hint: object, field: dataclasses.Field[Any]) -> None:
    """Raises ValueError unless `value` is of the type `hint`, and a number within its bounds.

    Args:
      name: of the field, for the error.
      value: of the field; of a tuple, each element that is no tuple.
      hint: the type. Numbers are finite.
      field: with the bounds, of `bounded`.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return
    kind = kinds[0]
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
    elif kind is int:
        check_count(name, value, field.metadata.get("least", -math.inf))
    elif kind is float:
        check_number(name, value, **field.metadata)
    elif get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a tuple, not {value!r}; write ({value!r},) for one")
        element, *rest = get_args(kind)
        is_checked = rest == [...] and get_origin(element) is not tuple
        for one in value if is_checked else ():
            check_field(name, one, element, field)
    elif isinstance(kind, type) and not isinstance(value, kinds):
        wanted = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
        article = "" if kind.__name__.endswith("s") else "a "  # Images, Experts
        raise ValueError(f"{name} must be {article}{wanted}, not {value!r}")


def check_choice(field: str, value: object, known: tuple[str, ...] | list[str]) -> None:
    """Raises ValueError unless `value` is one of the known names."""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be one of {', '.join(known)}, not {value!r}")
    lookup(dict.fromkeys(known), value, what=field)


def check_number(field: str, value: object, **bounds: int | float) -> None:
    """Raises ValueError unless `value` is a finite number within bounds, named as in `BOUNDS`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not all(BOUNDS[name][1](value, limit) for name, limit in bounds.items()):
        allowed = " and".join(f" {BOUNDS[name][0]} {limit:g}" for name, limit in bounds.items())
        raise ValueError(f"{field} must be a finite number{allowed}, not {value!r}")
