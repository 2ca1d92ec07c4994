"""Prints what a model consists of and costs, before it is trained.

    python -m experiments.inspect_model --config=experiments/configs/byte_lm.py:layout=wide
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

import functools

import jax
import numpy as np
from absl import flags

from attnlab.lab.run import step_inputs
from attnlab.load import LoadedModel, load_config, open_folder
from attnlab.models import describe, describe_attention
from attnlab.models.stack import captured_per_layer
from attnlab.training.step import input_names
from experiments import app, config

NEW_TOKENS = 20
"""Tokens that continue --text."""


def define_flags() -> None:
    """The flags of the command."""
    app.define_config(required=False)
    flags.DEFINE_string("path", "", "A folder with config.json and safetensors.")
    flags.DEFINE_string("workdir", "", "The folder of a run.")
    flags.DEFINE_string("text", "", "A text for the model of --path; needs its tokenizer.json.")


def main(file: config.ConfigFile | None) -> None:
    """Prints the model of --config, of the folder --path or of the run --workdir."""
    path, workdir = flags.FLAGS.path, flags.FLAGS.workdir
    if bool(path) + bool(workdir) + bool(file) != 1:
        raise ValueError("give exactly one of --config=FILE, --path=FOLDER and --workdir=RUN")
    if flags.FLAGS.text and not path:
        raise ValueError(
            "--text needs the tokenizer of a folder; give --path=FOLDER, not --config or --workdir"
        )
    if file:
        [spec] = config.one_model(file.config).specs([0])
        experiment = spec.config
        task = experiment.objective.bind(experiment.data.sizes())
        train, model = experiment.train, experiment.model
        inputs = step_inputs(task, experiment.data.shapes(train.length), train)
        attention = describe_attention(model, inputs, training=True)
        print(describe(model, train.length) + "\n\n" + attention)
        return
    model = load_config(path or workdir)
    length = min(model.max_len, 512)
    texts = dict.fromkeys(input_names(model), jax.ShapeDtypeStruct((1, length), "int32"))
    print(describe(model, length) + "\n\n" + describe_attention(model, texts))
    if flags.FLAGS.text:
        print("\n" + describe_text(open_folder(path), flags.FLAGS.text))


def describe_text(model: LoadedModel, text: str) -> str:
    """What the model does with a text, for people: its tokens, the token that each head attends
    to most, and what follows; of an encoder the likeliest token at each position.

    Where a head has several softmax distributions (layout `differential`), each is a row, and
    its number is that of the distribution: [key head, first or second, query head].

    Raises:
      ValueError: there is no tokenizer, or the text has no token or too many.
    """
    config, both = model.config, model.config.encoder is not None
    texts = ("", text) if both else (text, "")
    read = model.read(*texts)
    of_text, probs_of = ("source", "encoder.probs") if both else ("tokens", "probs")
    ids, names = np.asarray(read.inputs[of_text])[0], list(map(repr, read.written[of_text]))
    rows = [f"{i:<6} {t:<7} {n}" for i, (t, n) in enumerate(zip(ids, names, strict=True))]
    call = functools.partial(config.build().apply, capture=(probs_of,))
    seen = jax.jit(call)({"params": model.params}, **read.inputs)
    per_layer = captured_per_layer(seen.captured, probs_of, config.layer_names)
    most = [
        f"{layer:<5} {head:<5} {names[int(p.argmax())]} {p.max():.2f}"
        for layer, probs in enumerate(per_layer)
        for head, p in enumerate(np.asarray(probs[0]).mean(axis=1))
    ]
    lines = ["token  id      text", *rows, "", "layer head  what it attends to most", *most, ""]
    space = config.max_len - np.shape(read.inputs["tokens"])[1]
    if config.kind == "encoder" and seen.logits is not None:
        best = [repr(model.decode([t])) for t in np.argmax(seen.logits[0], axis=-1).tolist()]
        lines.append("predictions in their place: " + " ".join(best))
    elif seen.logits is not None and space:
        whole = "".join(model.write(texts[0], min(NEW_TOKENS, space), source=texts[1]))
        begin = "" if both else model.decode(ids.tolist())
        lines.append(f"continuation: {whole.removeprefix(begin)!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    define_flags()
    app.start(main)
