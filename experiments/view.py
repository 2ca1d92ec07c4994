"""The attention of every head of a model, in one HTML file that works offline.

    python -m experiments.view --workdir=runs/one --text="The cat sat" --out=heads.html
    python -m experiments.view --path=FOLDER --text="The cat sat" --out=heads.html

--workdir is a run, --path a folder with config.json, safetensors and tokenizer.json of a published
model. Two models are shown side by side, with --untrained one model and itself before training.
Without --text a run shows a held-out row of its data. For an encoder-decoder --source is the text
of the encoder and --text that of the decoder. The file opens in any browser and loads nothing else.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
from absl import flags
from jax.typing import ArrayLike

from attnlab.atomic import check_new_file
from attnlab.interpret import model_panel, view_panels
from attnlab.interpret.panels import with_factored_order
from attnlab.load import open_folder, open_run
from experiments import app

LONGEST = 1024
"""Tokens of the longest text: a page holds a byte for every pair of them, head by head."""


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_multi_string("workdir", None, "The folder of one run; may be given twice.")
    flags.DEFINE_multi_string("path", None, "A folder of a published model; may be given twice.")
    flags.DEFINE_integer("seed", None, "Seed of the runs; the first if left out.")
    flags.DEFINE_bool("untrained", False, "Also show the same model before training.")
    app.define_prompt("Text that the model reads; left out: a held-out row of the run.")
    flags.DEFINE_bool("ablation", True, "Also run the model without each head and show the loss.")
    flags.DEFINE_string("title", "", "The title of the page.")
    flags.DEFINE_string("out", None, "The file to write.", required=True)
    flags.DEFINE_bool("overwrite", False, "Replace --out if it exists.")


def main() -> None:
    """Writes --out."""
    given, out = flags.FLAGS, Path(flags.FLAGS.out)
    runs, folders = given.workdir or [], given.path or []
    if not (runs or folders) or len(runs) + len(folders) + given.untrained > 2:
        raise ValueError(
            "give one or two models by --workdir=RUN or --path=FOLDER of a published model; "
            "--untrained adds one"
        )
    app.check_seed()
    if out.is_file() and not given.overwrite:
        raise ValueError(f"{out} exists already; add --overwrite, or name another file with --out")
    if not out.is_file():
        check_new_file(out, "out")
    texts = app.given_prompt()
    models = [open_run(run, given.seed) for run in runs]
    models += [open_folder(folder) for folder in folders]
    read = [model.read(*texts) for model in models]
    longest = max(len(text) for one in read for text in one.written.values())
    if longest > LONGEST:
        raise ValueError(
            f"a page of {longest} tokens would be too large to open, {LONGEST} are the most; give "
            "a shorter text"
        )
    if given.untrained:
        before, name = models[0].initial(read[0].inputs), f"{models[0].name}, untrained"
        models.append(dataclasses.replace(models[0], name=name, params=before))
        read.append(read[0])
    # Of a run WORKDIR/runs/ID both names; of another model that of its folder.
    paths = [Path(opened.name).resolve() for opened in models]
    short = [
        f"{path.parents[1].name}, {path.name}" if opened.record else path.name
        for path, opened in zip(paths, models, strict=True)
    ]
    names = short if len(set(short)) == len(short) else [opened.name for opened in models]
    panels = []
    for opened, one, name in zip(models, read, names, strict=True):
        config = with_factored_order(opened.config)
        inputs = cast(Mapping[str, ArrayLike], one.inputs)
        metric = one.metric and one.metric(config.build())
        panels.append(
            model_panel(
                config, opened.params, inputs, one.written,
                metric=metric, ablate=given.ablation, name=name if len(models) > 1 else "",
            )
        )  # fmt: skip
    page = view_panels(panels, title=given.title or f"Attention heads of {names[0]}")
    page.save(out, overwrite=given.overwrite)
    heads = sum(math.prod(np.shape(maps.probs)[:2]) for panel in panels for maps in panel.maps)
    print(f"{out}: {heads} heads, {out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    define_flags()
    app.start(main)
