"""The command of the study: python -m experiments.studies.recall"""

from pathlib import Path

from absl import flags

from experiments import app
from experiments.studies.recall import analysis, study
from experiments.studies.rows import completed, one_by_one, write_page

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out = Path(flags.FLAGS.out)
    rows = completed(out / "recall.csv", study.runs(), one_by_one(study.run_one))
    write_page(out, "recall", analysis.page(rows), analysis.figure(rows))


app.start(main)
