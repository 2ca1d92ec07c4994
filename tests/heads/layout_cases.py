"""What the tests of head layouts run over: CASES, and each one's definition by hand in NumPy.

A new layout needs a case in CASES and its q, k, v and W_O of head n in DEFINITIONS. The layout and
the extra of `outside_layouts.py` are not attnlab's and pass what the others pass.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import outside_layouts as outside

from attnlab import heads
from attnlab.heads import ExtraKeys, Gate, HeadNorm, Sink, SoftCap, TalkingHeads

QKVO = ("q", "k", "v", "o")
CROSS = {"key_width": 5, "value_width": 9}

# Every axis has its own size, so that a swapped one cannot pass. B = 2, T = 7, S = 8.
CASES: dict[str, heads.Layout] = {
    "standard": heads.Standard(width=12, num_heads=4, biases=QKVO, out_width=10),
    "free sizes": heads.Standard(
        width=11, num_heads=4, head_dim=5, value_dim=3, biases=("k", "v")
    ),
    "grouped": heads.Standard(width=12, num_heads=6, num_kv_heads=2, head_dim=5),
    "multi-query": heads.Standard(width=12, num_heads=3, num_kv_heads=1, biases=("q",)),
    "cross": heads.Standard(width=12, num_heads=3, **CROSS),
    "wide": heads.Wide(width=6, num_heads=5, biases=("q", "o")),
    "narrow": heads.Narrow(width=12, num_heads=3, value_dim=5, biases=QKVO),
    "tied": heads.NarrowTied(width=12, num_heads=3, value_dim=5, biases=QKVO, scale=0.3),
    "tied, no output projection": heads.NarrowTied(
        width=12, num_heads=3, value_dim=5, output_projection=False
    ),
    "alt": heads.Alt(width=12, num_heads=3, head_dim=6, value_dim=5, biases=QKVO),
    "two stages": heads.TwoStage(
        width=12, num_heads=6, num_kv_heads=2, biases=("k", "v"), **CROSS
    ),
    "collaborative": heads.Collaborative(
        width=12, num_heads=6, num_kv_heads=2, head_dim=8, value_dim=3, biases=QKVO, out_width=10,
        **CROSS,
    ),
    "bilinear": heads.Bilinear(
        width=12, num_heads=6, num_kv_heads=2, value_dim=3, biases=("q", "v", "o"), out_width=10,
        **CROSS,
    ),
    "absorbed": heads.Absorbed(
        width=12, num_heads=3, biases=("q", "v", "o"), out_width=10, **CROSS
    ),
    "absorbed, no bias": heads.Absorbed(width=7, num_heads=3),
    "layer norm of q and k": heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=6, biases=("q",),
        qk_norm=HeadNorm("layer", bias=True),
    ),
    "rms norm of q and k": heads.Narrow(width=12, num_heads=3, qk_norm=HeadNorm("rms")),
    "latent": heads.Latent(
        width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7, rotary_dim=2, biases=("o",),
        out_width=10,
    ),
    "latent for queries too": heads.Latent(
        width=12, num_heads=3, head_dim=5, value_dim=3, latent_dim=7, rotary_dim=4,
        query_latent_dim=6, norm_eps=1e-2,
    ),
    "absorbed latent": heads.LatentAbsorbed(
        width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7, rotary_dim=2,
        query_latent_dim=6, biases=("o",), out_width=10,
    ),
    "latent without norms": heads.Latent(
        width=12, num_heads=3, head_dim=4, value_dim=5, latent_dim=7, rotary_dim=2,
        query_latent_dim=6, latent_norm=False,
    ),
    "low-rank queries": heads.LowRankQuery(
        width=12, num_heads=6, num_kv_heads=2, query_latent_dim=7, head_dim=4, value_dim=3,
        biases=QKVO, out_width=10, norm_eps=1e-2, **CROSS,
    ),
    "low-rank queries without a norm": heads.LowRankQuery(
        width=12, num_heads=3, head_dim=8, latent_norm=False, qk_norm=HeadNorm("rms")
    ),
    "tensor product": heads.TensorProduct(
        width=12, num_heads=3, head_dim=4, value_dim=7, query_rank=6, key_rank=2, value_rank=8,
        biases=("factors", "o"), out_width=10, **CROSS,
    ),
    "tensor product, one text": heads.TensorProduct(width=12, num_heads=3, key_rank=5),
    "grouped and tied": heads.GroupedTied(
        width=12, num_heads=6, num_kv_heads=2, head_dim=3, value_dim=5, rotary_dim=4,
        biases=("o",), out_width=10,
    ),
    "tied to all of the value": heads.GroupedTied(
        width=12, num_heads=3, head_dim=5, value_dim=5, rotary_dim=2
    ),
    "keys are values": heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=6, biases=("q", "k"), tie="kv"
    ),
    "one projection for all": heads.TwoStage(
        width=12, num_heads=3, head_dim=6, biases=("q", "o"), tie="qkv", qk_norm=HeadNorm("rms")
    ),
    "tied low-rank queries": heads.LowRankQuery(width=12, num_heads=3, tie="kv"),
    "tied slices": heads.Narrow(width=12, num_heads=3, tie="qk", biases=("q",)),
    "extra keys": heads.Narrow(
        width=12, num_heads=3, head_dim=2, value_dim=5, biases=("k", "o"),
        extras=(ExtraKeys(4), Gate("element"), Sink()),
    ),
    "extra keys, grouped": heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, extras=(SoftCap(2.0), ExtraKeys(3))
    ),
    "gated heads": heads.Absorbed(
        width=12, num_heads=3, biases=("q", "v", "o"), extras=(Gate(), Sink())
    ),
    "gated elements": heads.TensorProduct(
        width=12, num_heads=3, head_dim=4, value_dim=7, biases=("factors", "o"),
        extras=(Gate("element"), Sink(learnt=False)),
    ),
    "soft cap": heads.Latent(width=12, num_heads=3, biases=("o",), extras=(SoftCap(3.0),)),
    "talking heads": heads.Standard(
        width=12, num_heads=3, num_kv_heads=1, biases=QKVO, extras=(TalkingHeads(), Gate())
    ),
    "talking absorbed heads": heads.Absorbed(
        width=7, num_heads=3, biases=("v",), extras=(TalkingHeads(),)
    ),
    "differential": heads.Differential(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, value_dim=3, biases=QKVO, out_width=10,
        **CROSS,
    ),
    "differential with extras": heads.Differential(
        width=16, num_heads=4, num_kv_heads=2, qk_norm=HeadNorm("rms"),
        extras=(Gate("element"), Sink(), heads.MixtureOfHeads(top=1)),
    ),
    "mixture of heads": heads.Standard(
        width=12, num_heads=6, head_dim=5, extras=(heads.MixtureOfHeads(top=3, shared=2),)
    ),
    "learnt soft cap": heads.Standard(
        width=12, num_heads=6, num_kv_heads=2, head_dim=4, biases=("k",),
        extras=(heads.LearntSoftCap(),),
    ),
    "differential with a learnt soft cap": heads.Differential(
        width=16, num_heads=4, num_kv_heads=2, extras=(heads.LearntSoftCap(), Sink())
    ),
    "mixture of wide heads": heads.Wide(
        width=6, num_heads=5, extras=(heads.MixtureOfHeads(),)
    ),
    "outside": outside.GatedDifferential(
        width=12, num_heads=4, num_kv_heads=2, head_dim=4, value_dim=3, out_width=10, **CROSS,
        biases=("k", "v"), qk_norm=HeadNorm("rms"), extras=(outside.HeadScale(), Sink()),
    ),
    "outside extra": heads.Narrow(width=12, num_heads=2, extras=(outside.HeadScale(2.0), Gate())),
}  # fmt: skip
# The first case of every class of layouts.
FIRST = list({type(layout): name for name, layout in reversed(CASES.items())}.values())
# Queries, keys and values may be of one text.
SELF = [name for name, layout in CASES.items() if len(set(layout.input_widths)) == 1]


class Arrays(NamedTuple):
    params: dict
    x: jnp.ndarray
    y: jnp.ndarray
    z: jnp.ndarray


def make(layout: heads.Layout, dtype=jnp.float32, batch=2, length=7, seed=0) -> Arrays:
    """Large random weights (biases too) and inputs."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(2 * rng.normal(size=shape), dtype)

    params = {name: draw(*shape) for name, shape in heads.weight_shapes(layout).items()}
    d, e, w = layout.input_widths
    return Arrays(
        params, draw(batch, length, d), draw(batch, length + 1, e), draw(batch, length + 1, w)
    )


