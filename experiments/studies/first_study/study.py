"""The runs of the first study, from its published table.

Four layers of width 64 with learned positions, trained with AdamW on 819,200 bytes. The FFN widths
that give every variant the budget of standard heads with separate layers, and the learning rates,
are data: columns of docs/results/heads_and_sharing.csv.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas
from pandas import DataFrame

from attnlab import lab
from attnlab.data import Text
from attnlab.fields import check_choice
from attnlab.models import ModelConfig
from attnlab.training import TrainConfig

TABLE = Path(__file__).parents[3] / "docs/results/heads_and_sharing.csv"
TEXTS = {
    "code": "",
    "shakespeare": "tinyshakespeare/input.txt.gz",
    "wikitext": "wikitext2/train.txt.gz",
}
"""Name -> file below the folder of texts; "": the standard library of Python 3.11.7."""
BUDGETS = ("parameters", "flops", "seconds")
"""What is equal; seconds are those of a training step on one thread of a CPU."""


def read_table(texts: Sequence[str] = tuple(TEXTS), budgets: Sequence[str] = BUDGETS) -> DataFrame:
    """The rows of these texts and budgets, one for each seed of a variant. Raises ValueError."""
    for what, given, known in (("text", texts, tuple(TEXTS)), ("budget", budgets, BUDGETS)):
        for one in given:
            check_choice(what, one, known)
    rows = pandas.read_csv(TABLE)
    return rows[rows["text"].isin(texts) & rows["match"].isin(budgets)]


def run_specs(rows: DataFrame, data: Path) -> list[lab.RunSpec]:
    """The run of each row of `read_table`; `data` is the folder of the texts.

    >>> [spec] = run_specs(read_table()[:1], Path())
    >>> spec.id, spec.config.model.ffn.width
    ('code-parameters-narrow-albert-seed0', 2514)
    """
    specs = []
    for row in rows.itertuples():
        path = TEXTS[row.text] and str(data / TEXTS[row.text])
        base = lab.Experiment(
            model=ModelConfig(), train=TrainConfig(), data=Text(path=path, validation=0.1)
        )
        values = {
            "model.heads.layout": row.layout,
            "model.sharing": row.sharing,
            "model.ffn.width": row.ffn_width,
            "train.optimizer.learning_rate": row.learning_rate,
            "train.schedule.final_learning_rate": row.learning_rate / 10,
        }
        tags = {"text": row.text, "match": row.match, "layout": row.layout, "sharing": row.sharing}
        name = "-".join(tags.values()).replace(":", "")
        config = lab.with_values(base, values)
        specs.append(lab.RunSpec(f"{name}-seed{row.seed}", config, row.seed, tags))
    return specs
