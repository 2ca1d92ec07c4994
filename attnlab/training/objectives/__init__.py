"""Training objectives. `OBJECTIVES`: name -> `Objective`."""

from attnlab.training.objectives.classification import CLASSIFICATION
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
    decode_tokens,
    input_shapes,
    special_name,
    squared_error,
    unexplained_variance,
)
from attnlab.training.objectives.regression import REGRESSION, regression
from attnlab.training.objectives.sequences import SEQUENCES

OBJECTIVES: dict[str, Objective] = {**LANGUAGE, **CLASSIFICATION, **SEQUENCES, **REGRESSION}
"""Name -> Objective."""

__all__ = [
    "OBJECTIVES", "Example", "Metric", "Model", "Objective", "accuracy", "bits", "causal_lm",
    "check_kind", "check_output", "cross_entropy", "decode_tokens", "input_shapes", "masked_lm",
    "regression", "span_corruption", "special_name", "squared_error", "unexplained_variance",
]  # fmt: skip
