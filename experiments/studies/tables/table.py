"""A published table as data: its rows as changes of a config, and the numbers the paper printed.

A config file of a table (`experiments/studies/tables/vaswani.py`) holds one `Table` and takes its
functions from here, with these presets after its colon:

    tiny       sizes for a CPU, and a short training
    width/4    every width (model, head, feed-forward, embedding) divided by 4
    layers/2   every number of layers, and of groups in a plan, divided by 2
    lr         each row at three learning rates
    rows=A|big only the rows whose name matches the regular expression

Without a preset the sizes are the paper's.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.lab.description import PublishedRow, PublishedTable
from attnlab.lab.policies import FINAL_RATE, FIRST_RATE
from attnlab.models import ModelConfig, num_parameters
from attnlab.nested import flatten
from attnlab.training.config import TrainConfig
from experiments.configs import byte_lm
from experiments.setup import model_of

WIDTHS = (
    "model.width", "model.heads.head_dim", "model.heads.value_dim", "model.ffn.width",
    "model.embedding.width",
)  # fmt: skip
DEPTHS = ("model.num_layers", "model.encoder.num_layers")
FACTORS = (0.3, 1.0, 3.0)
"""Of the learning rates of the table, where the word `lr` asks for several."""

SHORT = {
    "model.max_len": 64,
    "train.steps": 200,
    "train.batch_size": 16,
    "train.accumulate": 1,
    "train.length": 64,
    "train.optimizer.name": "adamw",
    "train.schedule.name": "cosine",
    "train.optimizer.learning_rate": 3e-3,
    "train.schedule.final_learning_rate": 3e-4,
    "train.schedule.warmup_steps": 50,
    "train.optimizer.beta2": 0.99,
    "train.optimizer.epsilon": 1e-8,
    "train.optimizer.weight_decay": 0.1,
    "train.optimizer.clip_norm": 1.0,
    "train.log_every": 50,
    "train.evaluation.windows": 512,
    "train.evaluation.every": 100,
    "train.checkpoint_every": 200,
}
"""A short training for a CPU."""


Values: TypeAlias = dict[str, Any]
"""Config field -> value."""


class Row(NamedTuple):
    """One row of a table."""

    changes: Values
    """Config field -> its value at the paper's size, where it is not the base's."""
    parameters: int
    """Exact, at the paper's size, of what the paper counts."""
    printed: str = ""
    """The same as the paper prints it; empty where it does not."""
    scores: tuple[float | None, ...] = ()
    """The paper's, one per column; empty where it has none."""


class TinyScale(NamedTuple):
    """What the preset `tiny` stands for."""

    shrink: tuple[str, ...]
    """Presets that divide the sizes."""
    base: Values
    """Config field -> value, of the base."""
    rows: Values = {}  # noqa: RUF012
    """The same where a row changes the field."""


class Table(NamedTuple):
    """A published table, and how to run it here."""

    title: str
    source: str
    setting: dict[str, str]
    """What the paper did: data, task, model, training, score."""
    notes: str
    """What else is to be known beside the numbers."""
    columns: tuple[str, ...]
    """Names of the scores, the main one first."""
    better: Literal["lower", "higher"]
    """Is the main score better "lower" or "higher"?"""
    base: str
    """The row that the others are compared with."""
    rows: dict[str, Row]
    model: ModelConfig
    """Of the base, at the paper's size."""
    train: TrainConfig
    """At the paper's size."""
    tiny: TinyScale
    uncounted: Values = {}  # noqa: RUF012
    """Config field -> value that leaves out what the paper does not count."""

    def paper_model(self, name: str) -> ModelConfig:
        """The model of a row at the paper's size, less what the paper does not count."""
        changes = _scaled(self, self.rows[name].changes, Presets())
        fields = {f: v for f, v in changes.items() if f.startswith("model.")}
        config = ConfigDict({"model": byte_lm.model_fields(self.model)})
        config.update_from_flattened_dict(fields | self.uncounted)
        return model_of(config.model)


Functions = tuple[
    Callable[..., ConfigDict],
    Callable[[lab.Experiment, str], list[lab.Variant]],
    Callable[[str], lab.Description],
]


def functions(table: Table, **others: Table) -> Functions:
    """`get_config`, `variants` and `describe` of a config file; a word of `others` among those of
    the preset takes that table instead.
    """

    def find(preset: str) -> tuple[Table, str]:
        presets = [name for name in preset.split(",") if name]
        chosen = next((others[name] for name in presets if name in others), table)
        return chosen, ",".join(name for name in presets if name not in others)

    def get_config(preset: str = "") -> ConfigDict:
        return base_config(*find(preset))

    def variants(base: lab.Experiment, preset: str) -> list[lab.Variant]:
        return variants_of(*find(preset))

    def describe(preset: str) -> lab.Description:
        return description_of(*find(preset))

    return get_config, variants, describe


