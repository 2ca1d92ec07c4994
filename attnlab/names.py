"""Looks up names in a registry, and keywords of functions; an unknown one is an error that lists
those that are known."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


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
    known = ", ".join(one or repr(one) for one in table)
    raise ValueError(f"unknown {what} {name!r}: {hint}known: {known}")


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


def check_keywords(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first name of `names` that is not in `known`.

    >>> check_keywords("attend", ["causal"], ["is_causal", "scale"])
    Traceback (most recent call last):
    TypeError: attend() got an unknown keyword 'causal': did you mean 'is_causal'? known: \
is_causal, scale
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            near = nearest_keyword(name, known)
            hint = f": did you mean {near!r}?" if near else ";"
            raise TypeError(
                f"{function}() got an unknown keyword {name!r}{hint} known: {', '.join(known)}"
            )


def checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with the TypeError of `check_keywords` for an unknown keyword."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def nearest_keyword(name: str, known: Iterable[str]) -> str | None:
    """The known name at an edit distance of at most 2, else the nearest that contains `name` or is
    contained in it, else None.

    >>> [nearest_keyword(name, ["bias", "is_causal"]) for name in ("biass", "causal", "x")]
    ['bias', 'is_causal', None]
    """
    known = tuple(known)
    inside = [other for other in known if len(name) > 2 and (name in other or other in name)]
    return nearest(name, known) or min(
        inside, key=lambda other: edit_distance(name, other), default=None
    )
