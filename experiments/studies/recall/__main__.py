"""The command of the study: python -m experiments.studies.recall"""

from pathlib import Path

from absl import flags

from experiments import app
from experiments.studies.recall import analysis, study
from experiments.studies.rows import completed, one_by_one, write_page

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
flags.DEFINE_integer("seeds", 10, "Seeds of each variant.", lower_bound=2)
flags.DEFINE_integer(
    "steps", 400, "Training steps of a run.", lower_bound=1, upper_bound=study.LONGER - 1
)


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out = Path(flags.FLAGS.out)
    runs = study.runs(flags.FLAGS.seeds, flags.FLAGS.steps)
    rows = completed(out / "recall.csv", runs, one_by_one(study.run_one))
    write_page(out, "recall", analysis.page(rows, app.given_command()), analysis.figure(rows))


app.start(main)
