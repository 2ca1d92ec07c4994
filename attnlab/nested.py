"""Nested fields, as JSON has them: by their paths, and what differs between several."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
JSON: TypeAlias = dict[str, Any]
"""A JSON object; whoever reads a value checks it."""
SHOWN = 3
"""Differences that an error lists."""


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """A ValueError about what a file holds names the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def flatten(fields: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Path -> value of nested fields.

    >>> flatten({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    found: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def field_path(path: str) -> str:
    """The path of a field of a stored spec as flags and configs have it. In a spec the model lies
    beside its version.

    >>> field_path("config.model.model.norm.eps"), field_path("config.train.steps")
    ('config.model.norm.eps', 'config.train.steps')
    """
    return re.sub(r"^((?:config\.)?model\.)model\.", r"\1", path)


def differing(fields: Sequence[Mapping[str, T]]) -> dict[str, list[T | None]]:
    """Name -> its value in each, of names with more than one value.

    >>> differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'b': [2, 3]}
    """
    names = dict.fromkeys(name for one in fields for name in one)
    values = {name: [one.get(name) for one in fields] for name in names}
    return {name: v for name, v in values.items() if len(set(map(repr, v))) > 1}


def differences(old: object, new: object, name: str = "") -> list[tuple[str, object, object]]:
    """(path, there, here) of every value that differs between two JSON values; of an object that
    one side lacks, one line.

    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": {"d": 3}})
    [('a.b', 1, 2), ('c', None, '1 fields')]
    """
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        below = [(f"{name}.{n}" if name else n, old.get(n), new.get(n)) for n in names]
        return [line for n, a, b in below for line in differences(a, b, n)]
    old, new = (f"{len(s)} fields" if isinstance(s, dict) else s for s in (old, new))
    return [(name, old, new)]
