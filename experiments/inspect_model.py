"""What a model is, before it costs anything: which layer uses which weights, and what that costs.

    python -m experiments.inspect_model --config=experiments/configs/byte_lm.py:wide,cycle_rev:2
    python -m experiments.inspect_model --path=FOLDER

FOLDER holds config.json and safetensors of a published model (see `attnlab.pretrained`). Prints the
plan as a picture, unique and applied parameters by part, FLOPs, cache bytes, and how attention
would be computed at the config's batch and length (one text of 512 tokens for a folder). Nothing is
trained or written.
"""

from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from attnlab import pretrained
from attnlab.model import accounting
from attnlab.model.config import ModelConfig
from attnlab.model.explain import explain_model
from attnlab.model.outer import count_outer
from attnlab.sharing.named import name_of
from attnlab.sharing.plan import Plan
from attnlab.training.tasks import TASKS
from experiments.running import arm, launch


def main() -> None:
    """Prints the model of --config or of the folder --path."""
    path = flags.FLAGS.path
    if bool(path) == bool(flags.FLAGS.config):
        raise ValueError("give either --config or --path")
    if path:
        model = pretrained.load(path)[0].config
        print(describe(model, 1, min(model.max_len, 512)))
        return
    resolved = arm.resolve(launch.config()[1])
    task = TASKS[resolved.task].bind(resolved.data.sizes())
    row = resolved.data.shapes(resolved.train.length)
    inputs = arm.step_inputs(task, row, resolved.train)
    print(describe(resolved.model, resolved.train.batch_size, resolved.train.length, inputs))


def describe(
    config: ModelConfig, batch: int, length: int, inputs: dict[str, Any] | None = None
) -> str:
    """The model in text, for batches of `batch` texts of `length` tokens.

    Attention is that of a training step on `inputs`, where given, else of a call on such texts.
    """
    plan = name_of(config.plan)
    plan = "by hand" if "=" in plan else plan  # the picture below says which
    title = (
        f"{config.kind}, {config.num_layers} layers of width {config.width}, {config.num_heads} "
        f"{config.layout} heads, plan {plan}"
    )
    unique = accounting.unique_parameters(config)
    applied = accounting.applied_parameters(config)
    cache = accounting.model_cache_bytes(config)
    costs = [
        ("unique parameters", f"{unique:,}"),
        ("applied parameters", f"{applied:,} ({applied / unique:.2f} x unique)"),
        ("FLOPs per token", f"{accounting.flops_per_token(config, length):,} at length {length}"),
        ("cache per token", f"{cache:,} bytes in float32"),
    ]
    return "\n\n".join(
        [
            title,
            _picture(config),
            _parts(config),
            _columns(costs),
            _attention(config, inputs or _texts(config, batch, length), training=bool(inputs)),
        ]
    )


def _stacks(config: ModelConfig) -> dict[str, Plan]:
    """Name -> plan of every stack."""
    if config.kind != "encoder_decoder":
        return {config.kind: config.layer_plan}
    return {"encoder": config.encoder_layer_plan, "decoder": config.layer_plan}


def _picture(config: ModelConfig) -> str:
    """One row per part, one column per application: the number of the slot that it uses."""
    lines = []
    for stack, plan in _stacks(config).items():
        rows: list[tuple[str, list[Any]]] = [(stack, list(range(1, plan.num_layers + 1)))]
        rows += [
            (f"  {part}", [s + 1 if isinstance(s, int) else _pointer(s) for s in slots])
            for part, slots in plan.items()
        ]
        width = max(len(str(cell)) for _, row in rows for cell in row)
        lines += [f"{name:<13}{' '.join(f'{n:>{width}}' for n in row)}" for name, row in rows]
    if config.kind == "encoder_decoder" and config.share_encoder:
        lines.append("both stacks read one pool of sets")
    return "\n".join(lines)


def _pointer(slot: str | None) -> str:
    """To keys and values of the layer before, or of one with a number; counted from 1 here."""
    return "<" if slot is None else f"@{int(slot[1:]) + 1}"


def _parts(config: ModelConfig) -> str:
    outer = count_outer(config)
    rows = [("part", "sets", "parameters each", "unique", "applied")]
    for stack, plan in _stacks(config).items():
        for part, size in accounting.part_parameters(config, plan).items():
            count, uses = plan.num_slots[part], plan.num_applied[part]
            own = 0 if stack == "encoder" and config.share_encoder else count
            numbers = (f"{size:,}", f"{size * own:,}", f"{size * uses:,}")
            rows.append((f"{stack} {part}", str(own), *numbers))
    return _columns([*rows, ("outside the layers", "1", f"{outer:,}", f"{outer:,}", f"{outer:,}")])


ATTENTION = {"self": "attention", "cross": "cross-attention", "encoder": "the encoder's attention"}


def _texts(config: ModelConfig, batch: int, length: int) -> dict[str, Any]:
    names = ("source", "tokens") if config.kind == "encoder_decoder" else ("tokens",)
    return dict.fromkeys(names, jax.ShapeDtypeStruct((batch, length), "int32"))


def _attention(config: ModelConfig, inputs: dict[str, Any], *, training: bool) -> str:
    """Order of contraction and backend, with the reasons against the others."""
    texts = {"self": "tokens", "cross": "tokens", "encoder": "source"}
    sections = []
    for name, told in explain_model(config, inputs, training=training).items():
        batch, length = inputs[texts[name]].shape[:2]
        lines = [f"{ATTENTION[name]}, order of contraction at {batch} texts of {length} tokens:"]
        for order, cost in told["order"].items():
            mark = "*" if order == told["chosen"]["order"] else " "
            lines.append(f"  {mark} {order:<12} {_flops(cost)}")
        lines.append("backend:")
        for backend, reason in told["implementation"].items():
            lines.append(f"  {'*' if reason == 'chosen' else ' '} {backend:<12} {reason}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _flops(cost: Any) -> str:
    return f"{cost:,} FLOPs a layer" if isinstance(cost, int) else cost


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """The first column to the left, numbers to the right where there are several."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{first:<{widths[0]}}"]
        for cell, width in zip(rest, widths[1:], strict=True):
            cells.append(f"{cell:>{width}}" if len(rest) > 1 else cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    launch.define_config(required=False)
    flags.DEFINE_string("path", "", "A folder with config.json and safetensors.")
    launch.start(main)
