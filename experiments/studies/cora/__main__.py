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
flags.DEFINE_integer("seeds", 20, "Seeds of the published configuration.", lower_bound=2)
flags.DEFINE_integer("other_seeds", 5, "Seeds of each other variant.", lower_bound=2)


def main() -> None:
    """Runs what is missing, then writes page, numbers and figure."""
    given, out = flags.FLAGS, Path(flags.FLAGS.out)
    graph = read_graph(Path(given.data))
    count = dict.fromkeys(study.VARIANTS, given.other_seeds) | {study.MAIN: given.seeds}
    runs = [{"variant": name, "seed": seed} for name in count for seed in range(count[name])]
    train = one_by_one(lambda variant, seed: study.run_one(variant, seed, graph))
    rows = completed(out / "cora.csv", runs, train)
    name = Path(given.data).name
    command = app.given_command().replace(f"data={given.data}", f"data=PATH/{name}")
    write_page(out, "cora", analysis.page(rows, command), analysis.figure(rows))


app.start(main)
