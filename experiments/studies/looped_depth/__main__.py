"""The command of the study: python -m experiments.studies.looped_depth"""

from experiments import app
from experiments.studies.looped_depth import study

__doc__ = study.__doc__
study.define_flags()
app.start(study.main)
