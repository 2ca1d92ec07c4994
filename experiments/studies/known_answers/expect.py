"""Expected results of named variants, in short, for the config files."""

from typing import Literal

from attnlab.lab.description import Expectation


def expect(
    name: str,
    relation: Literal["at most", "at least", "exactly"],
    value: float,
    text: str,
    *,
    over: str = "",
    number: str = "",
) -> Expectation:
    """What is expected of the variant `name`, or of its mean over that of `over`."""
    second = {"name": over} if over else None
    return Expectation(
        tags={"name": name}, relation=relation, value=value, text=text, over=second, number=number
    )
