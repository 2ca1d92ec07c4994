"""Attention of heads 64 to 1024 wide on a GPU, forward and backward, with no [T, S] array.

Other kernels hold all columns of a block of queries at once and end at widths of 128 to 256. Here
the width is divided too (`pallas_wide_kernels`): scores are summed over chunks of it, and where a
head is wider than the sums that one program can keep, several programs share its columns
and each of them computes the scores.

The gradient is that of Dao et al. 2022 (arXiv 2205.14135), appendix B.2, in passes of their own for
q, k and v: no program waits for another, and every run adds up in the same order.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnlab.attention import AttentionOutput, Call, Settings
from attnlab.attention.blocks import same_varying_axes
from attnlab.attention.jax_nn import refuse_dense_only
from attnlab.attention.mask_spec import MaskSpec
from attnlab.attention.scores import add_sink
from attnlab.remat import save_for_backward

if TYPE_CHECKING:  # Pallas takes a while to import
    from attnlab.contrib.pallas_wide_kernels import Kernel, Place, Tiling

NARROWEST, WIDEST = 64, 1024
INTERPRETED = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, "pallas_wide" runs on any device, by Pallas's interpreter: right, but very slow.

    >>> from attnlab import dot_product_attention
    >>> q = jnp.ones((1, 3, 2, 64))
    >>> with interpreted():
    ...     dot_product_attention(q, q, q, implementation="pallas_wide").shape
    (1, 3, 2, 64)
    """
    before = INTERPRETED.set(True)
    try:
        yield
    finally:
        INTERPRETED.reset(before)


def pallas_wide(call: Call) -> AttentionOutput:
    """Attention of wide heads in Pallas, for GPUs; on others see `interpreted`.

    One array as key and value (`key is value`: wide heads in the order "absorbed") is read once and
    has one gradient. No second or forward-mode derivatives: see `dense`.
    """
    from attnlab.contrib.pallas_wide_kernels import Kernel, tiling_of, width

    query, key, value, settings = call.query, call.key, call.value, call.settings
    t, s, h, v = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    tiling = tiling_of(max(h, v), query.dtype)
    of_h, of_v = width(h, tiling), width(v, tiling)
    more_t, more_s = (-length % max(tiling.block, tiling.step) for length in (t, s))
    arrays = (
        _longer(query, more_t, of_h.size),
        _longer(key, more_s, of_h.size),
        None if key is value else _longer(value, more_s, of_v.size),
        place_of(call.mask, _row(call, more_s), tiling, more_t),
    )
    scale = float(cast(float, settings.scale))
    kernel = Kernel(tiling, of_h, of_v, scale, call.bias is not None, INTERPRETED.get())
    output, residual = _attend(kernel, *same_varying_axes(arrays))
    output, residual = output[:, :t, :, :v], residual[:, :, :t].swapaxes(1, 2)
    if settings.sink is not None:
        output, residual = add_sink(output, residual, settings.sink)
    return AttentionOutput(output, residual if settings.return_residual else None)


def _row(call: Call, more_s: int) -> Array:
    """Bias and mask [B or 1, N or 1, S], which are the same for all queries."""
    bias, mask, s = call.bias, call.mask.mask, call.key.shape[1]
    row = jnp.zeros((1, 1, 1), jnp.float32) if bias is None else bias[:, :, 0].astype(jnp.float32)
    if mask is not None:
        row = jnp.where(mask[:, :, 0], row, -math.inf)
    return jnp.pad(jnp.broadcast_to(row, (*row.shape[:2], s)), ((0, 0), (0, 0), (0, more_s)))


def _longer(a: Array, rows: int, columns: int) -> Array:
    return jnp.pad(a, ((0, 0), (0, rows), (0, 0), (0, columns - a.shape[3])))


