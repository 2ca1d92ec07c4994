"""JAX's attention kernel for TPUs, `jax.experimental.pallas.ops.tpu.splash_attention`.

It was only interpreted on a CPU, and lowers for a TPU; it never ran on one.
"""

import jax
import jax.numpy as jnp
from jax import Array

from attnlab.attention import AttentionCall, AttentionOutput
from attnlab.attention.jax_nn import refuse_options
from attnlab.ops import save_for_backward

BLOCK = 128
"""Queries and keys come in blocks of this size: lengths are padded to a multiple."""


def splash(call: AttentionCall) -> AttentionOutput:
    """V may differ from H. Blocks that a causal rule or a window hides are skipped; lengths, and
    the padding of the last blocks, are in segment 0."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    query, mask, (b, n, t, s) = call.query, call.mask, call.scores_shape
    q = _to_blocks((query * call.options.scale).astype(query.dtype))
    k, v = _to_blocks(call.key), _to_blocks(call.value)
    shape = (q.shape[2], k.shape[2])
    left, right = mask.window or (None, None)
    right = 0 if mask.is_causal else right
    everywhere = (left, right) == (None, None)
    seen = library.FullMask(shape) if everywhere else library.LocalMask(shape, (left, right), 0)
    kernel = library.make_splash_mha_single_device(
        library.MultiHeadMask([seen] * n),
        attn_logits_soft_cap=call.options.logits_soft_cap,
        interpret=jax.default_backend() != "tpu",
    )
    # What queries of segment 0 attend to is dropped: their output is set to zero afterwards.
    ids = (jnp.ones((b, t)), jnp.ones((b, s)))
    if mask.segments is not None:
        ids = mask.segments.queries, mask.segments.keys
    real = _is_real(mask.key_lengths, b, s, shape[1])
    longer = (
        jnp.pad(a.astype(jnp.int32), ((0, 0), (0, size - a.shape[1])))
        for a, size in zip(ids, shape, strict=True)
    )
    segments = library.SegmentIds(next(longer), jnp.where(real, next(longer), 0))
    out = jax.vmap(kernel)(q, k, v, segments)
    return AttentionOutput(save_for_backward(out.swapaxes(1, 2)[:, :t]))


def refuse_splash(call: AttentionCall) -> str | None:
    """Why splash attention cannot run the call."""
    if (platform := jax.default_backend()) not in ("tpu", "cpu"):
        return f"splash attention is for TPUs, and a CPU interprets it; this is a {platform}"
    if jnp.result_type(int) == jnp.int64:
        return "splash attention counts in 32 bits: turn jax_enable_x64 off"
    if call.query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"splash attention needs float32 or bfloat16, not {call.query.dtype}"
    if call.options.bias is not None:
        return "splash attention has no bias"
    if call.mask.mask is not None or call.mask.edges is not None:
        return "splash attention has no mask array: rules, lengths and segments alone"
    if _varies_in_shard_map(call.query):
        return "splash attention runs only in jax.shard_map(..., check_vma=False)"
    return refuse_options("splash attention", call, supported=("logits_soft_cap",))


def _to_blocks(a: Array) -> Array:
    """[B, T, N, H] -> [B, N, T, H], padded to whole blocks."""
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % BLOCK), (0, 0), (0, 0))).swapaxes(1, 2)


def _is_real(lengths: Array | None, batch: int, full: int, padded: int) -> Array:
    """Which positions are neither padding to whole blocks nor behind the length of their row."""
    end = full if lengths is None else jnp.minimum(lengths, full)[:, None]
    return jnp.broadcast_to(jnp.arange(padded) < end, (batch, padded))


def _varies_in_shard_map(a: Array) -> bool:
    """Is this traced inside `shard_map` with its check of varying axes? The kernel fails there."""
    aval = jax.typeof(a)
    axes = getattr(aval, "manual_axis_type", None)
    return bool(axes.varying if axes is not None else getattr(aval, "vma", ()))
