"""Checks of the arguments of transforms: configs, head numbers, ranks."""

import operator
from collections.abc import Iterable

from attnlab.models.config import ModelConfig


def check_config(config: object) -> None:
    """Raises TypeError if the first argument is not the config of a model."""
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"config must be a ModelConfig, not {type(config).__name__}; the order of arguments is "
            "(config, params)"
        )


def as_integer(what: str, value: object) -> int:
    """An integer of Python, NumPy or JAX as an int.

    >>> import numpy as np
    >>> as_integer("rank", np.int32(2))
    2

    Raises:
      ValueError: a bool, a float, text or anything else; `what` is the start of the message.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError
    except TypeError:
        raise ValueError(f"{what} must be a whole number, not {value!r}") from None


def head_numbers(what: str, numbers: Iterable[int]) -> list[int]:
    """Head numbers as a list of ints.

    Raises:
      ValueError: no sequence of whole numbers, such as a head mask; `what` starts the message.
    """
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ValueError(f"{what} must be a list of head numbers such as [1, 3], not {numbers!r}")
    found = []
    for number in numbers:
        try:
            found.append(as_integer(what, number))
        except ValueError:
            raise ValueError(
                f"{what} must be whole numbers from 0, not {number!r}; give the numbers of the "
                "heads, as in [1, 3] (np.flatnonzero gives those of a boolean mask)"
            ) from None
    return found
