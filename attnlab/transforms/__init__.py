"""Functions on parameters: convert head layouts, change a sharing plan, remove or align heads.

Exact conversion between head layouts is in `attnlab.transforms.convert`.
"""

from attnlab.transforms.head_alignment import align_heads, reorder_heads
from attnlab.transforms.pruning import remove_heads, scale_heads
from attnlab.transforms.resharing import (
    change_plan,
    detect_sharing,
    output_difference,
    share,
    tie_encoder,
    unshare,
    untie_encoder,
)

__all__ = [
    "align_heads",
    "change_plan",
    "detect_sharing",
    "output_difference",
    "remove_heads",
    "reorder_heads",
    "scale_heads",
    "share",
    "tie_encoder",
    "unshare",
    "untie_encoder",
]
