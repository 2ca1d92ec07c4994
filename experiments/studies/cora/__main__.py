"""The command of the study: python -m experiments.studies.cora"""

from pathlib import Path

from absl import flags

from experiments import app
from experiments.configs.cora import read_graph
from experiments.studies.cora import analysis, study
from experiments.studies.rows import completed, one_by_one, write_page

__doc__ = study.__doc__
flags.DEFINE_string("data", None, "Folder of Cora (docs/reference/texts.md).", required=True)
flags.DEFINE_string("out", "docs/results", "Folder of the page, the numbers and the figure.")


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    graph, out = read_graph(Path(flags.FLAGS.data)), Path(flags.FLAGS.out)
    train = one_by_one(lambda variant, seed: study.run_one(variant, seed, graph))
    rows = completed(out / "cora.csv", study.RUNS, train)
    write_page(out, "cora", analysis.page(rows), analysis.figure(rows))


app.start(main)
