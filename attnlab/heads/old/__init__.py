"""How does a head get its q, k and v? The table of layouts, their weights, and one pure call."""

from attnlab.heads import positions
from attnlab.heads.old.cache import init_cache
from attnlab.heads.old.layouts import LAYOUTS, Layout
from attnlab.heads.old.multihead import explain_heads, multi_head_attention
from attnlab.heads.old.orders import contraction_orders
from attnlab.heads.old.project import init_heads, merge_heads, project_heads
from attnlab.heads.old.spec import HeadSpec

__all__ = [
    "LAYOUTS",
    "HeadSpec",
    "Layout",
    "contraction_orders",
    "explain_heads",
    "init_cache",
    "init_heads",
    "merge_heads",
    "multi_head_attention",
    "positions",
    "project_heads",
]