def refuse_pallas_wide(call: Call) -> str | None:
    """Why the kernels cannot run the call."""
    query, key, value, settings = call.query, call.key, call.value, call.settings
    if reason := refuse_dense_only(settings):
        return reason
    most = max(query.shape[3], value.shape[3])
    if not NARROWEST <= most <= WIDEST:
        return f"it is for heads {NARROWEST} to {WIDEST} wide, not {most}"
    if (platform := jax.default_backend()) != "gpu" and not INTERPRETED.get():
        return f"it is written for a GPU, this is a {platform} (see attnlab.contrib.interpreted)"
    dtypes = {a.dtype for a in (query, key, value)}
    if len(dtypes) > 1 or query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        names = f"{query.dtype}, {key.dtype}, {value.dtype}"
        return f"it needs one dtype of float32, bfloat16 and float16, not {names}"
    if call.mask.edges is not None:
        return "edges lie anywhere, not in blocks"
    for name, a in {"mask": call.mask.mask, "bias": call.bias}.items():
        if a is not None and a.shape[2] > 1:
            return f"it takes a {name} that is the same for all queries, not {a.shape}"
    if not isinstance(settings.scale, int | float | np.number):
        return "its scale must be a Python number"
    for name in ("logits_soft_cap", "score_mods", "dropout_rate", "talking_heads"):
        if getattr(settings, name) != Settings._field_defaults[name]:
            return f"it has no {name}"
    return None


def place_of(mask: MaskSpec, row: Array, tiling: "Tiling", more_t: int) -> "Place":
    """Which steps a block meets follows from the range of keys that each query attends to."""
    from attnlab.contrib.pallas_wide_kernels import Place

    t, s = mask.num_queries, mask.num_keys
    ranges = mask.ranges()
    first, end = (np.zeros((1, t)), np.full((1, t), s)) if ranges is None else ranges
    xp: Any = np if isinstance(end, np.ndarray) else jnp

    def pad(a: Any, value: int) -> Any:
        return xp.pad(a.astype(np.int32), ((0, 0), (0, more_t)), constant_values=value)

    # Queries behind the last one attend to nothing, as those in empty rows.
    first, end = pad(first, s), pad(end, 0)

    def least(size: int) -> Any:
        return first.reshape(len(first), -1, size).min(2)

    def most(size: int) -> Any:
        return end.reshape(len(end), -1, size).max(2)

    of_queries = least(tiling.block) // tiling.step, -(-most(tiling.block) // tiling.step)
    start = np.arange(0, row.shape[2], tiling.block, dtype=np.int32)[:, None]
    met = (least(tiling.step)[:, None] < start + tiling.block) & (
        most(tiling.step)[:, None] > start
    )
    any_met, count = met.any(2), met.shape[2]
    of_keys = (
        xp.where(any_met, met.argmax(2), 0),
        xp.where(any_met, count - met[:, :, ::-1].argmax(2), 0),
    )
    return Place(row, _pair(first, end), _pair(*of_queries), _pair(*of_keys))


def _pair(first: Any, end: Any) -> Array:
    return jnp.stack([jnp.asarray(a, jnp.int32) for a in (first, end)], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernel: "Kernel", query: Array, key: Array, value: Array | None, place: "Place"
) -> tuple[Array, Array]:
    """Output [B, T, N, V] and log sum exp [B, N, T]; value None: the key."""
    return _forward(kernel, query, key, value, place)[0]


def _forward(
    kernel: "Kernel", query: Array, key: Array, value: Array | None, place: "Place"
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    from attnlab.contrib.pallas_wide_kernels import forward

    output, top, share = save_for_backward(forward(kernel, query, key, value, place))
    lse = jnp.where(share > 0, top - jnp.log(jnp.where(share > 0, share, 1)), -math.inf)
    return (output, lse), (query, key, value, place, output, top, share)


def _backward(kernel: "Kernel", saved: tuple[Any, ...], cotangents: tuple[Array, Array]) -> Any:
    from attnlab.contrib.pallas_wide_kernels import Place, gradients

    *call, output, top, share = saved
    (d_output, d_lse), place = cotangents, call[3]
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=3)
    delta = delta.swapaxes(1, 2)
    delta -= jnp.where(share > 0, d_lse, 0)  # an empty row's may be NaN
    *grads, d_row = gradients(kernel, *call, d_output, top, share, delta)
    if d_row is not None:
        axes = tuple(i for i in (0, 1) if place.row.shape[i] == 1)
        d_row = jnp.sum(d_row, axis=axes, keepdims=True)
    return *grads, Place(d_row, None, None, None)


_attend.defvjp(_forward, _backward)
