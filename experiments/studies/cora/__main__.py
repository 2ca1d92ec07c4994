"""The command of the study: python -m experiments.studies.cora"""

from experiments import app
from experiments.studies.cora import study

__doc__ = study.__doc__
study.define_flags()
app.start(study.main)
