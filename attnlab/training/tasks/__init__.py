"""What is asked of a model. `TASKS`: name -> `Task`."""

from attnlab.training.tasks.classes import ROWS as _CLASSES
from attnlab.training.tasks.language import ROWS as _LANGUAGE
from attnlab.training.tasks.language import causal_lm, masked_lm, span_corruption
from attnlab.training.tasks.regression import ROWS as _REGRESSION
from attnlab.training.tasks.regression import regression
from attnlab.training.tasks.sequences import ROWS as _SEQUENCES
from attnlab.training.tasks.task import (
    Example,
    Metric,
    Task,
    abstract_inputs,
    accuracy,
    bits,
    cross_entropy,
    squared_error,
    unexplained,
    written,
)

TASKS: dict[str, Task] = {**_LANGUAGE, **_CLASSES, **_SEQUENCES, **_REGRESSION}
"""Name -> Task."""

__all__ = [
    "TASKS",
    "Example",
    "Metric",
    "Task",
    "abstract_inputs",
    "accuracy",
    "bits",
    "causal_lm",
    "cross_entropy",
    "masked_lm",
    "regression",
    "span_corruption",
    "squared_error",
    "unexplained",
    "written",
]
