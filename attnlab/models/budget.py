"""Models of equal budget: solve one size so that a cost is that of a reference model.

>>> from attnlab.heads import Standard
>>> grouped = Standard(num_heads=4, num_kv_heads=1, biases=("q", "k", "v", "o"))
>>> found = match_budget(ModelConfig(heads=grouped), ModelConfig(), "parameters", multiple=8)
>>> found.config.ffn.width, found.remainder
(304, 192)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from attnlab.fields import check_choice
from attnlab.heads import LAYOUTS, Layout, weight_shapes
from attnlab.models.config import ModelConfig
from attnlab.models.cost import cache_bytes_per_token, flops_per_token, num_parameters
from attnlab.names import lookup
from attnlab.sharing import plan_name

Budget: TypeAlias = Literal["parameters", "flops", "cache"]
Size: TypeAlias = Literal["ffn.width", "heads.num_heads", "heads.head_dim", "num_layers"]

DEFAULT_SIZES: dict[Budget, Size] = {
    "parameters": "ffn.width",
    "flops": "ffn.width",
    "cache": "heads.num_heads",
}
"""Budget -> the size to solve for by default; the FFN does not change the cache."""

LayoutT = TypeVar("LayoutT", bound=Layout)


class Match(NamedTuple):
    """The model whose cost is nearest to the reference's.

    >>> from attnlab.heads import Standard, Wide
    >>> standard, wide = (ModelConfig(heads=kind(num_heads=4)) for kind in (Standard, Wide))
    >>> match = match_budget(standard, wide, "parameters", multiple=8)
    >>> match.config.ffn.width, match.remainder  # over the budget by 1,536 parameters
    (640, -1536)
    """

    config: ModelConfig
    cost: int
    remainder: int
    """Cost of the reference minus `cost`; below zero where the model is over the budget."""


def budget_cost(config: ModelConfig, budget: Budget, length: int = 1) -> int:
    """What a model costs: "parameters", forward "flops" per token of texts of `length` tokens, or
    "cache" bytes per token.

    >>> budget_cost(ModelConfig(), "cache")
    2048
    """
    check_choice("budget", budget, get_args(Budget))
    if budget == "parameters":
        return num_parameters(config)
    return flops_per_token(config, length) if budget == "flops" else cache_bytes_per_token(config)


def match_budget(
    config: ModelConfig,
    reference: ModelConfig,
    budget: Budget,
    *,
    size: Size | None = None,
    length: int = 1,
    multiple: int = 1,
) -> Match:
    """`config` with one size changed so that its cost is as near as possible to the reference's.

    Args:
      config: the model to resize. With multiple=1 it stays as it is if its cost is equal already.
      reference: the model whose budget is to be met.
      budget: "parameters", "flops" or "cache", see `budget_cost`.
      size: the size to solve for; None is that of `DEFAULT_SIZES`. Solving for "heads.num_heads"
        keeps the width of a head, and heads that share keys come in whole groups. Solving for
        "heads.head_dim" changes all widths of a head that are not set.
      length: tokens of a text, for FLOPs.
      multiple: only multiples of it are tried, such as 8 for the matrix units of a device.

    Returns:
      The nearest model, its cost, and what it leaves of the budget.

    Raises:
      ValueError: even the smallest size is over the budget; the budget does not depend on the size,
        or stops growing with it (layers that share parameters); or the smallest size is no model
        (an odd head_dim with rotary positions).

    >>> from attnlab.heads import Standard, Wide
    >>> standard, wide = (ModelConfig(heads=kind(num_heads=4)) for kind in (Standard, Wide))
    >>> match_budget(standard, wide, "parameters").config.ffn.width
    637
    """
    wanted = budget_cost(reference, budget, length)
    size = size or DEFAULT_SIZES[budget]
    check_choice("size to solve for", size, get_args(Size))
    if multiple == 1 and budget_cost(config, budget, length) == wanted:
        return Match(config, wanted, 0)
    if size == "heads.num_heads":
        config = dataclasses.replace(config, heads=_with_fixed_widths(config.layout))
        multiple = math.lcm(multiple, getattr(config.heads, "num_kv_heads", None) or 1)

    def resized(count: int) -> ModelConfig:
        return with_size(config, size, count * multiple)

    def cost(count: int) -> int:
        return budget_cost(resized(count), budget, length)

    one, two = cost(1), cost(2)
    name = f"layout {config.heads.name!r}, sharing {plan_name(config.sharing)!r}"
    if two <= one:
        raise ValueError(f"{name}: {budget} do not depend on {size}; solve for another size")
    if one - wanted > (two - one) / 2:
        raise ValueError(
            f"{name}: at {size} {multiple} it costs more {budget} ({one:,}) than the reference "
            f"({wanted:,}); give that a larger {size}"
        )
    # Most costs are linear. Some grow slower behind the first sizes, as under low-rank deltas.
    high = 1 + max(1, math.ceil((wanted - one) / (two - one)))
    while cost(high) < wanted:
        if cost(2 * high) <= cost(high):
            raise ValueError(
                f"{name}: {budget} stop growing with {size} at {cost(high):,}; take another size"
            )
        high *= 2
    best = _nearest(cost, wanted, high)
    return Match(resized(best), cost(best), wanted - cost(best))


def with_size(config: ModelConfig, size: Size, value: int) -> ModelConfig:
    """`config` with another value of one size.

    >>> with_size(ModelConfig(), "ffn.width", 12).ffn.width
    12

    Raises:
      ValueError: the layout of the heads has no such size, or the value is no model.
    """
    part, _, field = size.rpartition(".")
    if not part:
        return dataclasses.replace(config, **{field: value})  # type: ignore[arg-type]
    if part == "ffn":
        return dataclasses.replace(config, ffn=dataclasses.replace(config.ffn, width=value))
    known = [f.name for f in dataclasses.fields(config.heads)]
    if field not in known:
        raise ValueError(
            f"layout {config.heads.name!r} has no {field}: its fields are {', '.join(known)}; "
            "solve for 'ffn.width' or 'heads.num_heads'"
        )
    heads = dataclasses.replace(config.heads, **{field: value})  # type: ignore[arg-type]
    return dataclasses.replace(config, heads=heads)


def with_layout(config: ModelConfig, layout: str, sharing: str) -> ModelConfig:
    """`config` with another head layout and sharing plan, without the fields of its layout that the
    other one does not have.

    Args:
      config: the model.
      layout: name of a layout, a key of `attnlab.LAYOUTS`.
      sharing: a sharing plan by name, as "albert".

    >>> from attnlab.heads import Latent
    >>> with_layout(ModelConfig(heads=Latent(num_heads=4, latent_dim=32)), "standard", "albert")
    ModelConfig(heads=Standard(num_heads=4), sharing='albert')

    Raises:
      TypeError: the layout is no name.
      ValueError: an unknown layout or plan, or the layout refuses an extra of the present one.
    """
    if not isinstance(layout, str):
        name = type(layout).__name__
        raise TypeError(
            f"the arguments are (config, layout, sharing): layout is a name, not a {name}"
        )
    kind: type[Layout] = lookup(LAYOUTS, layout, what="layout")
    biases = tuple(name for name in config.heads.biases if name in kind.bias_names)
    heads = config.heads.to(kind, biases=biases)
    return dataclasses.replace(config, heads=heads, sharing=sharing)


# Search -------------------------------------------------------------------------------------------


def _nearest(cost: Callable[[int], int], wanted: int, high: int) -> int:
    """The count from 1 to `high` whose cost is nearest to `wanted`; costs grow with the count."""
    low = high - 1 if cost(high - 1) <= wanted else 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= wanted else (low, middle)
    return min(low, high, key=lambda count: abs(cost(count) - wanted))


def _with_fixed_widths(layout: LayoutT) -> LayoutT:
    """The layout with the widths of its heads written out, which else follow from their number.

    Widths of inputs and outputs ("*_width") and numbers of heads ("num_*") are not widths of a
    head. A width whose None means that a weight is absent stays None.
    """
    for field in dataclasses.fields(layout):
        name = field.name
        if name.startswith("num_") or name.endswith("width") or getattr(layout, name) is not None:
            continue
        if hasattr(type(layout), f"default_{name}"):
            fixed = dataclasses.replace(layout, **{name: layout.size(name)})  # type: ignore[arg-type]
            layout = fixed if weight_shapes(fixed) == weight_shapes(layout) else layout
    return layout
