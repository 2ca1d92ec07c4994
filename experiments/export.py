"""Writes a run or a folder as a folder that transformers and `pretrained.load` read.

    python -m experiments.export --workdir=runs/one --out=OTHER
    python -m experiments.export --path=FOLDER --plan=separate --out=OTHER

--plan changes the sharing plan first and prints how much that changes the outputs. If the format of
the family has no sharing, shared weights are written once per layer. If the tokenizer is a file, it
is written too, as tokenizer.json.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from absl import flags

from attnlab import pretrained
from attnlab.atomic import write_atomic
from attnlab.data.tokenizer import FILE as TOKENIZER
from attnlab.load import with_plan_of
from attnlab.models import num_parameters
from experiments import app


def define_flags() -> None:
    """The flags of the command."""
    app.define_model()
    flags.DEFINE_string("plan", "", "Sharing plan to change to.")
    flags.DEFINE_string("out", None, "The folder to write; it must not exist.", required=True)


def main() -> None:
    """Writes --out."""
    given, out = flags.FLAGS, Path(flags.FLAGS.out)
    if out.exists():
        raise ValueError(f"{out} exists already; name a new folder with --out")
    found = app.given_model()
    config, params = found.config, found.params
    if given.plan:
        size = (2, min(config.longest_text, 64))
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, size, np.int32)
        config = dataclasses.replace(config, sharing=given.plan)
        params, change = with_plan_of(found.config, found.params, config, tokens)
        print(change)
    pretrained.save(out, config.build(), jax.tree.map(np.asarray, params))
    if (found.folder / TOKENIZER).is_file():
        write_atomic(out / TOKENIZER, (found.folder / TOKENIZER).read_bytes())
    written = pretrained.load_config(out)
    print(
        f"{out}: {num_parameters(written):,} parameters"
        f" ({num_parameters(config):,} before it was written)"
    )


if __name__ == "__main__":
    define_flags()
    app.start(main)
