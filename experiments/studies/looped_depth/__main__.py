"""The command of the study: python -m experiments.studies.looped_depth"""

from pathlib import Path
from typing import Any

from absl import flags

from attnlab import lab
from experiments import app
from experiments.studies.looped_depth import analysis, study
from experiments.studies.rows import completed, write_page

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
flags.DEFINE_string("workdir", "runs/looped_depth", "Folder of the runs that are missing.")
flags.DEFINE_integer(
    "seeds", 10, "Seeds of each variant.", lower_bound=2, upper_bound=min(study.TUNING_SEEDS)
)
flags.DEFINE_integer("steps", 1000, "Training steps of a run.", lower_bound=1)


def trained(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of runs of `lab.sweep`."""
    specs = [study.spec(**run) for run in runs]
    return [study.row(run) for run in lab.sweep(specs, flags.FLAGS.workdir)] if specs else []


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out, seeds, steps = Path(flags.FLAGS.out), flags.FLAGS.seeds, flags.FLAGS.steps
    path = out / "looped_depth.csv"
    tuning = [
        {"variant": name, "rate": rate, "seed": seed, "steps": steps}
        for name in study.VARIANTS
        for rate in study.RATES
        for seed in study.TUNING_SEEDS
    ]
    rows = completed(path, tuning, trained)
    rows = rows[rows.steps == steps]
    judged = [
        {"variant": name, "rate": analysis.best_rate(rows, name), "seed": seed, "steps": steps}
        for name in study.VARIANTS
        for seed in range(seeds)
    ]
    rows = completed(path, judged, trained)
    # With seeds of a rate that was the best before.
    rows = rows[(rows.steps == steps) & rows.seed.isin({*study.TUNING_SEEDS, *range(seeds)})]
    write_page(out, "looped_depth", analysis.page(rows, app.given_command()), analysis.figure(rows))


app.start(main)
