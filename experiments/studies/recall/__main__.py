"""The command of the study: python -m experiments.studies.recall"""

from experiments import app
from experiments.studies.recall import study

__doc__ = study.__doc__
study.define_flags()
app.start(study.main)
