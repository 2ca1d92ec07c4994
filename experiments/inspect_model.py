"""Prints what a model consists of and costs, before it is trained.

    python -m experiments.inspect_model --config=experiments/configs/byte_lm.py:wide,cycle_rev:2
    python -m experiments.inspect_model --path=FOLDER
    python -m experiments.inspect_model --workdir=runs/one
    python -m experiments.inspect_model --path=FOLDER --text="The sea, the sea"

FOLDER holds config.json and safetensors of a published model (see `attnlab.pretrained`). Prints the
parameter group of each layer, unique and applied parameters by sublayer, FLOPs, cache bytes, and
how attention would be computed at the config's batch and length (a folder: one text of 512 tokens).
With --text, which needs a tokenizer.json in the folder, it also prints the tokens, what each head
attends to most, and the continuation (for an encoder: its predictions). It trains and writes
nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from attnlab import models, pretrained, runs
from attnlab.data import load_tokenizer
from attnlab.lab.run import attention_reports, step_inputs
from attnlab.models import ModelConfig, generate
from attnlab.models.config import sharing_name
from attnlab.models.cost import sublayer_parameters
from attnlab.models.parameters import num_outer_parameters
from attnlab.sharing.plan import Plan
from attnlab.training.objectives import OBJECTIVES
from experiments import app
from experiments.setup import matched_experiment
from experiments.text_table import columns


def main() -> None:
    """Prints the model of --config, of the folder --path or of the run --workdir."""
    path, workdir = flags.FLAGS.path, flags.FLAGS.workdir
    if bool(path) + bool(workdir) + bool(flags.FLAGS.config) != 1:
        raise ValueError("give exactly one of --config=FILE, --path=FOLDER and --workdir=RUN")
    if flags.FLAGS.text and not path:
        raise ValueError(
            "--text needs the tokenizer of a folder; give --path=FOLDER, not --config or --workdir"
        )
    if path:
        model = pretrained.load_config(path)
        print(describe(model, 1, min(model.max_len, 512)))
        if flags.FLAGS.text:
            print("\n" + read_text(path, flags.FLAGS.text))
        return
    if workdir:
        config = runs.read_run(workdir, ()).config
        print(describe(config, 1, min(config.max_len, 512)))
        return
    experiment = matched_experiment(app.config())
    task = OBJECTIVES[experiment.task].bind(experiment.data.sizes())
    train = experiment.train
    inputs = step_inputs(task, experiment.data.shapes(train.length), train)
    print(describe(experiment.model, train.batch_size, train.length, inputs))


def describe(
    config: ModelConfig, batch: int, length: int, inputs: dict[str, Any] | None = None
) -> str:
    """The model in text, for batches of `batch` texts of `length` tokens.

    Attention is that of a training step on `inputs`, where given, else of a call on such texts.
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
    if making := models.weight_flops(config):
        costs.append(("FLOPs per call", f"{making:,} to compute the weights of the layers"))
    return "\n\n".join(
        [
            title,
            _picture(config),
            _parts(config),
            columns(costs),
            _attention(config, inputs or _texts(config, batch, length), training=bool(inputs)),
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
    prompt = jnp.zeros((1, 1), ids.dtype) if both else ids  # T5 begins with token 0
    source, probs_of = ids if both else None, "encoder.probs" if both else "probs"
    seen = jax.jit(
        lambda p: model.apply({"params": p}, prompt, source=source, capture=(probs_of,))
    )(params)
    names = [repr(name) for name in read.names]
    rows = zip(range(len(names)), read.tokens, names, strict=True)
    sections = ["\n".join(["token  id      text", *(f"{i:<6} {t:<7} {n}" for i, t, n in rows)])]
    probs = [np.asarray(p[0]) for p in seen.captured[probs_of]]
    sections.append(
        "what each head attends to most, mean over all tokens:\n" + _looks(probs, names)
    )
    room = config.max_len - (1 if both else len(names))
    if config.kind == "encoder" and seen.logits is not None:
        best = [repr(tokenizer.decode([t])) for t in np.argmax(seen.logits[0], axis=-1)]
        sections.append("predictions in their place: " + " ".join(best))
    elif config.kind != "encoder" and config.output.kind != "none" and room > 0:
        new = generate(params, prompt, config, min(NEW_TOKENS, room), source=source)
        sections.append("continuation: " + repr(tokenizer.decode(np.asarray(new[0]).tolist())))
    return "\n\n".join(sections)


def _looks(probs: Sequence[np.ndarray], names: Sequence[str]) -> str:
    """A row a layer, a column a head: the token that gets most of the mean attention, of [N, T, S]
    of each layer, and how much; of a causal head that is often the first."""
    cell = lambda p: f"{names[int(p.argmax())]} {p.max():.2f}"
    heads = max(map(len, probs))
    rows = [("layer", *(f"head {n}" for n in range(heads)))]
    for i, layer in enumerate(probs):
        cells = [cell(p) for p in layer.mean(axis=1)]
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
        rows: list[tuple[str, list[Any]]] = [(stack, list(range(plan.num_layers)))]
        if config.layer_types:
            rows.append(("  type", [name.removeprefix("layers_") for name in config.layer_names]))
        rows += [
            (f"  {part}", [g if isinstance(g, int) else _pointer(g) for g in groups])
            for part, groups in plan.items()
        ]
        width = max(len(str(cell)) for _, row in rows for cell in row)
        names = max(11, *(len(name) for name, _ in rows)) + 2
        lines += [f"{name:<{names}}{' '.join(f'{n:>{width}}' for n in row)}" for name, row in rows]
    if config.encoder is not None and config.encoder.shares_decoder:
        lines.append("both stacks use the same parameter groups")
    return "\n".join(lines)


def _pointer(group: str | None) -> str:
    """To keys and values of the layer before, or of one with a number."""
    return "<" if group is None else group


def _parts(config: ModelConfig) -> str:
    outer = num_outer_parameters(config)
    rows = [("part", "sets", "parameters each", "unique", "applied")]
    stacks = [
        (name, config.encoder_layer if name == "encoder" else config.layer, plan)
        for name, plan in ({} if config.layer_types else _stacks(config)).items()
    ]
    stacks += [(n, c.layer, c.plan) for n, c in config.stacks.items() if config.layer_types]
    shares = config.encoder is not None and config.encoder.shares_decoder
    for stack, layer, plan in stacks:
        sizes = sublayer_parameters(layer)
        for part, count in plan.num_groups.items():
            uses, size = plan.num_applications[part], sizes[part]
            own = 0 if stack == "encoder" and shares else count
            numbers = (f"{size:,}", f"{size * own:,}", f"{size * uses:,}")
            rows.append((f"{stack} {part}", str(own), *numbers))
    return columns([*rows, ("outside the layers", "1", f"{outer:,}", f"{outer:,}", f"{outer:,}")])


ATTENTION = {"self": "attention", "cross": "cross-attention", "encoder": "the encoder's attention"}


def _texts(config: ModelConfig, batch: int, length: int) -> dict[str, Any]:
    names = ("source", "tokens") if config.kind == "encoder_decoder" else ("tokens",)
    return dict.fromkeys(names, jax.ShapeDtypeStruct((batch, length), "int32"))


def _attention(config: ModelConfig, inputs: dict[str, Any], *, training: bool) -> str:
    """Order of contraction and backend, with the reasons against the others."""
    texts = {"self": "tokens", "cross": "tokens", "encoder": "source"}
    sections = []
    for name, told in attention_reports(config, inputs, training=training).items():
        batch, length = inputs[texts.get(name, "tokens")].shape[:2]
        which = ATTENTION.get(name, f"attention of {name}")
        lines = [f"{which}, contraction order at {batch} texts of {length} tokens:"]
        for order, cost in told["order"].items():
            mark = "*" if order == told["chosen"]["order"] else " "
            lines.append(f"  {mark} {order:<12} {_flops(cost)}")
        lines.append("backend:")
        for backend, reason in told["implementation"].items():
            lines.append(f"  {'*' if reason.startswith('chosen') else ' '} {backend:<12} {reason}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _flops(cost: Any) -> str:
    return f"{cost:,} FLOPs a layer" if isinstance(cost, int) else cost


if __name__ == "__main__":
    app.define_config(required=False)
    flags.DEFINE_string("path", "", "A folder with config.json and safetensors.")
    flags.DEFINE_string("workdir", "", "The folder of a run.")
    flags.DEFINE_string("text", "", "A text for the model of --path; needs its tokenizer.json.")
    app.start(main)
