"""The command of the study: python -m experiments.studies.approximate_conversion"""

from experiments.studies.approximate_conversion import study
from experiments.studies.rows import start

start(study, study.write_rows, study.page)
