"""Checks of `capture` and `patch`: the names of intermediate values."""

from collections.abc import Iterable, Mapping

from attnlab.names import lookup
from attnlab.tap import Patch, Patches


def check_values(
    capture: Iterable[str], patch: Patches | None, known: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, Patch]]:
    """`capture` and `patch`, checked, as a tuple and a dict.

    Args:
      capture: names of values to record.
      patch: name -> f(value, layer index).
      known: name -> axes of the existing values.

    Raises:
      TypeError: `capture` is not a collection of names, or `patch` not a dict of functions.
      ValueError: an unknown name; the message lists the known ones.

    >>> check_values(("prob",), None, {"scores": "B N T S", "probs": "B N T S"})
    Traceback (most recent call last):
    ValueError: unknown value 'prob': did you mean 'probs'? known: scores, probs
    """
    if isinstance(capture, str) or not isinstance(capture, Iterable):
        raise TypeError(f"capture must be a tuple of names such as ('probs',), not {capture!r}")
    names = tuple(dict.fromkeys(capture))
    if patch is not None and not isinstance(patch, Mapping):
        raise TypeError(f"patch must be a dict, name -> f(value, layer), not {patch!r:.80}")
    patches = dict(patch or {})
    for name in (*names, *patches):
        lookup(known, name, what="value")
    for name, function in patches.items():
        if not callable(function):
            raise TypeError(
                f"patch of {name!r} must be a function (value, layer), not {function!r:.80}"
            )
    return names, patches
