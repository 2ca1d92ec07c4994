"""What heads do: attribution, circuits, importance, statistics of attention, and a viewer."""

from attnlab.interpret.circuits import Circuit, circuit, composition_scores
from attnlab.interpret.gates import (
    GatedModel,
    PrunedModel,
    expected_open_share,
    gate_values,
    gated_optimizer,
    hard_concrete,
    open_probability,
    remove_closed_heads,
)
from attnlab.interpret.importance import (
    HeadGates,
    PruningCurves,
    ablation_effects,
    all_head_gates,
    ascending_order,
    compare_pruning_orders,
    greedy_order,
    head_gates,
    head_importance,
    least_important,
    mean_heads,
    pruning_curve,
    resampled_heads,
    token_loss,
)
from attnlab.interpret.linearize import AffineMap, linearize_at
from attnlab.interpret.panels import AblationMetric, default_metric, model_panel
from attnlab.interpret.residual import (
    Recording,
    decompose_final,
    decompose_input,
    decompose_residual,
    direct_logit_attribution,
    flatten_terms,
    record,
    sum_terms,
)
from attnlab.interpret.scores import ScoreTerms, decompose_scores
from attnlab.interpret.similarity import effective_rank, js_divergence, linear_cka, mean_over_pairs
from attnlab.interpret.statistics import (
    STATISTICS,
    Statistic,
    head_statistics,
    shuffle_tokens,
    statistics_with_baselines,
    uniform_attention,
)
from attnlab.interpret.syntax import (
    CorrectCounts,
    SyntaxScore,
    count_correct,
    evaluate_heads,
    frequent_labels,
    head_predictions,
    predicted_words,
    token_word_overlap,
    word_attention,
)
from attnlab.interpret.treebank import Tree, parse_trees, read_trees, treebank_parts
from attnlab.interpret.viewer import AttentionMaps, Page, Panel, view, view_panels

__all__ = [
    "STATISTICS", "AblationMetric", "AffineMap", "AttentionMaps", "Circuit", "CorrectCounts",
    "GatedModel", "HeadGates", "Page", "Panel", "PrunedModel", "PruningCurves", "Recording",
    "ScoreTerms", "Statistic", "SyntaxScore", "Tree", "ablation_effects", "all_head_gates",
    "ascending_order", "circuit", "compare_pruning_orders", "composition_scores", "count_correct",
    "decompose_final", "decompose_input", "decompose_residual", "decompose_scores",
    "default_metric", "direct_logit_attribution", "effective_rank", "evaluate_heads",
    "expected_open_share", "flatten_terms", "frequent_labels", "gate_values", "gated_optimizer",
    "greedy_order", "hard_concrete", "head_gates", "head_importance", "head_predictions",
    "head_statistics", "js_divergence", "least_important", "linear_cka", "linearize_at",
    "mean_heads", "mean_over_pairs", "model_panel", "open_probability", "parse_trees",
    "predicted_words", "pruning_curve", "read_trees", "record", "remove_closed_heads",
    "resampled_heads", "shuffle_tokens", "statistics_with_baselines", "sum_terms", "token_loss",
    "token_word_overlap", "treebank_parts", "uniform_attention", "view", "view_panels",
    "word_attention",
]  # fmt: skip
