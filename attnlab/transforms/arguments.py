"""Checks of the arguments of transforms: configs, head numbers."""

from collections.abc import Iterable

from attnlab.fields import as_count
from attnlab.models.config import ModelConfig


def check_config(config: object) -> None:
    """Raises TypeError if the first argument is not the config of a model."""
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"config must be a ModelConfig, not {type(config).__name__}; the order of arguments is "
            "(config, params)"
        )


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
            found.append(as_count(what, number))
        except ValueError:
            raise ValueError(
                f"{what} must be whole numbers from 0, not {number!r}; give the numbers of the "
                "heads, as in [1, 3] (np.flatnonzero gives those of a boolean mask)"
            ) from None
    return found
