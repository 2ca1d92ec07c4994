"""Kernels of other libraries, behind our rules: `jax.nn.dot_product_attention` on XLA and cuDNN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.attention.dense import Options, refuse_edit
from attnlab.attention.masks import combine
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward


def _pad_widths(size: int, *arrays: Array) -> list[Array]:
    """jax.nn wants V = H; zero columns change no product."""
    return [jnp.pad(a, [(0, 0)] * 3 + [(0, size - a.shape[-1])]) for a in arrays]


def xla(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    size = max(query.shape[-1], value.shape[-1])
    q, k, v = _pad_widths(size, query, key, value)
    allowed = visible.allowed()
    if bias is not None:  # a bias of -inf hides too, and a row of it is NaN in jax.nn
        shown = bias > -jnp.inf
        bias, allowed = jnp.where(shown, bias, 0), combine(allowed, shown)
    out = jax.nn.dot_product_attention(
        q, k, v, bias, allowed, scale=options.scale, implementation="xla"
    )[..., : value.shape[-1]]
    if bias is not None:
        sees = jnp.any(allowed, axis=3).swapaxes(1, 2)[..., None]
        out = jnp.where(sees, out, 0)
    return {"out": save_for_backward(out)}


def refuse_jax_nn(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    # Not every version of it tells the sum that a sink is beside.
    return refuse_for("jax.nn", query, key, value, options)


def refuse_for(library: str, query, key, value, options: Options, has=()) -> str | None:
    """What kernels of other libraries have in common; of the options one may have some."""
    if reason := refuse_edit(options):
        return reason
    if options.sink is not None:
        return f"{library} has no sink"
    for field, default in Options._field_defaults.items():
        if field not in ("dropout_key", *has) and getattr(options, field) != default:
            return f"{library} has no {field}"
    if key.shape[-2] != value.shape[-2]:
        return f"it needs as many key heads ({key.shape[-2]}) as value heads ({value.shape[-2]})"
    if not query.dtype == key.dtype == value.dtype:
        return f"it needs one dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
    if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        return f"{library} has no float16 on a CPU"
    return None


def native(visible: Visible) -> dict[str, Any] | None:
    """Causal, window and lengths in cuDNN's own words, or None where they need a mask array.

    cuDNN has a left window under the causal rule alone, and gives NaN in an empty row: so lengths
    are at least 1 (what is hidden is zero by then, and empty rows are zeroed after).
    """
    window, lengths = visible.window, (visible.query_lengths, visible.key_lengths)
    causal = visible.is_causal or (window is not None and window[1] == 0)
    if visible.mask is not None or visible.edges is not None:
        return None
    if window is not None:
        ranges = visible._replace(query_lengths=None, key_lengths=None).ranges()
        empty = ranges is not None and bool(np.any(ranges[0] >= ranges[1]))
        if not causal or empty or lengths != (None, None):
            return None
    query_lengths, key_lengths = (None if a is None else jnp.maximum(a, 1) for a in lengths)
    return {
        "is_causal": causal,
        "local_window_size": window and (window[0], 0),
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


UNEQUAL = {(192, 128)}
"""(H, V) that cuDNN lists beside V = H for Hopper GPUs and later ones, forward and backward, in its
support matrix (docs.nvidia.com/deeplearning/cudnn, Attention). Others are padded; not measured."""


def cudnn(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """cuDNN's flash attention: widths are padded to one multiple of 8 unless they are `UNEQUAL`,
    masks to all T and S."""
    asked = native(visible)
    if asked is None:
        allowed = visible.allowed()
        t, s = query.shape[1], key.shape[1]
        asked = {"mask": jnp.broadcast_to(allowed, (*allowed.shape[:2], t, s))}
    asked["scale"] = options.scale
    if (call := _cudnn_of_jax(query.shape[-1], value.shape[-1])) is not None:
        return {"out": save_for_backward(_unpadded(call, query, key, value, **asked))}
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    q, k, v = _pad_widths(size, query, key, value)
    out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **asked)
    return {"out": save_for_backward(out[..., : value.shape[-1]])}


def _cudnn_of_jax(h: int, v: int) -> Any:
    """The module below `jax.nn`, which itself refuses V != H; None where that needs padding."""
    if (h, v) not in UNEQUAL or _gpu()[1] < 9:
        return None
    try:
        from jax._src.cudnn import fused_attention_stablehlo as of_jax

        return of_jax if of_jax.check_cudnn_version() >= 91000 else None
    except (ImportError, AttributeError, RuntimeError):  # it is private, and may go
        return None


def _unpadded(
    of_jax, q, k, v, *, scale, mask=None, is_causal=False, local_window_size=None,
    query_seq_lengths=None, key_value_seq_lengths=None,
):  # fmt: skip
    """The words of jax.nn in those of the module below it."""
    kinds = ["CAUSAL"] if is_causal else []
    q_lengths, k_lengths = query_seq_lengths, key_value_seq_lengths
    if q_lengths is not None or k_lengths is not None:
        kinds.insert(0, "PADDING")
        full = lambda a: jnp.full(len(a), a.shape[1], jnp.int32)
        q_lengths = full(q) if q_lengths is None else q_lengths
        k_lengths = full(k) if k_lengths is None else k_lengths
    return of_jax.dot_product_attention(
        q, k, v, None, mask, q_lengths, k_lengths, scale=scale,
        mask_type=of_jax.MaskType["_".join(kinds) or "NO_MASK"],
        sliding_window_length=local_window_size and local_window_size[0] + 1,
    )  # fmt: skip


def _gpu() -> tuple[str, float]:
    """The default backend, and the compute capability of an NVIDIA GPU with cuDNN (else 0)."""
    device = jax.devices()[0]
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):
        return device.platform, 0.0
    trouble = _trouble()
    return (device.platform, capability) if trouble is None else (trouble, 0.0)


@functools.cache
def _trouble() -> str | None:
    """What jax.nn has against the plainest call of cuDNN: none there, or one that is too old."""
    a = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), a, a, a
        )
    except (RuntimeError, NotImplementedError) as error:
        return f"GPU of which jax.nn says {str(error)!r}"
    return None


def refuse_cudnn(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    (platform, capability), (t, s) = _gpu(), (query.shape[1], key.shape[1])
    size, most = max(query.shape[-1], value.shape[-1]), 256 if capability >= 9 else 128
    if platform != "gpu" or not capability:
        return f"cuDNN needs an NVIDIA GPU, this is a {platform}"
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN needs float16 or bfloat16, not {query.dtype}"
    if size > most:
        return f"cuDNN on this GPU needs head widths of at most {most}, not {size}"
    if bias is not None:
        return f"cuDNN has a bias gradient for batch 1 alone, bias has shape {bias.shape}"
    if t % 2 or s % 2:  # jax.nn asks it of every gradient, as if there always were a bias
        return f"the gradient of cuDNN needs even lengths, not T={t} and S={s}"
    return refuse_jax_nn(query, key, value, bias, visible, options)
