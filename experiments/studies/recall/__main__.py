"""The command of the study: python -m experiments.studies.recall"""

from experiments.studies.recall import analysis, study
from experiments.studies.rows import completed, one_by_one, start

rows = lambda path: completed(path, study.runs(), one_by_one(study.run_one))
start(study, rows, analysis.page, analysis.figure)
