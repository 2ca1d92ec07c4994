"""attnlab: a JAX/Flax laboratory for attention heads."""

from attnlab import masks, positions
from attnlab.accounting import applied_parameters, flops_per_token, unique_parameters
from attnlab.attention import BACKENDS, dot_product_attention, explain
from attnlab.block import feed_forward, layer_norm, transformer_block
from attnlab.heads import LAYOUTS, HeadSpec, Layout, init_heads, merge_heads, project_heads
from attnlab.models import Decoder, Encoder, ModelConfig
from attnlab.modules import FeedForward, LayerStack, MultiHeadAttention
from attnlab.multihead import multi_head_attention
from attnlab.sharing import PLANS, Plan
from attnlab.stack import init_slots, run_stack

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "PLANS",
    "Decoder",
    "Encoder",
    "FeedForward",
    "HeadSpec",
    "LayerStack",
    "Layout",
    "ModelConfig",
    "MultiHeadAttention",
    "Plan",
    "applied_parameters",
    "dot_product_attention",
    "explain",
    "feed_forward",
    "flops_per_token",
    "init_heads",
    "init_slots",
    "layer_norm",
    "masks",
    "merge_heads",
    "multi_head_attention",
    "positions",
    "project_heads",
    "run_stack",
    "transformer_block",
    "unique_parameters",
]
