"""The command of the study: python -m experiments.studies.syntax"""

from pathlib import Path

from absl import flags

from attnlab.atomic import check_new_file, write_atomic
from attnlab.load import open_folder
from experiments import app
from experiments.studies.syntax import study as syntax

__doc__ = syntax.__doc__
flags.DEFINE_string("workdir", "", "The folder of a run.")
flags.DEFINE_string("path", "", "A folder of a published model.")
flags.DEFINE_integer("seed", None, "Seed of the run; all if left out.")
flags.DEFINE_string("treebank", None, "A folder of CoNLL-U files, or one file.", required=True)
flags.DEFINE_bool("untrained", False, "Also the same model before it was trained.")
flags.DEFINE_integer(
    "least", 100, "Least number of words of a relation in each part.", lower_bound=1
)
flags.DEFINE_integer("sentences", None, "Largest number of sentences of each part.", lower_bound=1)
flags.DEFINE_string("out", "", "CSV file for all numbers.")
flags.DEFINE_string("raw", "", "Write the text of the part train to this file and stop.")


def main() -> None:
    """Prints the table, or writes --raw."""
    given = flags.FLAGS
    if given.raw:
        return syntax.write_raw(Path(given.treebank), Path(given.raw))
    app.check_one_model()
    if given.out:
        check_new_file(Path(given.out), "out")
    parts = [trees[: given.sentences] for trees in syntax.read_parts(Path(given.treebank))]
    models = syntax.open_seeds(Path(given.workdir), given.seed) if given.workdir else {}
    models = models or {"model": open_folder(Path(given.path))}
    study = syntax.evaluate(models, parts, untrained=given.untrained, least=given.least)
    print(syntax.table(study))
    if given.out:
        write_atomic(Path(given.out), syntax.as_frame(study).to_csv(index=False).encode())


app.start(main)