# The definition, head by head ---------------------------------------------------------------------


class Head(NamedTuple):
    """One head by its definition."""

    maps: dict[int, tuple[np.ndarray, np.ndarray]]
    """Index of a softmax distribution -> its q [B, T, H] and k [B, S, H]"""
    v: np.ndarray
    o: np.ndarray
    combine: Callable[..., np.ndarray] = lambda only: only


def by_hand(layout, params, x, y, z, *, layer=0, allowed=None, rotary=None, bias=0):
    """The output [B, T, O] in float64.

    Args:
      bias: [N, T, S], added to the scores of each head.
      allowed: [T, S], True where a query may attend to a key; None allows all.
      rotary: angles of queries and of keys; the last `rotary_size` columns of q and k are rotated.
    """
    w = {name: np.asarray(a, np.float64) for name, a in params.items()}
    w |= tied_weights(layout, w)
    x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
    given = [
        DEFINITIONS[layout.name](w, n, x, y, z, layout, layer) for n in range(layout.num_heads)
    ]
    extras = {type(extra): extra for extra in layout.extras}
    probs = all_probs(layout, w, given, extras, allowed, rotary, bias)
    total = []
    for n, head in enumerate(given):
        v = head.v
        if ExtraKeys in extras:
            v = with_rows(v, w["extra_v"][:, n // (layout.num_heads // w["extra_v"].shape[1])])
        out = head.combine(*(probs[index] @ v for index in head.maps))
        total.append(gates(layout, w, n, x, out, extras) @ head.o)
    out = sum(total) if layout.output_projection else np.concatenate(total, axis=-1)
    return out + w.get("o_bias", 0)


def tied_weights(layout, w):
    sources = {"kv": {"v": "k"}, "qk": {"k": "q"}, "qkv": {"k": "q", "v": "q"}}
    return {
        f"{ours}{end}": w[f"{theirs}{end}"]
        for ours, theirs in sources.get(getattr(layout, "tie", ""), {}).items()
        for end in ("", "_outer", "_bias")
        if f"{theirs}{end}" in w
    }


def all_probs(layout, w, given, extras, allowed, rotary, bias):
    """Softmax distributions by index."""
    bias = np.broadcast_to(bias, (len(given), *np.shape(bias)[1:]))
    pairs = {i: (*pair, bias[n]) for n, head in enumerate(given) for i, pair in head.maps.items()}
    scores = {}
    for index, (q, k, added) in sorted(pairs.items()):
        if getattr(layout, "qk_norm", None) is not None:
            q = norm(q, w["q_norm"], layout.qk_norm.kind) + w.get("q_norm_bias", 0)
            k = norm(k, w["k_norm"], layout.qk_norm.kind) + w.get("k_norm_bias", 0)
        if rotary is not None:
            start = q.shape[-1] - layout.rotary_size
            q, k = (rotated(a, angles, start) for a, angles in zip((q, k), rotary, strict=True))
        if ExtraKeys in extras:
            k = with_rows(k, w["extra_k"][:, index // (len(pairs) // w["extra_k"].shape[1])])
        scale = 1 / math.sqrt(q.shape[-1]) if layout.scale is None else layout.scale
        scores[index] = q @ k.swapaxes(1, 2) * scale
        if SoftCap in extras:
            cap = extras[SoftCap].cap
            scores[index] = cap * np.tanh(scores[index] / cap)
        if "log_soft_cap" in w:
            cap = np.exp(w["log_soft_cap"][index])
            scores[index] = cap * np.tanh(scores[index] / cap)
        scores[index] = scores[index] + added
    mixed = mix(scores, w.get("mix_scores"))
    probs = {}
    for index, s in mixed.items():
        sink = w["sink"][index] if "sink" in w else 0 if Sink in extras else -np.inf
        if allowed is not None:
            extra_keys = np.ones((len(allowed), s.shape[-1] - allowed.shape[1]), bool)
            s = np.where(columns(allowed, extra_keys), s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), sink)
        p = np.exp(s - top)
        probs[index] = p / (p.sum(-1, keepdims=True) + np.exp(sink - top))
    return mix(probs, w.get("mix_probs"))


def mix(maps, matrix):
    """The sum over n of map n times matrix[n, m], for every m."""
    if matrix is None:
        return maps
    return {m: sum(maps[n] * matrix[n, m] for n in maps) for m in range(matrix.shape[1])}


def gates(layout, w, n, x, head, extras):
    """What the head returns after gates and routers."""
    for extra in layout.extras:
        if isinstance(extra, Gate):
            g = w["gate"][:, n] if extra.by == "element" else w["head_gate"][:, n, None]
            head = head / (1 + np.exp(-(x @ g)))
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


def norm(a, scale, kind="rms", eps=1e-6):
    a = a - a.mean(-1, keepdims=True) if kind == "layer" else a
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * scale


def rotated(a, angles, start):
    """The columns from `start` as complex numbers (i, i + half), times e^(i angle)."""
    half = angles.shape[-1]
    before, one, two, rest = np.split(a, [start, start + half, start + 2 * half], axis=-1)
    turned = (one + 1j * two) * np.exp(1j * np.asarray(angles))
    return np.concatenate([before, turned.real, turned.imag, rest], axis=-1)


def with_rows(a, rows):
    return np.concatenate([a, np.broadcast_to(rows, (len(a), *rows.shape))], axis=1)


def columns(a, b):
    return np.concatenate([a, b], axis=-1)


def bias(w, name, *head):
    return w[f"{name}_bias"][head] if f"{name}_bias" in w else 0


def output(w, n, v):
    return w["o"][n] if "o" in w else np.eye(v.shape[-1])


def standard(w, n, x, y, z, layout, layer):
    g = n // (layout.num_heads // w["k"].shape[1])
    v = z @ w["v"][:, g] + bias(w, "v", g)
    q, k = x @ w["q"][:, n] + bias(w, "q", n), y @ w["k"][:, g] + bias(w, "k", g)
    return Head({n: (q, k)}, v, output(w, n, v))


def narrow(w, n, x, y, z, layout, layer):
    x, y, z = (slice_of(a, n, layout) for a in (x, y, z))
    v = z @ w["v"][n] + bias(w, "v", n)
    q, k = x @ w["q"][n] + bias(w, "q", n), y @ w["k"][n] + bias(w, "k", n)
    return Head({n: (q, k)}, v, output(w, n, v))


def slice_of(a, n, layout):
    width = a.shape[-1] // layout.num_heads
    return a[..., n * width : (n + 1) * width]


def narrow_tied(w, n, x, y, z, layout, layer):
    x, y, z = (slice_of(a, n, layout) for a in (x, y, z))
    v = z @ w["v"] + bias(w, "v")
    return Head({n: (x @ w["q"] + bias(w, "q"), y @ w["k"] + bias(w, "k"))}, v, output(w, n, v))


def alt(w, n, x, y, z, layout, layer):
    mixed = (a @ w["mix"].reshape(a.shape[-1], -1) for a in (x, y, z))
    return narrow(w, n, *mixed, layout, layer)


def two_stage(w, n, x, y, z, layout, layer):
    return standard(w, n, x @ w["q_outer"], y @ w["k_outer"], z @ w["v_outer"], layout, layer)


def collaborative(w, n, x, y, z, layout, layer):
    g = n // (layout.num_heads // w["v"].shape[1])
    q = (x @ w["q"] + bias(w, "q")) @ np.diag(w["mixing"][n])
    v = z @ w["v"][:, g] + bias(w, "v", g)
    return Head({n: (q, y @ w["k"] + bias(w, "k"))}, v, w["o"][n])


def bilinear(w, n, x, y, z, layout, layer):
    g = n // (layout.num_heads // w["v"].shape[1])
    v = z @ w["v"][:, g] + bias(w, "v", g)
    return Head({n: (x @ w["qk"][:, n] + bias(w, "q", n), y)}, v, w["o"][n])


def absorbed(w, n, x, y, z, layout, layer):
    v = z @ w["vo"][n] + bias(w, "v", n)
    return Head({n: (x @ w["qk"][:, n] + bias(w, "q", n), y)}, v, np.eye(v.shape[-1]))


def compressed(w, name, a, layout):
    scale = w.get(f"{name}_norm")
    return a @ w[name] if scale is None else norm(a @ w[name], scale, eps=layout.norm_eps)


def latent(w, n, x, y, z, layout, layer):
    u = compressed(w, "q_down", x, layout) if "q_down" in w else x
    q = columns(u @ w["q"][:, n], u @ w["q_rotary"][:, n])
    k = columns(compressed(w, "kv_down", y, layout) @ w["k"][:, n], y @ w["k_rotary"])
    return Head({n: (q, k)}, compressed(w, "kv_down", z, layout) @ w["v"][:, n], w["o"][n])


def latent_absorbed(w, n, x, y, z, layout, layer):
    u = compressed(w, "q_down", x, layout) if "q_down" in w else x
    q = columns(u @ w["q"][:, n] @ w["k"][n], u @ w["q_rotary"][:, n])
    k = columns(compressed(w, "kv_down", y, layout), y @ w["k_rotary"])
    return Head({n: (q, k)}, compressed(w, "kv_down", z, layout) @ w["v"][n], w["o"][n])


def low_rank_query(w, n, x, y, z, layout, layer):
    return standard(w, n, compressed(w, "q_down", x, layout), y, z, layout, layer)


def tensor_product(w, n, x, y, z, layout, layer):
    def factored(name, a):
        """One outer product for each rank, their mean, and of that matrix row n."""
        numbers = np.einsum("btd,drn->btrn", a, w[f"{name}_heads"]) + bias(w, f"{name}_heads")
        ranks = numbers.shape[2]
        parts = [numbers[:, :, r, :, None] * (a @ w[name][:, r])[:, :, None] for r in range(ranks)]
        return sum(parts)[:, :, n] / ranks

    return Head({n: (factored("q", x), factored("k", y))}, factored("v", z), w["o"][n])


def grouped_tied(w, n, x, y, z, layout, layer):
    g = n // (layout.num_heads // w["kv"].shape[1])
    q = columns(x @ w["q"][:, n], x @ w["q_rotary"][:, n])
    k = columns(y @ w["kv"][:, g, : layout.size("head_dim")], y @ w["k_rotary"])
    return Head({n: (q, k)}, z @ w["kv"][:, g], w["o"][n])


def differential(w, n, x, y, z, layout, layer):
    per = layout.num_heads // w["k"].shape[1]
    g, place = divmod(n, per)
    start = 0.8 - 0.6 * np.exp(-0.3 * layer)
    a, b = w["lambda_q"], w["lambda_k"]
    factor = np.exp(a[0] @ b[0]) - np.exp(a[1] @ b[1]) + start
    maps = {
        g * 2 * per + i * per + place: (
            x @ w["q"][:, g, i, place] + bias(w, "q", g, i, place),
            y @ w["k"][:, g, i] + bias(w, "k", g, i),
        )
        for i in (0, 1)
    }

    def combine(one, two):
        return (1 - start) * norm(one - factor * two, w["head_norm"], eps=1e-5)

    return Head(maps, z @ w["v"][:, g] + bias(w, "v", g), w["o"][n], combine)


def gated_differential(w, n, x, y, z, layout, layer):
    g = n // (layout.num_heads // w["k"].shape[1])
    k = y @ w["k"][:, g] + bias(w, "k", g)
    factor = 1 / (1 + np.exp(-x @ w["lambda"][:, n, None]))
    maps = {2 * n + i: (x @ w["q"][:, n, i], k) for i in (0, 1)}
    v = z @ w["v"][:, g] + bias(w, "v", g)
    return Head(maps, v, w["o"][n], lambda one, two: one - factor * two)


DEFINITIONS = {
    define.__name__: define
    for define in (
        standard, narrow, narrow_tied, alt, two_stage, collaborative, bilinear, absorbed, latent,
        latent_absorbed, low_rank_query, tensor_product, grouped_tied, differential,
        gated_differential,
    )
}  # fmt: skip
DEFINITIONS["wide"] = standard
