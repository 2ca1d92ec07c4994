"""Attention heads: how q, k and v are computed and how heads become one output.

>>> import jax
>>> import jax.numpy as jnp
>>> from attnlab.heads import Wide, init, multi_head_attention
>>> layout = Wide(width=64, num_heads=4)
>>> params = init(jax.random.key(0), layout)
>>> multi_head_attention(params, jnp.ones((1, 5, 64)), layout, is_causal=True).shape
(1, 5, 64)

A layout is a frozen dataclass (`LAYOUTS` lists them), parameters are a dict of arrays, and
all functions are pure. A new layout is a subclass of `Layout` or of one of the layouts, an option
for all layouts a subclass of `Extra`.
"""

from attnlab.heads import positions
from attnlab.heads.attention import (
    HEAD_VALUES,
    HeadAux,
    decode,
    explain_heads,
    head_values,
    multi_head_attention,
    project_kv,
)
from attnlab.heads.bilinear import Absorbed, Bilinear
from attnlab.heads.cache import Cache, init_cache
from attnlab.heads.collaborative import Collaborative
from attnlab.heads.cost import (
    CallSizes,
    cache_bytes_per_token,
    cache_shapes,
    call_flops,
    contraction_orders,
    flops_per_token,
    num_parameters,
)
from attnlab.heads.differential import Differential
from attnlab.heads.extras import (
    ExtraKeys,
    Gate,
    LearntSoftCap,
    MixtureOfHeads,
    Sink,
    SoftCap,
    TalkingHeads,
)
from attnlab.heads.grouped_tied import GroupedTied
from attnlab.heads.head_norm import HeadNorm
from attnlab.heads.identical import identical_heads
from attnlab.heads.latent import Latent, LatentAbsorbed
from attnlab.heads.layout import Blocked, Extra, HeadCall, Layout, Rewrite
from attnlab.heads.narrow import Alt, Narrow, NarrowTied
from attnlab.heads.params import init, kv_weight_names, loss_names, weight_shapes
from attnlab.heads.registry import EXTRAS, LAYOUTS, make_layout, register_extra, register_layout
from attnlab.heads.standard import Standard, Wide
from attnlab.heads.tensor_product import TensorProduct
from attnlab.heads.two_stage import LowRankQuery, TwoStage
from attnlab.heads.weights import Params, Weight

__all__ = [
    "EXTRAS", "HEAD_VALUES", "LAYOUTS", "Absorbed", "Alt", "Bilinear", "Blocked", "Cache",
    "CallSizes", "Collaborative", "Differential", "Extra", "ExtraKeys", "Gate", "GroupedTied",
    "HeadAux", "HeadCall", "HeadNorm", "Latent", "LatentAbsorbed", "Layout", "LearntSoftCap",
    "LowRankQuery", "MixtureOfHeads", "Narrow", "NarrowTied", "Params", "Rewrite", "Sink",
    "SoftCap", "Standard", "TalkingHeads", "TensorProduct", "TwoStage", "Weight", "Wide",
    "cache_bytes_per_token", "cache_shapes", "call_flops", "contraction_orders", "decode",
    "explain_heads", "flops_per_token", "head_values", "identical_heads", "init", "init_cache",
    "kv_weight_names", "loss_names", "make_layout", "multi_head_attention", "num_parameters",
    "positions", "project_kv", "register_extra", "register_layout", "weight_shapes",
]  # fmt: skip
