"""What does a head do? What it looks at, what it writes, what it is for; of any model."""

from attnlab.inspect.circuits import Circuit, circuit, composition
from attnlab.inspect.diversity import between, cka, divergence, effective_rank
from attnlab.inspect.importance import (
    Curves,
    Gates,
    ablations,
    compare_orders,
    gate_gradients,
    gates_of,
    greedy_order,
    mean_values,
    order_by,
    other_values,
    pruning_curve,
    token_loss,
    weakest,
)
from attnlab.inspect.linear import linear_at
from attnlab.inspect.scores import Split, split_scores
from attnlab.inspect.sides import Worth, side_of, worth_of
from attnlab.inspect.statistics import (
    STATISTICS,
    beside_baselines,
    head_statistics,
    shuffled,
    uniform,
)
from attnlab.inspect.viewer import Maps, Page, Side, view, view_sides
from attnlab.inspect.writes import (
    Watched,
    decompose,
    final_norm,
    flatten,
    logits_by_term,
    read_by,
    stack_of,
    summed,
    watch,
)

__all__ = [
    "STATISTICS",
    "Circuit",
    "Curves",
    "Gates",
    "Maps",
    "Page",
    "Side",
    "Split",
    "Watched",
    "Worth",
    "ablations",
    "beside_baselines",
    "between",
    "circuit",
    "cka",
    "compare_orders",
    "composition",
    "decompose",
    "divergence",
    "effective_rank",
    "final_norm",
    "flatten",
    "gate_gradients",
    "gates_of",
    "greedy_order",
    "head_statistics",
    "linear_at",
    "logits_by_term",
    "mean_values",
    "order_by",
    "other_values",
    "pruning_curve",
    "read_by",
    "shuffled",
    "side_of",
    "split_scores",
    "stack_of",
    "summed",
    "token_loss",
    "uniform",
    "view",
    "view_sides",
    "watch",
    "weakest",
    "worth_of",
]
