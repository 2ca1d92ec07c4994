"""What the config files of known answers have in common."""

from collections.abc import Mapping
from typing import Literal

from attnlab import lab
from attnlab.lab.description import Expectation
from experiments.config import Values

TRAINING: Values = {
    "train.batch_size": 64,
    "train.steps": 3000,
    "train.optimizer.name": "adam",
    "train.optimizer.learning_rate": 1e-2,
    "train.schedule.final_learning_rate": 1e-4,
    "train.schedule.warmup_steps": 150,
    "train.optimizer.weight_decay": 0.0,
    "train.log_every": 500,
    "train.evaluation.every": 500,
    "train.evaluation.batch_size": 256,
    "train.evaluation.windows": 0,
    "train.checkpoint_every": 3000,
}
"""On generated rows."""
OF_VECTORS: Values = {
    "model.kind": "encoder",
    "model.num_layers": 1,
    "model.positions.kind": "none",
    "model.output.kind": "none",
    "model.output.pooler": "each",
}
"""One layer that reads vectors in place of tokens, and answers at each."""


def expect(
    name: str,
    relation: Literal["at most", "at least", "exactly"],
    value: float,
    text: str,
    *,
    over: str = "",
    number: str = "",
) -> Expectation:
    """What is expected of the variant `name`, or of its mean over that of `over`."""
    return Expectation(
        tags={"name": name},
        relation=relation,
        value=value,
        text=text,
        over={"name": over} if over else None,
        number=number,
    )


def described(question: str, source: str, *expected: Expectation) -> lab.Description:
    """A question, who expects what, and the expected results."""
    return lab.Description(question=question, source=source, expectations=expected)


def named(changes: Mapping[str, Values]) -> list[lab.Variant]:
    """A variant for each name: what it changes."""
    return [lab.Variant(values, name) for name, values in changes.items()]
