r"""The first study: attention width paid for by the FFN, and shared layers.

    python -m experiments.studies.first_study

prints the effects of this study and of the head-width study and draws docs/results/effects.svg from
their rows, in 20 seconds. With --workdir it trains the runs of the published table instead, those
of --texts and --budgets.
"""

from pathlib import Path

from absl import flags

from attnlab import lab
from experiments import app
from experiments.studies.first_study import effects, study

OUT = flags.DEFINE_string("out", "docs/results/effects.svg", "SVG file to write.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the runs that are trained.")
DATA = flags.DEFINE_string("data", "../shared/data", "Folder of the texts.")
TEXTS = flags.DEFINE_list("texts", list(study.TEXTS), "Texts of the runs that are trained.")
BUDGETS = flags.DEFINE_list("budgets", list(study.BUDGETS), "What is equal in them.")
JOBS = flags.DEFINE_integer("jobs", None, "Runs at a time; left out: as many as cores allow.")


def main() -> None:
    """Draws the figure, or trains."""
    if not WORKDIR.value:
        effects.write(Path(OUT.value))
        return
    specs = study.run_specs(study.read_table(TEXTS.value, BUDGETS.value), Path(DATA.value))
    results = lab.sweep(specs, WORKDIR.value, executor=lab.LocalExecutor(jobs=JOBS.value))
    print(results.table().to_string())


app.start(main)
