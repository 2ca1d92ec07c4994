"""Softmax attention on q, k and v: one function, several backends, masks, score modifications."""

from attnlab.attention import masks
from attnlab.attention.api import attend, dot_product_attention, explain
from attnlab.attention.dispatch import BACKENDS, Backend, register_backend
from attnlab.attention.masks import Edges
from attnlab.attention.options import (
    AttentionOptions,
    AttentionOutput,
    Call,
    Implementation,
    Settings,
)
from attnlab.attention.score_mods import (
    ALiBi,
    RelativeBias,
    ScoreMod,
    SoftCap,
    alibi_slopes,
    relative_buckets,
)

__all__ = [
    "BACKENDS", "ALiBi", "AttentionOptions", "AttentionOutput", "Backend", "Call", "Edges",
    "Implementation", "RelativeBias", "ScoreMod", "Settings", "SoftCap", "alibi_slopes", "attend",
    "dot_product_attention", "explain", "masks", "register_backend",
    "relative_buckets",
]  # fmt: skip
