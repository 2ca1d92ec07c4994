"""The command of the study: python -m experiments.studies.looped_depth"""

from pathlib import Path

from absl import flags

from experiments import app
from experiments.studies.looped_depth import analysis, study
from experiments.studies.rows import completed, write_page

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")
flags.DEFINE_string("workdir", "runs/looped_depth", "Folder of the runs that are missing.")


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    out, workdir = Path(flags.FLAGS.out), flags.FLAGS.workdir
    path, train = out / "looped_depth.csv", lambda runs: study.trained(runs, workdir)
    rows = completed(path, study.TUNING, train)
    rows = completed(path, study.runs(analysis.best_rates(rows)), train)
    write_page(out, "looped_depth", analysis.page(rows), analysis.figure(rows))


app.start(main)
