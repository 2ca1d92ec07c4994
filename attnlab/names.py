"""Looking a name up in a table, with an error that helps."""

import difflib
from collections.abc import Mapping
from typing import Any


def find(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """`table[name]`, or a ValueError that names the nearest known name.

    >>> find("fruit", "aple", {"apple": 1, "pear": 2})
    Traceback (most recent call last):
    ValueError: unknown fruit 'aple': did you mean 'apple'? known: apple, pear
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}: {hint}known: {', '.join(table)}")


def check_count(field: str, value: Any, least: int) -> None:
    """Raises ValueError for what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{field} must be a whole number of at least {least}, not {value!r}")
