"""Unknown keywords: a TypeError that names the nearest known one."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


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
            near = nearest(name, known)
            hint = f": did you mean {near!r}?" if near else ";"
            raise TypeError(
                f"{function}() got an unknown keyword {name!r}{hint} known: {', '.join(known)}"
            )


def checks_keywords(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, with the TypeError of `check_keywords` for an unknown keyword."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name at the smallest edit distance up to 2, else one that contains `name` or is
    contained in it, else None.

    >>> nearest("biass", ["bias", "mask"]), nearest("causal", ["is_causal"]), nearest("x", ["bias"])
    ('bias', 'is_causal', None)
    """
    by_distance = sorted((edit_distance(name, other), other) for other in known)
    if by_distance and by_distance[0][0] <= min(2, len(name) - 1):
        return by_distance[0][1]
    inside = [o for _, o in by_distance if len(name) > 2 and (name in o or o in name)]
    return inside[0] if inside else None


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions and substitutions that turn `a` into `b` (Levenshtein).

    >>> edit_distance("mask", "mash")
    1
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]
