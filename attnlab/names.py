"""Looks up names in a registry, and keywords of functions; an unknown one is an error that lists
those that are known."""

import difflib
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
    """The known name that is most like `name`, or None if none is near.

    >>> nearest("wid", ["standard", "wide"]), nearest("rope", ["none", "rotary"])
    ('wide', None)
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), None)


def check_keywords(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first name of `names` that is not in `known`.

    >>> check_keywords("attend", ["masked"], ["mask", "scale"])
    Traceback (most recent call last):
    TypeError: attend() got an unknown keyword 'masked': did you mean 'mask'? known: mask, scale
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            near = nearest(name, known)
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
