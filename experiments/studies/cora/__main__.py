"""The command of the study: python -m experiments.studies.cora"""

from pathlib import Path

import pandas
from absl import flags

from experiments.configs.cora import read_graph
from experiments.studies.cora import analysis, study
from experiments.studies.rows import completed, one_by_one, start

DATA = flags.DEFINE_string("data", None, "Folder of Cora (docs/reference/texts.md).", required=True)


def rows(path: Path) -> pandas.DataFrame:
    """Those of the file, after the runs that are missing."""
    graph = read_graph(Path(DATA.value))
    train = one_by_one(lambda variant, seed: study.run_one(variant, seed, graph))
    return completed(path, study.RUNS, train)


start(study, rows, analysis.page, analysis.figure)
