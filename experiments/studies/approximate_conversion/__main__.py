"""The command of the study: python -m experiments.studies.approximate_conversion"""

from pathlib import Path

import pandas
from absl import flags

from attnlab.atomic import write_atomic
from experiments import app
from experiments.studies.approximate_conversion import study

__doc__ = study.__doc__
flags.DEFINE_string("out", "docs/results", "Folder of the page and its rows.")


def main() -> None:
    """Trains, converts, writes the rows and the page."""
    path = Path(flags.FLAGS.out) / "approximate_conversion.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(study.run()).to_csv(path, index=False)
    text = study.page(pandas.read_csv(path))
    write_atomic(path.with_suffix(".md"), text.encode())
    print(text)


app.start(main)
