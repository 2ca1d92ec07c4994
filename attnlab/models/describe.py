"""A summary of a model: sizes, parameters and FLOPs of each layer type, and how it is computed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

from attnlab.attention import explaining, trace
from attnlab.models.config import ModelConfig
from attnlab.models.cost import (
    applied_parameters,
    cache_bytes_per_token,
    flops_per_token,
    num_parameters,
    outer_flops,
    sublayer_flops,
    sublayer_parameters,
    weight_flops,
)
from attnlab.models.forward import ModelInputs, check_inputs, encoder_call, prepare_text
from attnlab.models.params import num_outer_parameters, owned_stacks, param_shapes
from attnlab.models.stack import run_layers
from attnlab.sharing import Params, plan_name

HEADER = ("layers", "sublayer", "number", "groups", "parameters", "FLOPs per token")


def describe(config: ModelConfig, length: int | None = None) -> str:
    """The parameter group of each sublayer of each layer, and a table of parameters and FLOPs of a
    forward pass. "@j" stands for the keys and values of layer j.

    Args:
      config: the model.
      length: tokens of a text, for the FLOPs of attention; None is `max_len`.

    >>> print(describe(ModelConfig(sharing="albert")))
    decoder of width 64: layout standard, 4 heads, sharing albert
    parameters: 70,592, applied: 220,544; cache: 2,048 bytes per token; texts of 64 tokens
    <BLANKLINE>
    layers       0 1 2 3
      attention  0 0 0 0
      ffn        0 0 0 0
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
    return "\n".join([*_summary(config, length), "", *_groups(config), "", *lines])


def _summary(config: ModelConfig, length: int) -> list[str]:
    kinds = list(dict.fromkeys(c.heads for c in config.stacks.values()))
    names = " and ".join(f"{heads.name}, {heads.num_heads} heads" for heads in kinds)
    counts = f"{num_parameters(config):,}, applied: {applied_parameters(config):,}"
    cache = f"{cache_bytes_per_token(config):,} bytes per token"
    plan = plan_name(config.sharing)
    lines = [
        f"{config.kind} of width {config.width}: layout {names}, sharing {plan}",
        f"parameters: {counts}; cache: {cache}; texts of {length} tokens",
    ]
    if making := weight_flops(config):
        lines.append(f"FLOPs per call to compute the weights of the layers: {making:,}")
    return lines


def _groups(config: ModelConfig) -> list[str]:
    """A row for each sublayer, a column for each layer: its parameter group, counted from 0."""
    plans = {"layers": config.plan}
    if config.encoder is not None:
        plans = {"encoder_layers": config.encoder_model.plan, "layers": config.plan}
    lines = []
    for stack, plan in plans.items():
        rows = {stack: [str(i) for i in range(plan.num_layers)]}
        if config.layer_types:
            rows["  type"] = [name.removeprefix("layers_") for name in config.layer_names]
        for sublayer, groups in plan.items():
            rows[f"  {sublayer}"] = list(map(str, groups))
        width = max(len(cell) for row in rows.values() for cell in row)
        names = max(11, *map(len, rows)) + 2
        for name, row in rows.items():
            lines.append(f"{name:<{names}}" + " ".join(cell.rjust(width) for cell in row))
    if config.encoder is not None and config.encoder.shares_decoder:
        lines.append("both stacks use the same parameter groups")
    return lines


def _rows(config: ModelConfig, length: int) -> list[tuple[str, ...]]:
    """A line for each sublayer of a stack, one for the weights outside the layers, and the sum."""
    rows: list[tuple[str, ...]] = []
    owned = owned_stacks(config)
    for name, stack in config.layer_stacks.items():
        sizes, flops = sublayer_parameters(stack.layer), sublayer_flops(stack, length)
        for sublayer, count in stack.plan.num_groups.items():
            parameters = count * sizes[sublayer] if name in owned else 0
            numbers = map(str, (stack.plan.num_layers, count))
            costs = f"{parameters:,}", f"{flops.get(sublayer, 0):,}"
            rows.append((name, sublayer, *numbers, *costs))
    outside = f"{num_outer_parameters(config):,}", f"{outer_flops(config):,}"
    total = f"{num_parameters(config):,}", f"{flops_per_token(config, length):,}"
    return [*rows, ("outside", "", "", "", *outside), ("total", "", "", "", *total)]


