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

import jax
from absl import flags

from attnlab.lab.run import step_inputs
from attnlab.load import load_config, open_folder
from attnlab.models import describe, describe_attention
from attnlab.training.step import input_names
from experiments import app, config


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
        print("\n" + open_folder(path).describe_text(flags.FLAGS.text))


if __name__ == "__main__":
    define_flags()
    app.start(main)
