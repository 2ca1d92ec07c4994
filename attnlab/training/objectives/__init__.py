"""Training objectives. `OBJECTIVES`: name -> `Objective`."""

from attnlab.training.objectives.answers import ANSWERS, regression
from attnlab.training.objectives.language import LANGUAGE, causal_lm, masked_lm, span_corruption
from attnlab.training.objectives.objective import (
    Example,
    Metric,
    Model,
    Objective,
    accuracy,
    bits,
    check_kind,
    check_output,
    cross_entropy,
    input_shapes,
    squared_error,
    unexplained_variance,
)
from attnlab.training.objectives.sequences import SEQUENCES

OBJECTIVES: dict[str, Objective] = {**LANGUAGE, **ANSWERS, **SEQUENCES}
"""Name -> Objective."""

__all__ = [
    "OBJECTIVES", "Example", "Metric", "Model", "Objective", "accuracy", "bits", "causal_lm",
    "check_kind", "check_output", "cross_entropy", "input_shapes", "masked_lm",
    "regression", "span_corruption", "squared_error", "unexplained_variance",
]  # fmt: skip
