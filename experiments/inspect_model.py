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

from absl import flags

from attnlab import pretrained
from attnlab.lab.model_summary import inspect_model, read_text
from attnlab.lab.run import step_inputs
from attnlab.load import read_run
from experiments import app, config


def main() -> None:
    """Prints the model of --config, of the folder --path or of the run --workdir."""
    path, workdir = flags.FLAGS.path, flags.FLAGS.workdir
    if bool(path) + bool(workdir) + bool(flags.FLAGS.config) != 1:
        raise ValueError("give exactly one of --config=FILE, --path=FOLDER and --workdir=RUN")
    if flags.FLAGS.text and not path:
        raise ValueError(
            "--text needs the tokenizer of a folder; give --path=FOLDER, not --config or --workdir"
        )
    if flags.FLAGS.config:
        [spec] = config.one_model(config.given().config).specs([0])
        task = spec.config.objective.bind(spec.config.data.sizes())
        train = spec.config.train
        inputs = step_inputs(task, spec.config.data.shapes(train.length), train)
        print(inspect_model(spec.config.model, train.batch_size, train.length, inputs))
        return
    model = pretrained.load_config(path) if path else read_run(workdir, ()).config
    print(inspect_model(model, 1, min(model.max_len, 512)))
    if flags.FLAGS.text:
        print("\n" + read_text(path, flags.FLAGS.text))


if __name__ == "__main__":
    app.define_config(required=False)
    flags.DEFINE_string("path", "", "A folder with config.json and safetensors.")
    flags.DEFINE_string("workdir", "", "The folder of a run.")
    flags.DEFINE_string("text", "", "A text for the model of --path; needs its tokenizer.json.")
    app.start(main)
