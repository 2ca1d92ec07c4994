"""What a model consists of, what it costs, how its attention is computed, and what it reads.

`experiments.inspect_model` is the command; `attnlab.models.describe` the short table of a config.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import models, pretrained
from attnlab.data import load_tokenizer
from attnlab.lab.run import attention_reports
from attnlab.lab.text_table import columns
from attnlab.load import decoder_start, end_tokens, until_end
from attnlab.models import ModelConfig, generate
from attnlab.models.config import sharing_name
from attnlab.models.cost import sublayer_parameters
from attnlab.models.parameters import num_outer_parameters
from attnlab.sharing.plan import Plan
from attnlab.training.step import input_names

Shapes: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Arguments of a model's call."""


def inspect_model(
    config: ModelConfig, batch: int, length: int, inputs: Shapes | None = None
) -> str:
    """Parameter groups of every layer, parameters of every sublayer, costs, attention, as text.

    Args:
      config: the model.
      batch, length: texts and tokens of each, for FLOPs and attention.
      inputs: of a training step, whose attention is then shown; None: of a call on such texts.
    """
    plan = sharing_name(config)
    plan = "by hand" if "=" in plan else plan  # the picture below says which
    heads = [f"{c.heads.num_heads} {c.heads.name} heads" for c in config.stacks.values()]
    if config.encoder is not None and config.encoder.num_heads:
        heads.insert(0, f"{config.encoder.num_heads} in the encoder")
    title = (
        f"{config.kind}, {config.num_layers} layers of width {config.width}, "
        f"{' or '.join(dict.fromkeys(heads))}, plan {plan}"
        + (f", layer types {config.layer_types}" if config.layer_types else "")
    )
    unique, applied = models.num_parameters(config), models.applied_parameters(config)
    cache = models.cache_bytes_per_token(config)
    costs = [
        ("unique parameters", f"{unique:,}"),
        ("applied parameters", f"{applied:,} ({applied / unique:.2f} x unique)"),
        ("FLOPs per token", f"{models.flops_per_token(config, length):,} at length {length}"),
        ("cache per token", f"{cache:,} bytes in float32"),
    ]
    texts = dict.fromkeys(input_names(config), jax.ShapeDtypeStruct((batch, length), "int32"))
    if making := models.weight_flops(config):
        costs.append(("FLOPs per call", f"{making:,} to compute the weights of the layers"))
    return "\n\n".join(
        [
            title,
            _picture(config),
            _sublayers(config),
            columns(costs),
            _attention(config, inputs or texts, training=bool(inputs)),
        ]
    )


NEW_TOKENS = 20


def read_text(folder: str, text: str) -> str:
    """What the model of a folder does with a text."""
    tokenizer = load_tokenizer(pretrained.tokenizer_path(folder))
    read = tokenizer.read(text)
    if not len(read.tokens):
        raise ValueError("--text has no tokens; give at least one word")
    model, params = pretrained.load(folder)
    config = model.config
    if len(read.tokens) > config.max_len:
        raise ValueError(f"{len(read.tokens)} tokens are longer than max_len {config.max_len}")
    ids, both = jnp.asarray(read.tokens)[None], config.encoder is not None
    prompt = jnp.full((1, 1), decoder_start(Path(folder)), ids.dtype) if both else ids
    source, probs_of = ids if both else None, "encoder.probs" if both else "probs"
    call = lambda p: model.apply({"params": p}, prompt, source=source, capture=(probs_of,))
    seen = jax.jit(call)(params)
    names = [repr(name) for name in read.names]
    rows = zip(range(len(names)), read.tokens, names, strict=True)
    sections = ["\n".join(["token  id      text", *(f"{i:<6} {t:<7} {n}" for i, t, n in rows)])]
    probs = [np.asarray(p[0]) for p in seen.captured[probs_of]]
    sections.append(
        "what each head attends to most, mean over all tokens:\n" + _most_attended(probs, names)
    )
    room = config.max_len - (1 if both else len(names))
    if config.kind == "encoder" and seen.logits is not None:
        best = [repr(tokenizer.decode([t])) for t in np.argmax(seen.logits[0], axis=-1)]
        sections.append("predictions in their place: " + " ".join(best))
    elif config.kind != "encoder" and config.output.kind != "none" and room > 0:
        ends = end_tokens(Path(folder), config)
        count = min(NEW_TOKENS, room)
        new = generate(params, prompt, config, count, source=source, end=ends or None)[0].tolist()
        written = tokenizer.decode(list(until_end(new, ends)))
        sections.append(f"continuation: {written!r}")
    return "\n\n".join(sections)


