"""The attention of every head of a model, in one HTML file that works offline.

    python -m experiments.view --workdir=runs/one --text="The cat sat" --out=heads.html
    python -m experiments.view --path=FOLDER --text="The cat sat" --out=heads.html

--workdir is a run, --path a folder with config.json, safetensors and tokenizer.json of a published
model. Two of them stand side by side; so do one and its fresh start with --fresh. Without a text a
run shows a row that is held out. An encoder-decoder reads --source and writes --text. Open the file
in any browser: nothing is loaded from anywhere.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from absl import flags

from attnlab.interpret import model_panel, view_panels
from attnlab.lab.loaded import LoadedModel, Prompt, open_folder, open_run
from experiments import app


def main() -> None:
    """Writes --out."""
    given, out = flags.FLAGS, Path(flags.FLAGS.out)
    runs, folders = given.workdir or [], given.path or []
    if not runs and not folders:
        raise ValueError(
            "which model? type --workdir=RUN for a run, or --path=FOLDER for a published model "
            "(twice, or one of each, for two side by side)"
        )
    if len(runs) + len(folders) + given.fresh > 2:
        raise ValueError("two models stand side by side, no more: leave one out, or --fresh")
    if given.seed is not None and not runs:
        raise ValueError("--seed is for --workdir; a folder holds one model")
    if out.exists() and not given.overwrite:
        raise ValueError(f"{out} is there already; add --overwrite, or name another --out")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for --out")
    asked = Prompt(given.text, given.tokens, given.source, given.source_tokens)
    models = [open_run(Path(run), given.seed) for run in runs]
    models += [open_folder(Path(folder)) for folder in folders]
    read = [model.read(asked) for model in models]
    if given.fresh:
        models.append(_begun(models[0], read[0].inputs))
        read.append(read[0])
    panels = []
    for opened, one in zip(models, read, strict=True):
        # Gated heads are those of the factored order, which gives the same values as any other.
        attention = dataclasses.replace(opened.config.attention, order=None)
        config = dataclasses.replace(opened.config, attention=attention)
        panels.append(
            model_panel(
                config,
                opened.params,
                one.inputs,
                one.written,
                metric=one.metric and one.metric(config.build()),
                ablate=given.ablation,
                name=opened.name if len(models) > 1 else "",
            )
        )
    page = view_panels(panels, title=given.title or f"Attention heads of {models[0].name}")
    page.save(out, overwrite=given.overwrite)
    heads = sum(math.prod(np.shape(maps.probs)[:2]) for panel in panels for maps in panel.maps)
    print(f"{out}: {heads} heads, {out.stat().st_size / 2**20:.1f} MiB")


def _begun(opened: LoadedModel, inputs: dict) -> LoadedModel:
    """The same model before it was trained."""
    fresh = opened.initial(inputs)
    return opened._replace(name=f"{opened.name}, fresh", params=fresh)


if __name__ == "__main__":
    flags.DEFINE_multi_string("workdir", None, "The folder of one run; may be given twice.")
    flags.DEFINE_multi_string("path", None, "A folder of a published model; may be given twice.")
    flags.DEFINE_integer("seed", None, "Which seed of the runs; the first if not given.")
    flags.DEFINE_bool("fresh", False, "Beside it the same model before it was trained.")
    flags.DEFINE_string("text", "", "What the model reads; a run's held-out row if left out.")
    flags.DEFINE_string("tokens", "", "The same as numbers: 1,2,3.")
    flags.DEFINE_string("source", "", "What the encoder of an encoder-decoder reads.")
    flags.DEFINE_string("source_tokens", "", "The same as numbers.")
    flags.DEFINE_bool("ablation", True, "Run the model once without each head, and tell the loss.")
    flags.DEFINE_string("title", "", "The title of the page.")
    flags.DEFINE_string("out", None, "The file to write.", required=True)
    flags.DEFINE_bool("overwrite", False, "Write --out though it is there.")
    app.start(main)
