"""The rungs of a ladder: one arm at several sizes, so that what holds at one is seen at others."""

import functools
import operator
from typing import Any

WIDTHS = (
    "width",
    "ffn.width",
    "embedding.width",
    "heads.head_dim",
    "heads.value_dim",
    "heads.latent_dim",
    "heads.query_latent_dim",
    "heads.rotary_dim",
)
DEPTHS = ("num_layers", "encoder.num_layers")
FIELDS = {"width": WIDTHS, "depth": DEPTHS}
"""What a ladder climbs by -> the fields of `config.model` that are multiplied by a size."""


def sizes(words: list[str]) -> list[float]:
    """What `--ladder` asks for: a number of rungs, each twice the one before, or the sizes.

    Raises ValueError for fewer than two rungs, and for sizes that do not grow.

    >>> sizes(["3"]), sizes(["1", "1.5", "2"])
    ([1.0, 2.0, 4.0], [1.0, 1.5, 2.0])
    """
    try:
        found = [float(word) for word in words]
    except ValueError:
        raise ValueError(
            f"--ladder={','.join(words)}: give a number of sizes (3), or the sizes (1,1.5,2)"
        ) from None
    if len(found) == 1:
        if not found[0].is_integer() or found[0] < 2:
            raise ValueError(f"--ladder={words[0]}: a ladder has at least 2 sizes; 3 say more")
        return [2.0**k for k in range(int(found[0]))]
    if found[0] <= 0 or sorted(set(found)) != found:
        raise ValueError(f"--ladder={','.join(words)}: sizes are above zero and grow")
    return found


def scaled(model: Any, by: str, size: float) -> dict[str, Any]:
    """The overrides that make `config.model` so many times as wide or as deep.

    By width every width that is set is multiplied (those left out follow the model's), the number
    of heads and the ranks stay: a head grows with its model, and what was as wide as the model
    stays so. By depth the number of layers is; a plan keeps its name, so "cycle:2" has two sets at
    every depth. Raises ValueError where a field would be no whole number, and where layers of
    several kinds have widths of their own.
    """
    own = [name for name in FIELDS[by] if any(_has(given, name) for _, given in model.layer_types)]
    if own:
        raise ValueError(
            f"--ladder: model.layer_types={model.layer_types!r} have {own[0]} of their own, which "
            "would stay as it is; leave it out there, or use --ladder_by=depth"
        )
    if by == "width" and model.heads.scale:
        raise ValueError(
            f"--ladder: model.heads.scale={model.heads.scale} would stay as it is while heads grow "
            "wider; leave it out, or use --ladder_by=depth"
        )
    changes: dict[str, Any] = {}
    for name in FIELDS[by]:
        value = _of(model, name)
        if value is None:
            continue
        if not (value * size).is_integer():
            raise ValueError(
                f"--ladder: model.{name}={value} times {size:g} is no whole number; choose "
                "other sizes"
            )
        changes[f"model.{name}"] = int(value * size)
    if by == "width" and model.embedding.scale == model.width**0.5:
        changes["model.embedding.scale"] = float(changes["model.width"] ** 0.5)
    return changes


def _of(fields: Any, path: str) -> Any:
    """The value at a path of nested fields."""
    return functools.reduce(operator.getitem, path.split("."), fields)


def _has(overrides: Any, path: str) -> bool:
    """Does a layer type set this field?"""
    try:
        return _of(overrides, path) is not None
    except KeyError:
        return False
