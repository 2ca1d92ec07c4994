"""Looks up names in a registry; an unknown name is an error that lists the known ones."""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, *, what: str) -> T:
    """`table[name]`, or a ValueError that lists the known names.

    Args:
      table: name -> entry.
      name: the name to look up.
      what: what the names are of, for the error.

    >>> lookup({"apple": 1, "pear": 2}, "aple", what="fruit")
    Traceback (most recent call last):
    ValueError: unknown fruit 'aple': did you mean 'apple'? known: apple, pear
    """
    if isinstance(name, str) and name in table:
        return table[name]
    near = nearest(str(name), table)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"unknown {what} {name!r}: {hint}known: {', '.join(table)}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name at an edit distance of at most 2, closest first; None if there is none.

    >>> nearest("wid", ["standard", "wide"]), nearest("cos", ["cosine", "linear"])
    ('wide', None)
    """
    close = [(edit_distance(name, other), other) for other in known]
    close = [(d, other) for d, other in close if d <= 2 and d < max(len(name), len(other))]
    return min(close)[1] if close else None


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements of a letter that make b of a.

    >>> edit_distance("albrt", "albert"), edit_distance("wide", "narrow")
    (1, 6)
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def check_count(field: str, value: object, least: int | float = -math.inf) -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        bound = f" of at least {least}" if least > -math.inf else ""
        raise ValueError(f"{field} must be a whole number{bound}, not {value!r}")


def as_count(field: str, value: object, least: int | float = -math.inf) -> int:
    """`value` as an int, where it may be one of NumPy; else the ValueError of `check_count`."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    check_count(field, value, least)
    assert isinstance(value, int)
    return value
