"""Softmax attention on q, k and v: one function, several backends, masks, score modifications."""

from attnlab.attention import masks
from attnlab.attention.api import attend, dot_product_attention, explain, explaining, trace
from attnlab.attention.backends import BACKENDS, Backend, register_backend
from attnlab.attention.call import AttentionCall, AttentionOptions, AttentionOutput, Implementation
from attnlab.attention.masks import Edges
from attnlab.attention.score_mods import (
    ALiBi,
    RelativeBias,
    ScoreMod,
    SoftCap,
    alibi_slopes,
    relative_buckets,
)

__all__ = [
    "BACKENDS", "ALiBi", "AttentionCall", "AttentionOptions", "AttentionOutput", "Backend",
    "Edges", "Implementation", "RelativeBias", "ScoreMod", "SoftCap", "alibi_slopes", "attend",
    "dot_product_attention", "explain", "explaining", "masks", "register_backend",
    "relative_buckets", "trace",
]  # fmt: skip
