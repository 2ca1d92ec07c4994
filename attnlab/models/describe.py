"""A short summary of a model: sizes, parameters and FLOPs of each layer type."""

from attnlab.models.config import ModelConfig, sharing_name
from attnlab.models.cost import (
    applied_parameters,
    cache_bytes_per_token,
    flops_per_token,
    num_parameters,
    outer_flops,
    stacks,
    sublayer_flops,
    sublayer_parameters,
)
from attnlab.models.parameters import num_outer_parameters

HEADER = ("layers", "sublayer", "number", "groups", "parameters", "FLOPs per token")


def describe(config: ModelConfig, length: int | None = None) -> str:
    """A table of parameters and forward FLOPs.

    Args:
      config: the model.
      length: tokens of a text, for the FLOPs of attention; None is `max_len`.

    >>> print(describe(ModelConfig(sharing="albert")))
    decoder of width 64: layout standard, 4 heads, sharing albert
    parameters: 70,592, applied: 220,544; cache: 2,048 bytes per token; texts of 64 tokens
    <BLANKLINE>
    layers   sublayer   number  groups  parameters  FLOPs per token
    layers   attention       4       1      16,768          196,608
    layers   ffn             4       1      33,216          262,144
    outside                                 20,608           32,768
    total                                   70,592          491,520
    """
    length = config.max_len if length is None else length
    rows = [HEADER, *_rows(config, length)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = [
        "  ".join(
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*_summary(config, length), "", *lines])


def _summary(config: ModelConfig, length: int) -> list[str]:
    kinds = list(dict.fromkeys(c.heads for c in config.stacks.values()))
    names = " and ".join(f"{heads.name}, {heads.num_heads} heads" for heads in kinds)
    counts = f"{num_parameters(config):,}, applied: {applied_parameters(config):,}"
    cache = f"{cache_bytes_per_token(config):,} bytes per token"
    return [
        f"{config.kind} of width {config.width}: layout {names}, sharing {sharing_name(config)}",
        f"parameters: {counts}; cache: {cache}; texts of {length} tokens",
    ]


def _rows(config: ModelConfig, length: int) -> list[tuple[str, ...]]:
    """A line for each sublayer of a stack, one for the weights outside the layers, and the sum."""
    names = list(config.stacks) if config.encoder is None else ["layers", "encoder_layers"]
    rows: list[tuple[str, ...]] = []
    for name, stack in zip(names, stacks(config), strict=True):
        sizes, flops = sublayer_parameters(stack.layer), sublayer_flops(stack, length)
        for sublayer, count in stack.plan.num_groups.items():
            parameters = count * sizes[sublayer] if stack.owns_weights else 0
            numbers = map(str, (stack.plan.num_layers, count))
            costs = f"{parameters:,}", f"{flops.get(sublayer, 0):,}"
            rows.append((name, sublayer, *numbers, *costs))
    outside = f"{num_outer_parameters(config):,}", f"{outer_flops(config):,}"
    total = f"{num_parameters(config):,}", f"{flops_per_token(config, length):,}"
    return [*rows, ("outside", "", "", "", *outside), ("total", "", "", "", *total)]
