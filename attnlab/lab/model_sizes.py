"""Models of several sizes: each variant is made wider or deeper, so that what holds at one size is
seen at others."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

from attnlab.lab.experiment import Experiment
from attnlab.lab.spec import Variant, with_values
from attnlab.models import ModelConfig, config_dict
from attnlab.nested import flatten

By: TypeAlias = Literal["width", "depth"]
FIELDS: dict[By, tuple[str, ...]] = {
    "width": (
        "width", "ffn.width", "embedding.width", "heads.head_dim", "heads.value_dim",
        "heads.latent_dim", "heads.query_latent_dim", "heads.rotary_dim",
    ),
    "depth": ("num_layers", "encoder.num_layers"),
}  # fmt: skip
"""The fields of a model that are multiplied by a size."""
TAG = "size"


def parse_sizes(words: Sequence[str]) -> list[float]:
    """What `--sizes` asks for: a number of sizes, each twice the one before, or the sizes.

    >>> parse_sizes(["3"]), parse_sizes(["1", "1.5", "2"])
    ([1.0, 2.0, 4.0], [1.0, 1.5, 2.0])

    Raises:
      ValueError: fewer than two sizes, or sizes that do not grow.
    """
    try:
        found = [float(word) for word in words]
    except ValueError:
        raise ValueError(
            f"--sizes={','.join(words)}: give a number of sizes (3), or the sizes (1,1.5,2)"
        ) from None
    if len(found) == 1:
        if not found[0].is_integer() or found[0] < 2:
            raise ValueError(f"--sizes={words[0]}: give at least 2 sizes, better 3")
        return [2.0**k for k in range(int(found[0]))]
    if found[0] <= 0 or sorted(set(found)) != found:
        raise ValueError(f"--sizes={','.join(words)}: sizes must be positive and increasing")
    return found


def at_sizes(
    base: Experiment, variants: Sequence[Variant], sizes: Sequence[float], by: By = "width"
) -> list[Variant]:
    """Each variant at each size, smallest first; the size is the tag "size".

    By width each width that is set is multiplied (those left out follow the model's); the number of
    heads and the ranks stay: a head grows with its model, and what was as wide as the model stays
    so. By depth the number of layers is multiplied; a sharing plan keeps its name, so "cycle:2" has
    two parameter groups at every depth.

    Raises:
      ValueError: a field would be no whole number, layer types have widths of their own, or the
        scale of scores is fixed.
    """
    found = []
    for size in sizes:
        for variant in variants:
            model = with_values(base, variant.values).model
            values = {**variant.values, **scaled(model, size, by)}
            tags = {**variant.all_tags, TAG: size}
            found.append(Variant(values, variant.name, tags))
    return found


def scaled(model: ModelConfig, size: float, by: By) -> dict[str, float]:
    """The fields, with "model." before them, that make a model so many times as wide or deep.

    Raises:
      ValueError: as of `at_sizes`.
    """
    for _, overrides in model.layer_types:
        fields = flatten(dataclasses.asdict(overrides))
        if own := [name for name in FIELDS[by] if fields.get(name) is not None]:
            raise ValueError(
                f"sizes: layer types have {own[0]} of their own, which would stay as it is; leave "
                "it out there, or use --sizes_by=depth"
            )
    if by == "width" and model.heads.scale:
        raise ValueError(
            f"sizes: model.heads.scale={model.heads.scale} would stay as it is while heads grow "
            "wider; leave it out, or use --sizes_by=depth"
        )
    fields, changes = flatten(config_dict.to_dict(model)), dict[str, float]()
    for name in FIELDS[by]:
        value = fields.get(name)
        if not isinstance(value, int):  # not set
            continue
        if not float(value * size).is_integer():
            raise ValueError(
                f"sizes: model.{name}={value} times {size:g} is no whole number; choose other sizes"
            )
        changes[f"model.{name}"] = int(value * size)
    if by == "width" and model.embedding.scale == model.width**0.5:
        changes["model.embedding.scale"] = float(changes["model.width"] ** 0.5)
    return changes
