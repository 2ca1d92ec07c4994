"""The rungs of a ladder: one arm at several sizes, so that what holds at one is seen at others."""

import re
from typing import Any

WIDTHS = (
    "width",
    "ffn_width",
    "embedding_width",
    "head_dim",
    "value_dim",
    "shared_dim",
    "latent_dim",
    "query_latent_dim",
    "rotary_dim",
)
DEPTHS = ("num_layers", "encoder_layers")
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
    own = [name for name in FIELDS[by] if re.search(rf"\b{name}=", str(model.kinds or ""))]
    if own:
        raise ValueError(
            f"--ladder: model.kinds={model.kinds!r} has {own[0]} of its own, which would stay as "
            "it is; leave it out there, or use --ladder_by=depth"
        )
    if by == "width" and model.attention_scale:
        raise ValueError(
            f"--ladder: model.attention_scale={model.attention_scale} would stay as it is while "
            "heads grow wider; leave it out, or use --ladder_by=depth"
        )
    changes: dict[str, Any] = {}
    for name in FIELDS[by]:
        value = model[name]
        if value is None:
            continue
        if not (value * size).is_integer():
            raise ValueError(
                f"--ladder: model.{name}={value} times {size:g} is no whole number; choose "
                "other sizes"
            )
        changes[f"model.{name}"] = int(value * size)
    if by == "width" and model.embedding_scale == model.width**0.5:
        changes["model.embedding_scale"] = float(changes["model.width"] ** 0.5)
    return changes
