"""JAX's attention kernel for TPUs, behind our rules; a CPU interprets it.

`jax.experimental.pallas.ops.tpu.splash_attention`. It was run by interpretation alone, and lowers
for a TPU; it never ran on one, so that no device chooses it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.attention.dense import Options
from attnlab.attention.fused import refuse_for
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward

BLOCK = 128
"""Queries and keys come in so many at once: lengths are padded to a multiple."""


def splash(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """V may differ from H. Blocks that a causal rule or a window hides are left out; lengths, and
    what fills up the last blocks, are segments of other numbers."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    (b, t, n, _), s = query.shape, key.shape[1]
    to_blocks = lambda a: jnp.pad(a, ((0, 0), (0, -a.shape[1] % BLOCK), (0, 0), (0, 0)))
    to_heads = lambda a: to_blocks(a).swapaxes(1, 2)
    q = to_heads((query * options.scale).astype(query.dtype))
    k, v = to_heads(key), to_heads(value)
    shape = (q.shape[2], k.shape[2])
    left, right = visible.window or (None, None)
    right = 0 if visible.is_causal else right
    everywhere = (left, right) == (None, None)
    seen = library.FullMask(shape) if everywhere else library.LocalMask(shape, (left, right), 0)
    kernel = library.make_splash_mha_single_device(
        library.MultiHeadMask([seen] * n),
        attn_logits_soft_cap=options.logits_soft_cap,
        interpret=jax.default_backend() != "tpu",
    )
    real = lambda lengths, full, size: jnp.broadcast_to(
        jnp.arange(size) < (full if lengths is None else lengths[:, None]), (b, size)
    )
    # A query sees the keys of its own segment: all that are real; none of them is in segment 2.
    segments = library.SegmentIds(
        jnp.where(real(visible.query_lengths, t, shape[0]), 1, 2),
        real(visible.key_lengths, s, shape[1]).astype(jnp.int32),
    )
    out = jax.vmap(kernel)(q, k, v, segments)
    return {"out": save_for_backward(out.swapaxes(1, 2)[:, :t])}


def refuse_splash(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    if (platform := jax.default_backend()) not in ("tpu", "cpu"):
        return f"splash attention is for TPUs, and a CPU interprets it; this is a {platform}"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"splash attention needs float32 or bfloat16, not {query.dtype}"
    if bias is not None:
        return "splash attention has no bias"
    if visible.mask is not None or visible.edges is not None:
        return "splash attention has no mask array: the causal rule, windows and lengths alone"
    return refuse_for("splash attention", query, key, value, options, has=("logits_soft_cap",))
