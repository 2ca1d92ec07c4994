"""The command of the study: python -m experiments.studies.looped_depth"""

from pathlib import Path

import pandas
from absl import flags

from experiments.studies.looped_depth import analysis, study
from experiments.studies.rows import completed, start

WORKDIR = flags.DEFINE_string(
    "workdir", "runs/looped_depth", "Folder of the runs that are missing."
)


def rows(path: Path) -> pandas.DataFrame:
    """Those of the file, after the runs that are missing: first the tuning, which gives rates."""
    train = lambda runs: study.trained(runs, WORKDIR.value)
    tuning = completed(path, study.TUNING, train)
    return completed(path, study.runs(analysis.best_rates(tuning)), train)


start(study, rows, analysis.page, analysis.figure)