def base_config(table: Table, preset: str) -> ConfigDict:
    """What all rows have in common, at the scale of the preset."""
    presets = _presets(table, preset)
    base = byte_lm.get_config()
    byte_lm.set_model(base, table.model)
    base.train = ConfigDict(byte_lm.fields(table.train))
    fields = flatten(base.to_dict())
    sizes = {path: fields[path] for path in (*WIDTHS, *DEPTHS, "model.sharing")}
    base.update_from_flattened_dict(_scaled(table, sizes, presets))
    base.update_from_flattened_dict(table.tiny.base if presets.tiny else {})
    return base


def variants_of(table: Table, preset: str) -> list[lab.Variant]:
    """One variant for each row, or for each row and learning rate."""
    presets = _presets(table, preset)
    base: Values = flatten(base_config(table, preset).to_dict())
    instead = table.tiny.rows if presets.tiny else {}
    found = []
    for name, row in _rows(table, presets).items():
        changes = _scaled(table, row.changes, presets)
        changes |= {f: value for f, value in instead.items() if f in changes}
        if not presets.lr:
            found.append(lab.Variant(changes, name))
        for factor in FACTORS if presets.lr else ():
            rates = {f: (base | changes)[f] * factor for f in (FIRST_RATE, FINAL_RATE)}
            tags = {"name": name, "learning_rate": rates[FIRST_RATE]}
            found.append(lab.Variant(changes | rates, name, tags))
    return found


def _rows(table: Table, presets: "Presets") -> dict[str, Row]:
    try:
        rows = {n: row for n, row in table.rows.items() if re.search(presets.rows, n)}
    except re.error as error:
        raise ValueError(f"rows={presets.rows} is no regular expression: {error}") from None
    if not rows:
        raise ValueError(f"rows={presets.rows} finds none; the rows are {', '.join(table.rows)}")
    return rows


def description_of(table: Table, preset: str) -> lab.Description:
    """The published table, and the comparisons with its base."""
    presets = _presets(table, preset)
    rows = tuple(
        PublishedRow(
            tags={"name": name},
            scores=row.scores,
            parameters=num_parameters(table.paper_model(name)),
            printed=row.printed,
        )
        for name, row in table.rows.items()
    )
    published = PublishedTable(
        title=table.title,
        source=table.source,
        columns=table.columns,
        rows=rows,
        better=table.better,
        setting=table.setting,
        notes=table.notes,
    )
    with_base = table.base in _rows(table, presets) and not presets.lr
    baseline: dict[str, lab.Tag] = {"name": table.base} if with_base else {}
    return lab.Description(baseline=baseline, published=published)


class Presets(NamedTuple):
    """What was asked for: numbers to divide by, and the rest."""

    width: int = 1
    layers: int = 1
    tiny: bool = False
    lr: bool = False
    rows: str = ""


def _presets(table: Table, arg: str) -> Presets:
    presets = [name for name in arg.split(",") if name]
    chosen: Values = {}
    for preset in (*(table.tiny.shrink if "tiny" in presets else ()), *presets):
        name, _, number = preset.partition("/")
        if name in ("width", "layers") and number.isdigit() and int(number):
            chosen[name] = int(number)
        elif preset in ("tiny", "lr"):
            chosen[preset] = True
        elif preset.startswith("rows="):
            chosen["rows"] = preset.removeprefix("rows=")
        else:
            raise ValueError(
                f"unknown preset {preset!r}; known: tiny, width/N, layers/N, lr, rows=A|B"
            )
    return Presets(**chosen)


def _scaled(table: Table, changes: Values, presets: Presets) -> Values:
    """`changes` with every size divided; raises ValueError where one does not divide.

    An embedding that is multiplied by the root of the width follows the width.
    """
    divided = dict(changes)
    for fields, by, name in ((WIDTHS, presets.width, "width"), (DEPTHS, presets.layers, "layers")):
        for field in (f for f in fields if changes.get(f) is not None):
            divided[field] = _divided(field, changes[field], by, name)
    name, _, count = changes.get("model.sharing", "").partition(":")
    if count:
        sets = _divided("the plan's number of sets", int(count), presets.layers, "layers")
        divided["model.sharing"] = f"{name}:{sets}"
    if "model.width" in divided and table.model.embedding.scale != 1:
        divided["model.embedding.scale"] = divided["model.width"] ** 0.5
    return divided


def _divided(what: str, value: int, by: int, name: str) -> int:
    if value % by:
        raise ValueError(f"{name}/{by}: {what} {value} is not divisible by {by}; take another")
    return value // by
