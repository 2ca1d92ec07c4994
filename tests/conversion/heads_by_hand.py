"""Specs of every layout, weights, and the function of both: head by head in NumPy.

Nothing of the code under test computes what these compare.
"""

import numpy as np
from contract import DEFINITIONS, gated

from attnlab import LAYOUTS, HeadSpec
from attnlab.conversion.measure import Situation
from attnlab.conversion.specs import settled
from attnlab.heads.old.spec import FIELDS


def spec_of(layout, **fields):
    """Every axis another size; head widths even, for rotary positions."""
    letters, sizes = LAYOUTS[layout].letters, dict(num_kv_heads=2, key_width=10)
    sizes |= dict(head_dim=4, value_dim=5, value_width=9, shared_dim=8, latent_dim=7)
    sizes |= dict(query_latent_dim=3, rotary_dim=2, query_rank=5, key_rank=2, value_rank=3)
    kept = {n: sizes[n] for a, n in FIELDS.items() if a in letters and n in sizes}
    biases = "".join(a for a in "qkvoa" if a in HeadSpec.bias_letters(layout))
    wanted = dict(out_width=11, biases=biases) | kept | fields
    return settled(HeadSpec(layout, width=12, num_heads=6, **wanted))


def draw(spec, seed=0, size=2.0):
    """Weights of standard deviation size / sqrt(fan): biases too."""
    rng, w = np.random.default_rng(seed), {}
    for name, one in spec.maps.items():
        w[name] = rng.normal(size=spec.shapes[name]) * size / np.sqrt(one.fan(spec.sizes))
    return w


def inputs_of(spec, t=5, s=7):
    rng, sizes = np.random.default_rng(9), spec.sizes
    return [rng.normal(size=(2, n, sizes[a])) for n, a in ((t, "D"), (s, "E"), (s, "W"))]


def turn(a):
    """Rotary positions: the pairs (i, i + H/2) by position * 10000^(-2i/H)."""
    half = a.shape[-1] // 2
    angles = np.arange(a.shape[1])[:, None] * 1e4 ** (-np.arange(half) / half)
    one, two = a[..., :half], a[..., half:]
    return np.concatenate(
        [one * np.cos(angles) - two * np.sin(angles), two * np.cos(angles) + one * np.sin(angles)],
        axis=-1,
    )


def norm(a, kind, scale, bias=0.0, eps=1e-6):
    a = a - a.mean(-1, keepdims=True) if kind == "layer" else a
    scale = 1 + scale if kind == "rms_plus_one" else scale
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * scale + bias


def function(w, spec, inputs, situation=Situation(), mask=None):  # noqa: B008
    """Head by head: projections, norm, rotary, extra keys, scale, cap, softmax with its sink (zeros
    in empty rows), gate, o."""
    s, heads, tied = spec.sizes | {"eps": spec.norm_eps}, [], {}
    for ours, theirs in spec.tied.items():
        ends = [end for end in ("", "_outer", "_bias") if f"{theirs}{end}" in w]
        tied |= {f"{ours}{end}": w[f"{theirs}{end}"] for end in ends}
    w = w | tied if spec.output else w | tied | {"o": [np.eye(s["V"])] * s["N"]}
    for n in range(s["N"]):
        g = n // (s["N"] // s["K"])
        q, k, v, o = DEFINITIONS[spec.layout](w, n, g, *inputs, s)
        if spec.qk_norm:
            q, k = (
                norm(a, spec.qk_norm, w[f"{x}_norm"], w.get(f"{x}_norm_bias", 0), spec.norm_eps)
                for a, x in ((q, "q"), (k, "k"))
            )
        if situation.rotary:
            kept = q.shape[-1] - (spec.turned or q.shape[-1])
            q, k = (np.concatenate([a[..., :kept], turn(a[..., kept:])], -1) for a in (q, k))
        allowed = np.ones((q.shape[1], k.shape[1])) if mask is None else mask
        if spec.extra_keys:
            k, v = (
                np.concatenate([a, np.repeat(w[f"extra_{x}"][None, :, g], len(a), axis=0)], axis=1)
                for a, x in ((k, "k"), (v, "v"))
            )
            allowed = np.pad(allowed, [(0, 0), (0, spec.extra_keys)], constant_values=1)
        scores = q @ k.swapaxes(1, 2) * (spec.scale or q.shape[-1] ** -0.5)
        if situation.logits_soft_cap:
            scores = situation.logits_soft_cap * np.tanh(scores / situation.logits_soft_cap)
        sink = w["sink"][n] if spec.sink == "learnt" else 0 if spec.sink else -np.inf
        top = np.maximum(scores.max(-1, keepdims=True), sink)
        p = np.exp(scores - top) * allowed
        total = p.sum(-1, keepdims=True) + np.exp(sink - top)
        p = p / np.where(total > 0, total, 1)
        heads.append(gated(w, n, inputs[0], p @ v) @ o)
    return (sum(heads) if spec.output else np.concatenate(heads, axis=-1)) + w.get("o_bias", 0)


def apart(one, two):
    return np.max(np.abs(one - two)) / np.max(np.abs(two))
