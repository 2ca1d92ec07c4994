"""Kernels of the library tokamax, https://github.com/openxla/tokamax.

Fused for GPUs and TPUs, XLA elsewhere. Not measured here.
"""

import importlib.util
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp

from attnlab.attention import AttentionOutput, Call
from attnlab.attention.jax_nn import native_mask, refuse_options
from attnlab.extras import extra
from attnlab.remat import save_for_backward

WIDEST = 256
"""On a GPU: its kernels hold whole rows of q, k and v. Wider ones run out of shared memory, going
backward first, with an error that does not lead tokamax on to its next kernel."""


def tokamax(call: Call) -> AttentionOutput:
    """tokamax chooses the kernel. V may differ from H; the causal rule and lengths are keywords."""
    with extra("tokamax"):
        import tokamax as library

    settings, bias, (_, _, t, s) = call.settings, call.bias, call.scores_shape
    options: dict[str, Any] = dict(native_mask(call.mask) or {})
    if not options or (options["local_window_size"] and t != s):  # its window wants T = S
        options = {"mask": call.mask.allowed()}
    shown = None
    if bias is not None and not settings.logits_soft_cap:  # a cap would make it finite
        shown = bias > -jnp.inf  # -inf hides too, and a row of it is NaN
        before = options.get("mask")
        bias, options["mask"] = (
            jnp.where(shown, bias, 0),
            shown if before is None else before & shown,
        )
    options |= {
        "scale": float(cast(float, settings.scale)),
        "logits_soft_cap": settings.logits_soft_cap,
    }
    # The first call reads the command line as flags of its own, and fails on those of a notebook.
    line, sys.argv = sys.argv, sys.argv[:1]
    try:
        out = library.dot_product_attention(call.query, call.key, call.value, bias, **options)
    finally:
        sys.argv = line
    if shown is not None:
        allowed = call.mask.allowed()
        allowed = shown if allowed is None else allowed & shown
        attending = jnp.any(allowed, axis=3).swapaxes(1, 2)[..., None]
        out = jnp.where(attending, out, 0)
    return AttentionOutput(save_for_backward(out))


def refuse_tokamax(call: Call) -> str | None:
    """Why tokamax cannot run the call."""
    if importlib.util.find_spec("tokamax") is None:
        return 'tokamax is missing: pip install "attnlab[tokamax]"'
    if isinstance(call.settings.scale, jax.core.Tracer):
        return "tokamax needs a scale that is known while JAX traces"
    if call.query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"tokamax needs float32, bfloat16 or float16, not {call.query.dtype}"
    size = max(call.query.shape[-1], call.value.shape[-1])
    if jax.default_backend() == "gpu" and size > WIDEST:
        return f"the kernels of tokamax take heads of at most {WIDEST} on a GPU, not {size}"
    return refuse_options("tokamax", call, supported=("logits_soft_cap",))