def _most_attended(probs: Sequence[np.ndarray], names: Sequence[str]) -> str:
    """A row a layer, a column a head: the token that gets most of the mean attention, of [N, T, S]
    of each layer, and how much; of a causal head that is often the first."""
    heads = max(map(len, probs))
    rows = [("layer", *(f"head {n}" for n in range(heads)))]
    for i, layer in enumerate(probs):
        cells = [f"{names[int(p.argmax())]} {p.max():.2f}" for p in layer.mean(axis=1)]
        rows.append((str(i), *cells, *[""] * (heads - len(cells))))
    return columns(rows)


def _stacks(config: ModelConfig) -> dict[str, Plan]:
    """Name -> plan of every stack."""
    if config.kind != "encoder_decoder":
        return {config.kind: config.plan}
    return {"encoder": config.encoder_plan, "decoder": config.plan}


def _picture(config: ModelConfig) -> str:
    """One row per sublayer, one column per layer: its parameter group. All count from 0."""
    lines = []
    for stack, plan in _stacks(config).items():
        rows = [(stack, list(map(str, range(plan.num_layers))))]
        if config.layer_types:
            rows.append(("  type", [name.removeprefix("layers_") for name in config.layer_names]))
        # "<": the keys and values of the layer before; a name is that of another layer.
        rows += [
            (f"  {sublayer}", ["<" if group is None else str(group) for group in groups])
            for sublayer, groups in plan.items()
        ]
        width = max(len(cell) for _, row in rows for cell in row)
        names = max(11, *(len(name) for name, _ in rows)) + 2
        lines += [f"{name:<{names}}{' '.join(f'{n:>{width}}' for n in row)}" for name, row in rows]
    if config.encoder is not None and config.encoder.shares_decoder:
        lines.append("both stacks use the same parameter groups")
    return "\n".join(lines)


def _sublayers(config: ModelConfig) -> str:
    """Parameters of each sublayer of a stack, and of the weights outside the layers."""
    outer = num_outer_parameters(config)
    rows = [("sublayer", "groups", "parameters each", "unique", "applied")]
    encoder = config.encoder
    stacks = [
        (name, config.encoder_layer if encoder and name == "encoder" else config.layer, plan)
        for name, plan in ({} if config.layer_types else _stacks(config)).items()
    ]
    stacks += [(n, c.layer, c.plan) for n, c in config.stacks.items() if config.layer_types]
    shares = encoder is not None and encoder.shares_decoder
    for stack, layer, plan in stacks:
        sizes = sublayer_parameters(layer)
        for sublayer, count in plan.num_groups.items():
            uses, size = plan.num_applications[sublayer], sizes[sublayer]
            own = 0 if stack == "encoder" and shares else count
            numbers = (f"{size:,}", f"{size * own:,}", f"{size * uses:,}")
            rows.append((f"{stack} {sublayer}", str(own), *numbers))
    return columns([*rows, ("outside the layers", "1", f"{outer:,}", f"{outer:,}", f"{outer:,}")])


ATTENTION = {"self": "attention", "cross": "cross-attention", "encoder": "the encoder's attention"}


def _attention(config: ModelConfig, inputs: Shapes, *, training: bool) -> str:
    """Order of contraction and backend, with the reasons against the others."""
    sections = []
    for name, report in attention_reports(config, inputs, training=training).items():
        batch, length = inputs["source" if name == "encoder" else "tokens"].shape[:2]
        which = ATTENTION.get(name, f"attention of {name}")
        lines = [f"{which}, contraction order at {batch} texts of {length} tokens:"]
        for order, cost in report["order"].items():
            mark = "*" if order == report["chosen"]["order"] else " "
            flops = f"{cost:,} FLOPs a layer" if isinstance(cost, int) else cost
            lines.append(f"  {mark} {order:<12} {flops}")
        lines.append("backend:")
        for backend, reason in report["implementation"].items():
            mark = "*" if str(reason).startswith("chosen") else " "
            lines.append(f"  {mark} {backend:<12} {reason}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)
