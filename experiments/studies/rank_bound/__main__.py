"""The command of the study: python -m experiments.studies.rank_bound"""

from pathlib import Path

import jax
import pandas

from experiments.studies.rank_bound import study
from experiments.studies.rows import start


def rows(path: Path) -> pandas.DataFrame:
    """All rows anew."""
    jax.config.update("jax_enable_x64", True)  # float32 errors would hide which heads are exact
    found = pandas.concat(map(study.experiment, study.SIZES))
    found.to_csv(path, index=False, float_format="%.6e")
    return found


start(study, rows, study.page)
