"""Unknown keywords: a TypeError that names the nearest known one."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from attnlab.names import edit_distance, nearest

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
            near = nearest_keyword(name, known)
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
