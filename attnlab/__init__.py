"""Attention heads in JAX, and the models, conversions and experiments built from them.

    import jax, jax.numpy as jnp
    import attnlab
    from attnlab import heads

    layout = heads.Wide(width=64, num_heads=4)
    params = heads.init(jax.random.key(0), layout)
    y = attnlab.multi_head_attention(params, jnp.ones((1, 5, 64)), layout, is_causal=True)

    config = attnlab.ModelConfig(width=64, heads=heads.Wide(num_heads=4), sharing="albert")
    model, tokens = config.build(), jnp.zeros((1, 5), int)
    params = model.init(jax.random.key(0), tokens)["params"]
    logits = model.apply({"params": params}, tokens).logits
    text = attnlab.generate(params, tokens, config, 8)

Packages: `attention` (softmax attention on q, k, v), `heads` (layouts), `sharing` (plans),
`models`, `transforms` (exact conversion, re-sharing, pruning), `pretrained` (published
checkpoints), `data`, `training`, `lab` (experiments), `interpret`, `report`. `dir(attnlab)` lists
what is here; `help(attnlab.multi_head_attention)` and `help(attnlab.heads)` document it.
"""

import importlib as _importlib
import types as _types
import typing as _typing

from attnlab import adapters, heads, models, sharing, transforms
from attnlab.attention import BACKENDS, ALiBi, RelativeBias, dot_product_attention, explain, masks
from attnlab.heads import (
    LAYOUTS,
    Extra,
    Layout,
    contraction_orders,
    decode,
    explain_heads,
    init_cache,
    multi_head_attention,
    positions,
    project_kv,
)
from attnlab.models import (
    FFN,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerOverrides,
    LayerStack,
    ModelConfig,
    MultiHeadAttention,
    Norm,
    Outputs,
    Sampling,
    applied_parameters,
    cache_bytes_per_token,
    explain_model,
    feed_forward,
    flops_per_token,
    generate,
    match_budget,
    num_parameters,
    prefill,
    run_layers,
    run_model,
    stream,
    transformer_layer,
)
from attnlab.ops import layer_norm, rms_norm
from attnlab.sharing import PLANS, Plan, init_stacked, parse_plan, plan_names, run_stack
from attnlab.tap import capture
from attnlab.transforms.convert import Conversion, NotEquivalent, Undecided, convert
from attnlab.transforms.permute import permute_heads
from attnlab.transforms.reparametrize import reparametrize

__version__ = "0.1.0"

_LAZY_PACKAGES = ("contrib", "data", "interpret", "lab", "pretrained", "report", "training")
"""Imported on first use, as `attnlab.interpret`."""
_LAZY_NAMES = {"load_run": "attnlab.load"}

if _typing.TYPE_CHECKING:
    from attnlab.load import load_run

    # Not at run time: `help(attnlab)` would print all of these, with all that Flax adds to modules.
    __all__ = [
        "BACKENDS", "FFN", "LAYOUTS", "PLANS", "ALiBi", "Conversion", "Decoder", "Encoder",
        "EncoderDecoder", "Extra", "FeedForward", "LayerOverrides", "LayerStack",
        "Layout", "ModelConfig", "MultiHeadAttention", "Norm", "NotEquivalent", "Outputs", "Plan",
        "RelativeBias", "Sampling", "Undecided", "adapters", "applied_parameters",
        "cache_bytes_per_token", "capture", "contraction_orders", "convert",
        "decode", "dot_product_attention", "explain", "explain_heads", "explain_model",
        "feed_forward", "flops_per_token", "generate", "heads", "init_cache", "init_stacked",
        "layer_norm", "load_run", "masks", "match_budget", "models", "multi_head_attention",
        "num_parameters", "parse_plan", "permute_heads", "plan_names", "positions", "prefill",
        "project_kv", "reparametrize", "rms_norm", "run_layers", "run_model", "run_stack",
        "sharing", "stream", "transformer_layer", "transforms",
    ]  # fmt: skip
else:  # type checkers do not read this, so they report names that do not exist

    def __getattr__(name: str) -> object:
        if name in _LAZY_PACKAGES:
            return _importlib.import_module(f"attnlab.{name}")
        if name in _LAZY_NAMES:
            return getattr(_importlib.import_module(_LAZY_NAMES[name]), name)
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}")


_PUBLIC_MODULES = ("adapters", "attention", "heads", "masks", "models", "positions", "sharing",
                   "transforms", *_LAZY_PACKAGES)  # fmt: skip


def __dir__() -> list[str]:
    names = {
        name
        for name, value in globals().items()
        if not name.startswith("_") and not isinstance(value, _types.ModuleType)
    }
    return sorted({*names, *_PUBLIC_MODULES, *_LAZY_NAMES, "__version__"})
