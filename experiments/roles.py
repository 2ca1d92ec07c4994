"""Does a head attend along syntactic dependencies? Clark et al. 2019 on a treebank, for any model.

    python -m experiments.roles --workdir=runs/one --treebank=PATH/ud_english_ewt --untrained
    python -m experiments.roles --path=FOLDER --treebank=PATH/ud_english_ewt --out=roles.csv

Each row of the table is a relation: how often the word that a word attends to most ("to head"), or
the word that attends to it most ("from head"), is its syntactic head. Two baselines need no syntax:
the best fixed distance, and the longest word. All are chosen in the part dev and scored in the part
test, so the best of many heads has no advantage by chance; in a treebank of one file the sentences
alternate. All seeds of a run are included (--seed selects one), with --untrained also the untrained
model. The model reads each sentence alone; sentences longer than its max_len are left out. This
writes the text of the treebank, to train a model on:

    python -m experiments.roles --treebank=PATH/ud_english_ewt --raw=ewt.txt
"""

from pathlib import Path

from absl import flags

from attnlab.atomic import check_new_file
from attnlab.load import open_folder
from experiments import app
from experiments.studies.syntax import study as syntax

NOT_OF_RAW = ("workdir", "path", "seed", "untrained", "least", "sentences", "out")


def check_raw() -> None:
    """Raises ValueError for flags that have no effect on --raw."""
    if found := [f"--{name}" for name in NOT_OF_RAW if flags.FLAGS[name].present]:
        raise ValueError(f"--raw only writes the text of --treebank; leave out {', '.join(found)}")


def main() -> None:
    """Prints the table, or writes --raw."""
    given = flags.FLAGS
    if given.raw:
        check_raw()
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
        syntax.write_table(study, Path(given.out))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "The folder of a run.")
    flags.DEFINE_string("path", "", "A folder of a published model.")
    flags.DEFINE_integer("seed", None, "Seed of the run; all if left out.")
    flags.DEFINE_string("treebank", None, "A folder of CoNLL-U files, or one file.", required=True)
    flags.DEFINE_bool("untrained", False, "Also the same model before it was trained.")
    flags.DEFINE_integer(
        "least", 100, "Least number of words of a relation in each part.", lower_bound=1
    )
    flags.DEFINE_integer(
        "sentences", None, "Largest number of sentences of each part.", lower_bound=1
    )
    flags.DEFINE_string("out", "", "CSV file for all numbers.")
    flags.DEFINE_string("raw", "", "Write the text of the part train to this file and stop.")
    app.start(main)
