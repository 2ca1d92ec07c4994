"""What does a head do? What it looks at, writes and is for; read from what a model shows."""

from attnlab.inspect.diversity import between, cka, divergence, effective_rank
from attnlab.inspect.statistics import (
    STATISTICS,
    beside_baselines,
    head_statistics,
    shuffled,
    uniform,
)

__all__ = [
    "STATISTICS",
    "beside_baselines",
    "between",
    "cka",
    "divergence",
    "effective_rank",
    "head_statistics",
    "shuffled",
    "uniform",
]