# Attention ----------------------------------------------------------------------------------------

Note = dict[str, dict[str, Any]]
"""What `explain_heads` returns."""
Explanation = dict[str, dict[str, Note]]
"""Stack of layers, by the name of its parameters -> "self" or "cross" -> `Note`."""


def explain_model(
    config: ModelConfig, inputs: Mapping[str, object], *, training: bool = False
) -> Explanation:
    """The form of the heads and the backend of every attention sublayer in a call of a model.

    The call is traced, not run, and without gradient. A backend that `implementation` names and
    that cannot run here is reported, not refused.

    Args:
      config: of the model.
      inputs: "tokens" and the fields of `ModelInputs` by name; arrays may be
        `jax.ShapeDtypeStruct`s.
      training: explain the call with dropout.

    Returns:
      Stack of layers, by the name of its parameters -> {"self", and with cross-attention "cross"}
      -> what `explain_heads` returns. All layers of a stack do the same.

    >>> config = ModelConfig(width=8, num_layers=2)
    >>> tokens = jax.ShapeDtypeStruct((64, 64), "int32")
    >>> explain_model(config, {"tokens": tokens})["layers"]["self"]["chosen"]
    {'order': 'factored'}
    """
    explained: Explanation = {}

    def call(params: Params, key: Array, given: dict[str, Any]) -> None:
        tokens, inputs_ = check_inputs(config, given.pop("tokens"), ModelInputs(**given))
        texts = {}
        if inputs_.source is not None:
            text = encoder_call(params, config, inputs_)
            texts["encoder_"] = *prepare_text(*text, {}), text[-1]
            # As wide as what the encoder returns.
            inputs_ = dataclasses.replace(inputs_, encoded=texts["encoder_"][0])
        texts[""] = *prepare_text(params, tokens, config, inputs_, {}), inputs_
        for prefix, (x, types, own) in texts.items():
            for name, layers in types.items():
                with explaining() as notes:
                    run_layers(
                        {name: layers},
                        [name] * layers.plan.num_layers,
                        x,
                        dropout_key=key if training and layers.spec.dropout.is_active else None,
                        capture=tuple(own.capture),
                        patch=own.patch,
                    )
                sublayers = ("self",) if layers.spec.cross is None else ("self", "cross")
                explained[f"{prefix}{name}"] = dict(zip(sublayers, notes, strict=False))

    trace(call, params=param_shapes(config), key=jax.random.key(0), given=dict(inputs))
    return explained


def describe_attention(
    config: ModelConfig, inputs: Mapping[str, object], *, training: bool = False
) -> str:
    """The contraction order and the backend of every attention sublayer, "*" at those that are
    chosen, and why the others are not.

    Arguments as those of `explain_model`.

    >>> import jax
    >>> tokens = jax.ShapeDtypeStruct((1, 16), "int32")
    >>> text = describe_attention(ModelConfig(width=8, num_layers=1), {"tokens": tokens})
    >>> text.splitlines()[0]
    'self-attention of layers, contraction order:'
    """
    sections = []
    for stack, notes in explain_model(config, inputs, training=training).items():
        for sublayer, note in notes.items():
            lines = [f"{sublayer}-attention of {stack}, contraction order:"]
            for order, cost in note["order"].items():
                mark = "*" if order == note["chosen"]["order"] else " "
                flops = f"{cost:,} FLOPs a layer" if isinstance(cost, int) else cost
                lines.append(f"  {mark} {order:<12} {flops}")
            lines.append("backend:")
            for backend, reason in note["implementation"].items():
                mark = "*" if str(reason).startswith("chosen") else " "
                lines.append(f"  {mark} {backend:<12} {reason}")
            sections.append("\n".join(lines))
    return "\n\n".join(sections)
