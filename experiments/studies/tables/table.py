"""A published table as variants of one config: each row changes some fields of the paper's base.

Presets after the colon of a config file that has a table:

    tiny       widths and depths divided for a CPU, and a short training
    rows=A|big only the rows whose name matches the regular expression
"""

import re
from typing import Any, NamedTuple, TypeAlias

from ml_collections import ConfigDict

from attnlab import lab
from attnlab.models import ModelConfig
from attnlab.nested import flatten
from attnlab.training.config import TrainConfig
from experiments import config

WIDTH, FFN_WIDTH, EMBEDDING_WIDTH = "model.width", "model.ffn.width", "model.embedding.width"
HEADS, HEAD_DIM, VALUE_DIM = (
    f"model.heads.{name}" for name in ("num_heads", "head_dim", "value_dim")
)
LAYERS, ENCODER_LAYERS = "model.num_layers", "model.encoder.num_layers"
PLAN, SCALE = "model.sharing", "model.embedding.scale"
RATE = "train.optimizer.learning_rate"

SHORT = {
    "model.max_len": 64,
    "train.steps": 200,
    "train.batch_size": 16,
    "train.accumulate": 1,
    "train.length": 64,
    "train.optimizer.name": "adamw",
    "train.schedule.name": "cosine",
    RATE: 3e-3,
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

KEYS = {"rows": "", "tiny": False}
Values: TypeAlias = dict[str, Any]
"""Config field -> value."""


class Row(NamedTuple):
    """A row of a table."""

    changes: Values
    """Where it is not the base."""
    parameters: int
    """Exact, at the paper's size, of what the paper counts."""


class Table(NamedTuple):
    """A published table, and how to run it here."""

    rows: dict[str, Row]
    """The first is the one that the others are compared with."""
    model: ModelConfig
    """Of the base, at the paper's size."""
    train: TrainConfig
    """At the paper's size."""
    widths: int
    """What `tiny` divides widths by."""
    depths: int
    """What `tiny` divides numbers of layers, and of groups in a plan, by."""
    tiny: Values
    """Of the base of `tiny`."""
    tiny_rows: Values = {}  # noqa: RUF012
    """Of the rows of `tiny` that change the field."""

    def get_config(self, preset: str = "") -> ConfigDict:
        """What all rows have in common."""
        found = config.base()
        config.set_model(found, self.model)
        found.train = ConfigDict(config.fields(self.train))
        if config.parse(preset, KEYS).tiny:
            sizes = self._divided(flatten(found.to_dict()))
            found.update_from_flattened_dict(sizes | self.tiny)
        return found

    def variants(self, base: lab.Experiment, preset: str) -> list[lab.Variant]:
        """One for each row."""
        rows, is_tiny = config.parse(preset, KEYS).rows, config.parse(preset, KEYS).tiny
        try:
            pattern = re.compile(rows)
        except re.error as error:
            raise ValueError(f"rows={rows} is no regular expression: {error}") from None
        found = []
        for name, row in self.rows.items():
            changes = row.changes
            if is_tiny:
                instead = {f: value for f, value in self.tiny_rows.items() if f in changes}
                changes = changes | self._divided(changes) | instead
            if pattern.search(name):
                found.append(lab.Variant(changes, name))
        if not found:
            raise ValueError(f"rows={rows} finds none; the rows are {', '.join(self.rows)}")
        return found

    def _divided(self, values: Values) -> Values:
        """The sizes among values as `tiny` has them."""
        by = dict.fromkeys((WIDTH, HEAD_DIM, VALUE_DIM, FFN_WIDTH, EMBEDDING_WIDTH), self.widths)
        by |= dict.fromkeys((LAYERS, ENCODER_LAYERS), self.depths)
        found: Values = {f: values[f] // n for f, n in by.items() if values.get(f) is not None}
        plan, _, groups = values.get(PLAN, "").partition(":")
        if groups:
            found[PLAN] = f"{plan}:{int(groups) // self.depths}"
        if values.get(SCALE, 1) != 1:  # the square root of the width
            found[SCALE] = found[WIDTH] ** 0.5
        return found
