"""The command of the study: python -m experiments.studies.looped_depth"""

from pathlib import Path

from absl import flags

from experiments import app
from experiments.studies.looped_depth import study
from experiments.studies.rows import completed, write_page

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
flags.DEFINE_integer(
    "seeds", 10, "Seeds of each variant.", lower_bound=2, upper_bound=min(study.TUNING_SEEDS)
)
flags.DEFINE_integer("steps", 1000, "Training steps of a run.", lower_bound=1)


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out, seeds, steps = Path(flags.FLAGS.out), flags.FLAGS.seeds, flags.FLAGS.steps
    path = out / "looped_depth.csv"
    for name in study.VARIANTS:
        run = {"variant": name, "rate": 0.0, "seed": 0, "steps": steps}
        tuning = [
            run | {"rate": rate, "seed": seed}
            for rate in study.RATES
            for seed in study.TUNING_SEEDS
        ]
        rows = completed(path, tuning, study.run_one)
        best = {"rate": study.best_rate(rows[rows.steps == steps], name)}
        rows = completed(
            path, [run | best | {"seed": seed} for seed in range(seeds)], study.run_one
        )
    # With seeds of a rate that was the best before.
    rows = rows[(rows.steps == steps) & rows.seed.isin({*study.TUNING_SEEDS, *range(seeds)})]
    write_page(out, "looped_depth", study.page(rows, app.given_command()), study.figure(rows))


app.start(main)
