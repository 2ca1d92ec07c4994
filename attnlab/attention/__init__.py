"""q, k, v -> output: one call, several backends, and who may see whom."""

from attnlab.attention import masks
from attnlab.attention.core import BACKENDS, dot_product_attention, explain
from attnlab.attention.edges import attention_over_edges

__all__ = ["BACKENDS", "attention_over_edges", "dot_product_attention", "explain", "masks"]
from attnlab.attention._temporary import AttentionOptions, AttentionOutput, attend
