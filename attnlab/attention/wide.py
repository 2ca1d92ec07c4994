"""Attention of heads 64 to 1024 wide on a GPU, forward and backward, with no [T, S] array.

Other kernels hold all columns of a block of queries at once and end at widths of 128 to 256. Here
the width is cut too (`wide_kernels`): scores are summed over chunks of it, and where a head is
wider than the sums that one program can keep, several programs share its columns and each of them
computes the scores.

The gradient is that of Dao et al. 2022 (arXiv 2205.14135), appendix B.2, in passes of their own for
q, k and v: no program waits for another, and every run adds up in the same order.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.attention.blocks import vary_alike
from attnlab.attention.dense import Options, beside_sink, refuse_edit
from attnlab.attention.visible import Visible
from attnlab.remat import save_for_backward

if TYPE_CHECKING:  # Pallas takes a while to import
    from attnlab.attention.wide_kernels import Cut, How, Place

NARROWEST, WIDEST = 64, 1024
INTERPRETED = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """In this block `wide` runs on any device, by Pallas's interpreter: right, but very slow.

    >>> from attnlab import dot_product_attention
    >>> q = jnp.ones((1, 3, 2, 64))
    >>> with interpreted():
    ...     dot_product_attention(q, q, q, implementation="wide").shape
    (1, 3, 2, 64)
    """
    before = INTERPRETED.set(True)
    try:
        yield
    finally:
        INTERPRETED.reset(before)


def wide(query, key, value, bias, visible: Visible, options: Options) -> dict[str, Array]:
    """Attention of wide heads in Pallas, for GPUs; on others see `interpreted`.

    One array as key and value (`key is value`: wide heads in the order "absorbed") is read once and
    has one gradient. No second or forward-mode derivatives: see `dense`.
    """
    from attnlab.attention.wide_kernels import How, cut_of, width

    t, s, h, v = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    cut = cut_of(max(h, v), query.dtype)
    of_h, of_v = (width(size, cut) for size in (h, v))
    more_t, more_s = (-length % max(cut.block, cut.step) for length in (t, s))
    row = jnp.zeros((1, 1, 1), jnp.float32) if bias is None else bias[:, :, 0].astype(jnp.float32)
    if visible.mask is not None:
        row = jnp.where(visible.mask[:, :, 0], row, -math.inf)
    row = jnp.pad(jnp.broadcast_to(row, (*row.shape[:2], s)), ((0, 0), (0, 0), (0, more_s)))
    longer = lambda a, rows, of: jnp.pad(
        a, ((0, 0), (0, rows), (0, 0), (0, of.chunk * of.total - a.shape[3]))
    )
    arrays = (
        longer(query, more_t, of_h),
        longer(key, more_s, of_h),
        None if key is value else longer(value, more_s, of_v),
        place_of(visible, row, cut, more_t),
    )
    how = How(cut, of_h, of_v, float(options.scale), bias is not None, INTERPRETED.get())
    out, residual = _attend(how, *vary_alike(arrays))
    out, residual = out[:, :t, :, :v], residual[:, :, :t].swapaxes(1, 2)
    if options.sink is not None:
        out, residual = beside_sink(out, residual, options.sink)
    return {"out": out} | ({"residual": residual} if options.return_residual else {})


def refuse_wide(query, key, value, bias, visible: Visible, options: Options) -> str | None:
    if reason := refuse_edit(options):
        return reason
    most = max(query.shape[3], value.shape[3])
    if not NARROWEST <= most <= WIDEST:
        return f"it is for heads {NARROWEST} to {WIDEST} wide, not {most}"
    if (platform := jax.default_backend()) != "gpu" and not INTERPRETED.get():
        return f"it is written for a GPU, this is a {platform} (see attention.wide.interpreted)"
    dtypes = {a.dtype for a in (query, key, value)}
    if len(dtypes) > 1 or query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        names = f"{query.dtype}, {key.dtype}, {value.dtype}"
        return f"it needs one dtype of float32, bfloat16 and float16, not {names}"
    if visible.edges is not None:
        return "edges lie anywhere, not in blocks"
    for name, a in {"mask": visible.mask, "bias": bias}.items():
        if a is not None and a.shape[2] > 1:
            return f"it takes a {name} that is the same for all queries, not {a.shape}"
    if not isinstance(options.scale, int | float | np.number):
        return "its scale must be a Python number"
    for name in ("logits_soft_cap", "dropout_rate", "mix"):
        if getattr(options, name) != Options._field_defaults[name]:
            return f"it has no {name}"
    return None


def place_of(visible: Visible, row: Array, cut: "Cut", more_t: int) -> "Place":
    """Which steps a block meets follows from the range of keys that each query sees."""
    from attnlab.attention.wide_kernels import Place

    t, s = visible.num_queries, visible.num_keys
    ranges = visible.ranges()
    first, end = (np.zeros((1, t)), np.full((1, t), s)) if ranges is None else ranges
    xp: Any = np if isinstance(end, np.ndarray) else jnp
    # Queries behind the last one see nothing, as those in empty rows.
    pad = lambda a, value: xp.pad(a.astype(np.int32), ((0, 0), (0, more_t)), constant_values=value)
    first, end = pad(first, s), pad(end, 0)
    least = lambda size: first.reshape(len(first), -1, size).min(2)
    most = lambda size: end.reshape(len(end), -1, size).max(2)
    of_queries = least(cut.block) // cut.step, -(-most(cut.block) // cut.step)
    start = np.arange(0, row.shape[2], cut.block, dtype=np.int32)[:, None]
    met = (least(cut.step)[:, None] < start + cut.block) & (most(cut.step)[:, None] > start)
    any_met, count = met.any(2), met.shape[2]
    of_keys = (
        xp.where(any_met, met.argmax(2), 0),
        xp.where(any_met, count - met[:, :, ::-1].argmax(2), 0),
    )
    pair = lambda two: jnp.stack([jnp.asarray(a, jnp.int32) for a in two], axis=1)
    return Place(row, pair((first, end)), pair(of_queries), pair(of_keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: "How", query, key, value, place: "Place"):
    """Output [B, T, N, V] and log sum exp [B, N, T]; value None: the key."""
    return _forward(how, query, key, value, place)[0]


def _forward(how: "How", query, key, value, place: "Place"):
    from attnlab.attention.wide_kernels import forward

    out, top, share = save_for_backward(forward(how, query, key, value, place))
    lse = jnp.where(share > 0, top - jnp.log(jnp.where(share > 0, share, 1)), -math.inf)
    return (out, lse), (query, key, value, place, out, top, share)


def _backward(how: "How", saved, cotangents):
    from attnlab.attention.wide_kernels import Place, gradients

    *call, out, top, share = saved
    (d_out, d_lse), place = cotangents, call[3]
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=3).swapaxes(1, 2)
    delta -= jnp.where(share > 0, d_lse, 0)  # an empty row's may be NaN
    *grads, d_row = gradients(how, *call, d_out, top, share, delta)
    if d_row is not None:
        axes = tuple(i for i in (0, 1) if place.row.shape[i] == 1)
        d_row = jnp.sum(d_row, axis=axes, keepdims=True)
    return *grads, Place(d_row, None, None, None)


_attend.defvjp(_forward, _backward)
