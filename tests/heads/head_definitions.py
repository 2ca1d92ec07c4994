"""Every layout by its definition, head by head in NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import outside_layouts as outside
from definition import attention

from attnlab import heads
from attnlab.attention import score_mods
from attnlab.heads import ExtraKeys, Gate, Sink, SoftCap


class Head(NamedTuple):
    """One head before its output projection."""

    maps: dict[int, tuple[np.ndarray, np.ndarray]]
    """Index of a softmax distribution -> its q [B, T, H] and k [B, S, H]"""
    v: np.ndarray
    combine: Callable[..., np.ndarray] = lambda only: only


def by_hand(layout, params, x, y, z, *, layer=0, mask=None, rotary=None, bias=None, sink=None):
    """The output [B, T, O] in float64.

    Args:
      mask: [1 or N, T, S], True where a query of a head may attend to a key; None allows all.
      rotary: angles of queries and of keys; the last `rotary_size` columns of q and k are rotated.
      bias: [N, T, S], added to the scores of each head.
      sink: [N, 1, 1], if the layout has none.
    """
    w = {name: np.asarray(a, np.float64) for name, a in params.items()}
    w |= tied_weights(layout, w)
    x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
    define = DEFINITIONS[layout.name]
    given = [define(w, n, x, y, z, layout, layer) for n in range(layout.num_heads)]
    maps = {i: (*pair, h.v, n) for n, h in enumerate(given) for i, pair in h.maps.items()}
    *arrays, owners = zip(*(maps[i] for i in range(len(maps))), strict=True)
    options = {"mask": mask, "bias": bias, "sink": sink}
    for name, a in options.items():
        options[name] = a[list(owners)] if a is not None and len(a) > 1 else a
    outputs = of_maps(layout, w, [np.stack(a, axis=2) for a in arrays], rotary, options)
    total = []
    for n, head in enumerate(given):
        out = head.combine(*(outputs[:, :, i] for i in head.maps))
        out = gated(layout, w, n, x, out)
        total.append(out @ w["o"][n] if "o" in w else out)
    out = sum(total) if layout.output_projection else np.concatenate(total, axis=-1)
    return out + w.get("o_bias", 0)


def tied_weights(layout, w):
    sources = {"kv": {"v": "k"}, "qk": {"k": "q"}, "qkv": {"k": "q", "v": "q"}}
    return {
        f"{ours}{end}": w[f"{theirs}{end}"]
        for ours, theirs in sources.get(layout.tie, {}).items()
        for end in ("", "_outer", "_bias")
        if f"{theirs}{end}" in w
    }


def of_maps(layout, w, arrays, rotary, options):
    """What each softmax distribution makes of its values [B, T, maps, V]."""
    q, k, v = arrays
    extras = {type(extra): extra for extra in layout.extras}
    if layout.qk_norm is not None:
        q = norm(q, w["q_norm"], layout.qk_norm.kind) + w.get("q_norm_bias", 0)
        k = norm(k, w["k_norm"], layout.qk_norm.kind) + w.get("k_norm_bias", 0)
    if rotary is not None:
        start = q.shape[-1] - layout.rotary_size
        q, k = (rotated(a, angles, start) for a, angles in zip((q, k), rotary, strict=True))
    if ExtraKeys in extras:
        k, v = with_rows(k, w["extra_k"]), with_rows(v, w["extra_v"])
        if options["mask"] is not None:
            more = [(0, 0), (0, 0), (0, extras[ExtraKeys].count)]
            options["mask"] = np.pad(options["mask"], more, constant_values=True)
    options["scale"] = layout.scale
    options["talking_heads"] = w.get("mix_scores"), w.get("mix_probs")
    if Sink in extras:
        options["sink"] = w.get("sink", np.zeros(1))[:, None, None]
    if SoftCap in extras:
        options["logits_soft_cap"] = extras[SoftCap].cap
    if "log_soft_cap" in w:
        options["score_mods"] = [score_mods.SoftCap(np.exp(w["log_soft_cap"]))]
    return attention(q, k, v, options)[0]


def gated(layout, w, n, x, head):
    """The head after gates and routers."""
    for extra in layout.extras:
        if isinstance(extra, Gate):
            g = w["gate"][:, n] if extra.by == "element" else w["head_gate"][:, n, None]
            head = head * sigmoid(x @ g)
        if isinstance(extra, outside.HeadScale):
            head = head * w["head_scale"][n]
        if isinstance(extra, heads.MixtureOfHeads):
            groups = 2 * softmax(x @ w["router_groups"])
            if n < extra.shared:
                gate = groups[..., 0] * extra.shared * softmax(x @ w["router_shared"])[..., n]
            else:
                routed = routed_gates(softmax(x @ w["router"]), extra.top)
                gate = groups[..., 1] * routed[..., n - extra.shared]
            head = head * gate[..., None]
    return head


def routed_gates(probs, top):
    """`top` times the `top` largest probabilities, normalized; 0 for the others."""
    used = probs >= np.sort(probs, axis=-1)[..., -top, None]
    return top * probs * used / (probs * used).sum(-1, keepdims=True)


def softmax(a):
    p = np.exp(a - a.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def norm(a, scale, kind="rms", eps=1e-6):
    a = a - a.mean(-1, keepdims=True) if kind == "layer" else a
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * scale


def rotated(a, angles, start):
    """The columns from `start` as complex numbers (i, i + half), times e^(i angle)."""
    half = angles.shape[-1]
    before, one, two, rest = np.split(a, [start, start + half, start + 2 * half], axis=-1)
    turned = (one + 1j * two) * np.exp(1j * np.asarray(angles))[:, None]
    return np.concatenate([before, turned.real, turned.imag, rest], axis=-1)


def with_rows(a, rows):
    """Keys or values [B, S, maps, H] and those that are the same for every text."""
    rows = np.repeat(rows, a.shape[2] // rows.shape[1], axis=1)
    return np.concatenate([a, np.broadcast_to(rows, (len(a), *rows.shape))], axis=1)


def columns(a, b):
    return np.concatenate([a, b], axis=-1)


# q, k and v of head n -----------------------------------------------------------------------------


def group(w, n, layout, name="k"):
    """The key or value head of head n."""
    return n // (layout.num_heads // w[name].shape[1])


def bias(w, name, *head):
    return w[f"{name}_bias"][head] if f"{name}_bias" in w else 0


def project(w, name, a, *head):
    """By this head of a weight [D, *heads, H]."""
    return a @ w[name][(slice(None), *head)] + bias(w, name, *head)


def standard(w, n, x, y, z, layout, layer):
    g = group(w, n, layout)
    return Head({n: (project(w, "q", x, n), project(w, "k", y, g))}, project(w, "v", z, g))


def narrow_tied(w, n, x, y, z, layout, layer):
    x, y, z = (np.split(a, layout.num_heads, axis=-1)[n] for a in (x, y, z))
    return Head({n: (project(w, "q", x), project(w, "k", y))}, project(w, "v", z))


def narrow(w, n, x, y, z, layout, layer):
    own = {name: a[n] for name, a in w.items() if name.removesuffix("_bias") in ("q", "k", "v")}
    return narrow_tied(own, n, x, y, z, layout, layer)


def alt(w, n, x, y, z, layout, layer):
    mixed = (a @ w["mix"].reshape(a.shape[-1], -1) for a in (x, y, z))
    return narrow(w, n, *mixed, layout, layer)


def two_stage(w, n, x, y, z, layout, layer):
    return standard(w, n, x @ w["q_outer"], y @ w["k_outer"], z @ w["v_outer"], layout, layer)


def collaborative(w, n, x, y, z, layout, layer):
    v = project(w, "v", z, group(w, n, layout, "v"))
    return Head({n: (project(w, "q", x) * w["mixing"][n], project(w, "k", y))}, v)


def bilinear(w, n, x, y, z, layout, layer):
    v = project(w, "v", z, group(w, n, layout, "v"))
    return Head({n: (x @ w["qk"][:, n] + bias(w, "q", n), y)}, v)


def absorbed(w, n, x, y, z, layout, layer):
    v = z @ w["vo"][n] + bias(w, "v", n)
    return Head({n: (x @ w["qk"][:, n] + bias(w, "q", n), y)}, v)


def compressed(w, name, a, layout):
    scale = w.get(f"{name}_norm")
    return a @ w[name] if scale is None else norm(a @ w[name], scale, eps=layout.norm_eps)


def latent(w, n, x, y, z, layout, layer):
    u = compressed(w, "q_down", x, layout) if "q_down" in w else x
    q = columns(u @ w["q"][:, n], u @ w["q_rotary"][:, n])
    k = columns(compressed(w, "kv_down", y, layout) @ w["k"][:, n], y @ w["k_rotary"])
    return Head({n: (q, k)}, compressed(w, "kv_down", z, layout) @ w["v"][:, n])


def latent_absorbed(w, n, x, y, z, layout, layer):
    u = compressed(w, "q_down", x, layout) if "q_down" in w else x
    q = columns(u @ w["q"][:, n] @ w["k"][n], u @ w["q_rotary"][:, n])
    k = columns(compressed(w, "kv_down", y, layout), y @ w["k_rotary"])
    return Head({n: (q, k)}, compressed(w, "kv_down", z, layout) @ w["v"][n])


def low_rank_query(w, n, x, y, z, layout, layer):
    return standard(w, n, compressed(w, "q_down", x, layout), y, z, layout, layer)


def tensor_product(w, n, x, y, z, layout, layer):
    def factored(name, a):
        """The mean over ranks of the number of head n times a vector."""
        numbers = project(w, f"{name}_heads", a, slice(None), n)
        return (
            np.einsum("btr,btrh->bth", numbers, np.einsum("btd,drh->btrh", a, w[name]))
            / (numbers.shape[-1])
        )

    return Head({n: (factored("q", x), factored("k", y))}, factored("v", z))


def grouped_tied(w, n, x, y, z, layout, layer):
    g = group(w, n, layout, "kv")
    q = columns(x @ w["q"][:, n], x @ w["q_rotary"][:, n])
    k = columns(y @ w["kv"][:, g, : layout.size("head_dim")], y @ w["k_rotary"])
    return Head({n: (q, k)}, z @ w["kv"][:, g])


def differential(w, n, x, y, z, layout, layer):
    per = layout.num_heads // w["k"].shape[1]
    g, place = divmod(n, per)
    start = 0.8 - 0.6 * np.exp(-0.3 * layer)
    a, b = w["lambda_q"], w["lambda_k"]
    factor = np.exp(a[0] @ b[0]) - np.exp(a[1] @ b[1]) + start
    maps = {
        g * 2 * per + i * per + place: (project(w, "q", x, g, i, place), project(w, "k", y, g, i))
        for i in (0, 1)
    }

    def combine(one, two):
        return (1 - start) * norm(one - factor * two, w["head_norm"], eps=1e-5)

    return Head(maps, project(w, "v", z, g), combine)


def gated_differential(w, n, x, y, z, layout, layer):
    g = group(w, n, layout)
    maps = {2 * n + i: (x @ w["q"][:, n, i], project(w, "k", y, g)) for i in (0, 1)}
    factor = sigmoid(x @ w["lambda"][:, n, None])
    return Head(maps, project(w, "v", z, g), lambda one, two: one - factor * two)


DEFINITIONS = {
    define.__name__: define
    for define in (
        standard, narrow, narrow_tied, alt, two_stage, collaborative, bilinear, absorbed, latent,
        latent_absorbed, low_rank_query, tensor_product, grouped_tied, differential,
        gated_differential,
    )
} | {"wide": standard}  # fmt: skip
