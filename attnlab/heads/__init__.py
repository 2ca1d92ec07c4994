"""Attention heads: how q, k and v are computed and how heads become one output.

from attnlab.heads import Wide, init, multi_head_attention

layout = Wide(width=64, num_heads=4)
params = init(jax.random.key(0), layout)
y = multi_head_attention(params, x, layout, is_causal=True)
"""

from attnlab.heads import positions
from attnlab.heads.bilinear import Absorbed, Bilinear
from attnlab.heads.cache import Cache, init_cache
from attnlab.heads.call import Call
from attnlab.heads.collaborative import Collaborative
from attnlab.heads.cost import (
    cache_bytes_per_token,
    cache_shapes,
    call_flops,
    decode_flops,
    flops_per_token,
    num_parameters,
)
from attnlab.heads.extras import ExtraKeys, Gate, Sink, SoftCap, TalkingHeads
from attnlab.heads.grouped_tied import GroupedTied
from attnlab.heads.latent import Latent, LatentAbsorbed
from attnlab.heads.layout import (
    EXTRAS,
    LAYOUTS,
    Blocked,
    Extra,
    Layout,
    Rewrite,
    all_weights,
    init,
    kv_weight_names,
    loss_names,
    make_layout,
    register_extra,
    register_layout,
    score_scale,
    weight_shapes,
)
from attnlab.heads.low_rank import LowRankQuery
from attnlab.heads.multihead import (
    HEAD_VALUES,
    HeadInputs,
    HeadOutputs,
    attend_heads,
    decode,
    explain_heads,
    head_values,
    make_entries,
    multi_head_attention,
    project_heads,
)
from attnlab.heads.narrow import Alt, Narrow, NarrowTied
from attnlab.heads.rewrites import CallSizes, chain, contraction_orders
from attnlab.heads.standard import HeadNorm, Standard, TwoStage, Wide
from attnlab.heads.tensor_product import TensorProduct
from attnlab.heads.weights import Params, Weight

__all__ = [
    "EXTRAS", "HEAD_VALUES", "LAYOUTS", "Absorbed", "Alt", "Bilinear", "Blocked", "Cache", "Call",
    "CallSizes", "Collaborative", "Extra", "ExtraKeys", "Gate", "GroupedTied", "HeadInputs",
    "HeadNorm", "HeadOutputs", "Latent", "LatentAbsorbed", "Layout", "LowRankQuery", "Narrow",
    "NarrowTied", "Params", "Rewrite", "Sink", "SoftCap", "Standard", "TalkingHeads",
    "TensorProduct", "TwoStage", "Weight", "Wide", "all_weights", "attend_heads",
    "cache_bytes_per_token", "cache_shapes", "call_flops", "chain", "contraction_orders", "decode",
    "decode_flops", "explain_heads", "flops_per_token", "head_values", "init", "init_cache",
    "kv_weight_names", "loss_names", "make_entries", "make_layout", "multi_head_attention",
    "num_parameters", "positions", "project_heads", "register_extra", "register_layout",
    "score_scale", "weight_shapes",
]  # fmt: skip
