"""The command of the study: python -m experiments.studies.rank_bound"""

from pathlib import Path

import jax
import pandas
from absl import flags

from attnlab.atomic import write_atomic
from experiments import app
from experiments.studies.rank_bound import study

__doc__ = study.__doc__
flags.DEFINE_string("out", "", "Folder for rank_bound.md and rank_bound.csv; left out: none.")


def main() -> None:
    """Prints the table and writes table and numbers."""
    jax.config.update("jax_enable_x64", True)  # float32 errors would hide which heads are exact
    rows = pandas.concat([study.experiment(n) for n in study.SIZES])
    text = study.table(rows)
    print(text)
    if flags.FLAGS.out:
        folder = Path(flags.FLAGS.out)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = rows.to_csv(index=False, float_format="%.6e")
        write_atomic(folder / "rank_bound.md", f"{study.MADE}\n\n{text}\n".encode())
        write_atomic(folder / "rank_bound.csv", numbers.encode())


app.start(main)
