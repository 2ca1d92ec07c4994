"""The command of the study: python -m experiments.studies.rank_bound"""

from experiments import app
from experiments.studies.rank_bound import study

__doc__ = study.__doc__
study.define_flags()
app.start(study.main)
