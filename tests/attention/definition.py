"""Attention written out in NumPy: what every backend must agree with; inputs, and small blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import BACKENDS, masks
from attnlab.attention import ALiBi, ScoreMod, SoftCap, relative_buckets
from attnlab.attention.blocks import BlockLimits
from attnlab.attention.blockwise import blockwise

SMALL_BLOCKS = BlockLimits(queries=2, head_scores=6, block_scores=1)
"""2 queries and 3 keys of one group of heads."""
SMALL_STRIPS = BlockLimits(small_queries=2, small_scores=1)
"""All queries and keys in one block, in strips of 2 queries and pieces of one group of heads."""


def make(dtype=jnp.float32, heads=(6, 3, 3), t=5, s=7, scale=2.0):
    """q [2, t, N, 4], k [2, s, K, 4] and v [2, s, Kv, 8] by NumPy: JAX would compile each draw."""
    rng, (n, k, kv) = np.random.default_rng(3), heads
    shapes = (2, t, n, 4), (2, s, k, 4), (2, s, kv, 8)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)


def divide(monkeypatch, limits):
    """Registers "blockwise" with these limits until the end of the test."""
    run = functools.partial(blockwise, limits=limits)
    monkeypatch.setitem(BACKENDS, "blockwise", BACKENDS["blockwise"]._replace(run=run))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mine(ScoreMod):
    """A user's own: all three indices, an integer leaf, a nested leaf and a static field."""

    weights: dict
    shift: jax.Array
    power: int = dataclasses.field(default=2, metadata={"static": True})

    def apply(self, scores, *, head, query, key):
        distance = (query - key + self.shift) ** self.power
        return scores * jnp.cos(self.weights["a"][head] * distance) - self.weights["b"] * query


def attention(q, k, v, options):
    """Output [B, T, N, V], log sum exp [B, T, N] and the largest score, in float64 or, for
    derivatives by complex steps, in complex128."""
    q, k, v = map(wide, (q, k, v))
    (b, t, n, h), s = q.shape, k.shape[1]
    k, v = (np.repeat(a, n // a.shape[2], axis=2) for a in (k, v))
    scale = options.get("scale")
    scores = np.einsum("btnh,bsnh->bnts", q, k) * (h**-0.5 if scale is None else wide(scale))
    if options.get("bias") is not None:
        scores = scores + wide(options["bias"])
    if cap := options.get("logits_soft_cap"):
        scores = cap * np.tanh(scores / cap)
    for mod in options.get("score_mods", ()):
        scores = modified(scores, mod)
    before, after = options.get("talking_heads") or (None, None)
    if before is not None:
        scores = np.einsum("bnts,nm->bmts", scores, wide(before))
    allowed = np.broadcast_to(allowed_in(options, b, t, s), scores.shape)
    top = np.where(allowed, scores.real, -np.inf).max(-1, keepdims=True)
    sink = options.get("sink")
    if sink is not None:
        sink = np.broadcast_to(wide(sink), top.shape)
        top = np.maximum(top, sink.real)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.where(allowed, np.exp(np.where(allowed, scores, top) - top), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    largest = np.abs(np.where(allowed, scores, 0)).max()
    with np.errstate(divide="ignore"):
        residual = (top + np.log(total))[..., 0].swapaxes(1, 2)
    probs = weights / np.where(total.real > 0, total, 1)
    if after is not None:
        probs = np.einsum("bmts,mn->bnts", probs, wide(after))
    return np.einsum("bnts,bsnv->btnv", probs, v), residual, largest


def wide(a):
    a = np.asarray(a)
    return a if np.iscomplexobj(a) else a.astype(np.float64)


def modified(scores, mod):
    query, key = np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])[None]
    if isinstance(mod, SoftCap):
        cap = wide(mod.cap).reshape(-1, 1, 1)
        return cap * np.tanh(scores / cap)
    if isinstance(mod, ALiBi):
        return scores + wide(mod.slopes)[:, None, None] * (key - query)
    if isinstance(mod, Mine):
        distance = (query - key + np.asarray(mod.shift)) ** mod.power
        turn = np.cos(wide(mod.weights["a"])[:, None, None] * distance)
        return scores * turn - wide(mod.weights["b"]) * query
    buckets = relative_buckets(
        jnp.asarray(key - query), num_buckets=mod.table.shape[1], max_distance=mod.max_distance,
        two_sided=mod.two_sided,
    )  # fmt: skip
    return scores + wide(mod.table)[:, np.asarray(buckets)]


def allowed_in(options, b, t, s):
    """Which keys each query attends to [B, 1 or N, T, S]."""
    row, key = np.arange(t)[:, None], np.arange(s)[None]
    allowed = np.ones((b, 1, t, s), bool)
    if options.get("is_causal"):
        allowed &= key <= row
    if (window := options.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed &= (row - left <= key) & (key <= row + right)
    for side, index in (("query", row), ("key_value", key)):
        if (lengths := options.get(f"{side}_seq_lengths")) is not None:
            allowed &= index < np.reshape(lengths, (b, 1, 1, 1))
    if (segments := options.get("segments")) is not None:
        of_q, of_k = segments if isinstance(segments, tuple) else (segments, segments)
        of_q, of_k = np.asarray(of_q)[:, None, :, None], np.asarray(of_k)[:, None, None]
        allowed &= (of_q == of_k) & (of_q != 0)
    mask = options.get("mask")
    mask = mask.matrix(t, s) if isinstance(mask, masks.Edges) else mask
    return allowed if mask is None else allowed & np.asarray(mask)
