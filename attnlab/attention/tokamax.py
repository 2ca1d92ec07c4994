"""Kernels of the library tokamax, behind our rules.

https://github.com/openxla/tokamax: fused for GPUs and TPUs, XLA elsewhere. What it does there is
not measured here, so that no device chooses it.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.attention.dense import Options
from attnlab.attention.fused import native, refuse_for
from attnlab.attention.masks import combine
from attnlab.attention.visible import Visible
from attnlab.extras import extra
from attnlab.remat import save_for_backward

WIDEST = 256
"""On a GPU: its kernels hold whole rows of q, k and v. Wider ones run out of shared memory, going
backward first, with an error that does not lead tokamax on to its next kernel."""


def tokamax(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """tokamax chooses the kernel. V may differ from H; causal rule and lengths stay words."""
    with extra("tokamax"):
        import tokamax as library

    asked, same = native(visible), query.shape[1] == key.shape[1]
    if asked is None or (asked["local_window_size"] and not same):  # its window wants T = S
        asked = {"mask": visible.allowed()}
    shown = None
    if bias is not None and not options.logits_soft_cap:  # a cap would make it finite
        shown = bias > -jnp.inf  # -inf hides too, and a row of it is NaN
        bias, asked["mask"] = jnp.where(shown, bias, 0), combine(asked.get("mask"), shown)
    words = {"scale": float(options.scale), "logits_soft_cap": options.logits_soft_cap} | asked
    # The first call reads the command line as flags of its own, and fails on those of a notebook.
    line, sys.argv = sys.argv, sys.argv[:1]
    try:
        out = library.dot_product_attention(query, key, value, bias, **words)
    finally:
        sys.argv = line
    if shown is not None:
        sees = jnp.any(combine(visible.allowed(), shown), axis=3).swapaxes(1, 2)[..., None]
        out = jnp.where(sees, out, 0)
    return {"out": save_for_backward(out)}


def refuse_tokamax(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return 'tokamax is missing: pip install "attnlab[tokamax]"'
    if isinstance(options.scale, jax.core.Tracer):
        return "tokamax needs a scale that is known while JAX traces"
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"tokamax needs float32, bfloat16 or float16, not {query.dtype}"
    size = max(query.shape[-1], value.shape[-1])
    if jax.default_backend() == "gpu" and size > WIDEST:
        return f"the kernels of tokamax take heads of at most {WIDEST} on a GPU, not {size}"
    return refuse_for("tokamax", query, key, value, options, has=("logits_soft_cap",))
