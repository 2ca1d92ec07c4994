"""One size of a model, solved so that a budget is that of another model."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import FIELDS, HeadSpec
from attnlab.model.accounting import flops_per_token, model_cache_bytes, unique_parameters
from attnlab.model.config import ModelConfig
from attnlab.names import find

BUDGETS: dict[str, Callable[[ModelConfig, int], int]] = {
    "parameters": lambda config, length: unique_parameters(config),
    "flops": flops_per_token,
    "cache": lambda config, length: model_cache_bytes(config),
}
"""Name -> (config, length of a text) -> what is to be equal."""

SOLVED = ("ffn_width", "num_heads", "head_dim", "num_layers")
USUAL = dict.fromkeys(BUDGETS, "ffn_width") | {"cache": "num_heads"}
"""Budget -> the size that is solved for where none is told: a cache holds nothing of an FFN."""


class Matched(NamedTuple):
    """The nearest that there is."""

    config: ModelConfig
    cost: int
    """Its budget."""
    left: int
    """What it leaves of the reference's budget; below zero where it is over it."""


def match(
    config: ModelConfig,
    reference: ModelConfig,
    budget: str,
    *,
    by: str | None = None,
    length: int = 1,
    multiple: int = 1,
) -> Matched:
    """`config` with the `by` that brings its budget nearest to the reference's.

    Args:
      budget: a row of `BUDGETS`: "parameters" (unique), "flops" (per token at texts of `length`,
        forward) or "cache" (bytes per token).
      by: "ffn_width", "num_heads" (heads keep their width; those that share keys come in whole
        groups), "head_dim" (all of a head that is not told follows it) or "num_layers"; left out,
        the row of `USUAL`. What is equal already stays as it is.
      multiple: only multiples of it are tried, as 8 for the matrix units of a device.

    Raises: ValueError where even the smallest `by` is over the budget, where the budget does not
      depend on it or stops growing with it (layers that share their weights), and where the
      smallest is no model (an odd head under rotary positions).

    >>> grouped = ModelConfig(num_kv_heads=1)
    >>> found = match(grouped, ModelConfig(), "parameters", multiple=8)
    >>> found.config.ffn_width, found.left
    (304, 192)
    """
    cost = find("budget", budget, BUDGETS)
    by = by or USUAL[budget]
    find("size to solve for", by, dict.fromkeys(SOLVED))
    wanted = cost(reference, length)
    if multiple == 1 and cost(config, length) == wanted:
        return Matched(config, wanted, 0)
    if by == "num_heads":
        config = _told(config)
        multiple = math.lcm(multiple, config.num_kv_heads or 1)
    made: Callable[[int], ModelConfig] = lambda count: dataclasses.replace(
        config,
        **{by: count * multiple},  # type: ignore[arg-type]
    )
    of: Callable[[int], int] = lambda count: cost(made(count), length)
    one, two = of(1), of(2)
    if two <= one:
        raise ValueError(f"{budget} do not depend on {by}; solve for another size")
    if one - wanted > (two - one) / 2:
        raise ValueError(
            f"{config.layout}/{config.plan}: at {by} {multiple} it costs more {budget} ({one:,}) "
            f"than the whole reference ({wanted:,}); give the reference a larger {by}"
        )
    # Most costs are linear, all that go on grow at least so: the line through two points ends
    # high enough.
    high = 1 + max(1, math.ceil((wanted - one) / (two - one)))
    if of(high) < wanted:
        raise ValueError(
            f"{config.layout}/{config.plan}: {budget} stop growing with {by} at {of(high):,}, "
            f"below the reference's {wanted:,}; solve for another size"
        )
    low = high - 1 if of(high - 1) <= wanted else 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle) <= wanted else (low, middle)
    nearest = min(low, high, key=lambda count: abs(of(count) - wanted))
    return Matched(made(nearest), of(nearest), wanted - of(nearest))


def under_layout(config: ModelConfig, layout: str, plan: str) -> ModelConfig:
    """`config` with another layout and plan, less the sizes that this layout has no axis for.

    Keys that no input has are no size: a layout without a place for them is refused, as it is for
    what else stands beside a row (ValueError of the config).

    >>> under_layout(ModelConfig(layout="latent", latent_dim=32), "standard", "albert").latent_dim
    """
    row = find("layout", layout, LAYOUTS)
    gone: dict[str, Any] = {
        n: None
        for a, n in FIELDS.items()
        if a not in row.letters and hasattr(config, n) and n != "extra_keys"
    }
    gone["latent_norm"] = config.latent_norm or "latent_norm" not in row.asks
    known = {*HeadSpec.bias_letters(layout), *"qkvo"}
    gone["attention_biases"] = "".join(a for a in config.attention_biases if a in known)
    return dataclasses.replace(config, layout=layout, plan=plan, **gone)


def _told(config: ModelConfig) -> ModelConfig:
    """With the widths of its heads spelled out, which would follow from their number."""
    row, sizes = LAYOUTS[config.layout], config.heads.sizes
    widths: dict[str, Any] = {
        FIELDS[a]: sizes[a]
        for a in row.sizes
        if a in row.letters and not (FIELDS[a] in row.asks and not getattr(config, FIELDS[a]))
    }
    return dataclasses.replace(config, **widths)
