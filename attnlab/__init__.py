"""attnlab: a JAX/Flax laboratory for attention heads."""

from attnlab import adapters, masks, positions
from attnlab.accounting import applied_parameters, flops_per_token, unique_parameters
from attnlab.attention import BACKENDS, dot_product_attention, explain
from attnlab.block import transformer_block
from attnlab.cache import init_cache
from attnlab.config import ModelConfig
from attnlab.conversion import convert, permute_heads, regauge, truncate
from attnlab.decode import generate, prefill
from attnlab.edges import attention_over_edges
from attnlab.heads import HeadSpec, init_heads, merge_heads, project_heads
from attnlab.layers import run_layers
from attnlab.layouts import LAYOUTS, Layout
from attnlab.models import Decoder, Encoder, EncoderDecoder, Outputs
from attnlab.modules import FeedForward, LayerStack, MultiHeadAttention
from attnlab.multihead import contraction_orders, explain_heads, multi_head_attention
from attnlab.pointwise import feed_forward, layer_norm, rms_norm
from attnlab.sharing import PLANS, Plan
from attnlab.stack import init_slots, run_stack

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "PLANS",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "HeadSpec",
    "LayerStack",
    "Layout",
    "ModelConfig",
    "MultiHeadAttention",
    "Outputs",
    "Plan",
    "adapters",
    "applied_parameters",
    "attention_over_edges",
    "contraction_orders",
    "convert",
    "dot_product_attention",
    "explain",
    "explain_heads",
    "feed_forward",
    "flops_per_token",
    "generate",
    "init_cache",
    "init_heads",
    "init_slots",
    "layer_norm",
    "masks",
    "merge_heads",
    "multi_head_attention",
    "permute_heads",
    "positions",
    "prefill",
    "project_heads",
    "regauge",
    "rms_norm",
    "run_layers",
    "run_stack",
    "transformer_block",
    "truncate",
    "unique_parameters",
]
