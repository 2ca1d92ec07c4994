"""attnlab: a JAX/Flax laboratory for attention heads."""

import importlib
from typing import TYPE_CHECKING, Any

from attnlab import adapters
from attnlab.attention import (
    BACKENDS,
    attention_over_edges,
    dot_product_attention,
    explain,
    masks,
)
from attnlab.conversion import convert, permute_heads, regauge, truncate
from attnlab.heads import positions
from attnlab.heads.old.cache import init_cache
from attnlab.heads.old.layouts import LAYOUTS, Layout
from attnlab.heads.old.multihead import explain_heads, multi_head_attention
from attnlab.heads.old.orders import contraction_orders
from attnlab.heads.old.project import init_heads, merge_heads, project_heads
from attnlab.heads.old.spec import HeadSpec
from attnlab.model.accounting import applied_parameters, flops_per_token, unique_parameters
from attnlab.model.block import transformer_block
from attnlab.model.config import ModelConfig
from attnlab.model.decode import generate, prefill, stream
from attnlab.model.explain import explain_model
from attnlab.model.layers import run_layers
from attnlab.model.models import Decoder, Encoder, EncoderDecoder, Outputs
from attnlab.model.modules import FeedForward, LayerStack, MultiHeadAttention
from attnlab.model.pointwise import feed_forward
from attnlab.norms import layer_norm, rms_norm
from attnlab.sharing.named_plans import PLANS, plan_names
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import init_stacked, run_stack

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
    "explain_model",
    "feed_forward",
    "flops_per_token",
    "generate",
    "init_cache",
    "init_heads",
    "init_stacked",
    "layer_norm",
    "masks",
    "merge_heads",
    "multi_head_attention",
    "permute_heads",
    "plan_names",
    "positions",
    "prefill",
    "project_heads",
    "regauge",
    "rms_norm",
    "run_layers",
    "run_stack",
    "stream",
    "transformer_block",
    "truncate",
    "unique_parameters",
]

LAZY_PACKAGES = ("interpret", "plotting", "pretrained", "training", "transforms")
"""Imported on first use, as `attnlab.interpret`."""


if TYPE_CHECKING:
    from attnlab.runs import load_run as load_run
else:  # a checker shall go on to find names that are none

    def __getattr__(name: str) -> Any:
        if name in LAZY_PACKAGES:
            return importlib.import_module(f"attnlab.{name}")
        if name == "load_run":
            return importlib.import_module("attnlab.runs").load_run
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
