"""The command of the study: python -m experiments.studies.rank_bound"""

from pathlib import Path

import jax
import pandas
from absl import flags

from attnlab.atomic import write_atomic
from experiments import app
from experiments.studies.rank_bound import study

__doc__ = study.__doc__
flags.DEFINE_list("sizes", ["16", "32"], "Sequence lengths n, separated by commas.")
flags.DEFINE_integer("matrices", 5, "Random attention matrices for each n.", lower_bound=1)
flags.DEFINE_integer("steps", 10_000, "Steps of gradient descent.", lower_bound=1)
flags.DEFINE_string("out", "", "Folder for rank_bound.md and rank_bound.csv; left out: none.")


def main() -> None:
    """Prints the table and writes table and numbers."""
    jax.config.update("jax_enable_x64", True)  # float32 errors would hide which heads are exact
    given = flags.FLAGS
    found = [study.experiment(int(n), given.matrices, given.steps) for n in given.sizes]
    rows = pandas.concat(found)
    text = study.table(rows)
    print(text)
    if given.out:
        folder = Path(given.out)
        folder.mkdir(parents=True, exist_ok=True)
        made = (
            f"Dirichlet(1) rows, {given.matrices} matrices, {given.steps} steps of Adam; median "
            "(lowest to highest)"
        )
        numbers = rows.to_csv(index=False, float_format="%.6e")
        write_atomic(folder / "rank_bound.md", f"{made}\n\n{text}\n".encode())
        write_atomic(folder / "rank_bound.csv", numbers.encode())


app.start(main)
