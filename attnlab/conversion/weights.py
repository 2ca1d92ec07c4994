"""The weights of each exact map: (w, spec, reached) -> weights of `reached`, in NumPy float64.

A map that needs weights with a structure raises `Refused`, with the numbers that are missing. The
letters of the axes stand at the top of `attnlab/heads/old/layouts.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnlab.conversion.factors import (
    Refused,
    diagonalised,
    same,
    split,
    stacked_scores,
    stacked_values,
)
from attnlab.conversion.specs import ending
from attnlab.heads.old.absorb import block_diagonal
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec, weight_axes
from attnlab.norms import STARTS


def _with(spec: HeadSpec, w: Weights, change: Callable[[str, str, np.ndarray], Any]) -> Weights:
    """Every weight changed by (name, its axes, values) -> values."""
    return {name: change(name, axes, w[name]) for name, axes in weight_axes(spec)}


def pad(letters: str) -> Callable[[Weights, HeadSpec, HeadSpec], Weights]:
    """Zeros at the end of every axis of these letters."""

    def weights(w: Weights, spec: HeadSpec, reached: HeadSpec) -> Weights:
        new = {a: reached.sizes[a] - spec.sizes[a] for a in letters}
        return _with(spec, w, lambda name, axes, a: np.pad(a, [(0, new.get(x, 0)) for x in axes]))

    return weights


def repeat(w, spec, reached):
    times = reached.sizes["K"] // spec.sizes["K"]
    return _with(
        spec, w, lambda n, axes, a: np.repeat(a, times, axes.index("K")) if "K" in axes else a
    )


def share(w, spec, reached):
    k, wanted = spec.sizes["K"], reached.sizes["K"]

    def first(name, axes, a):
        if "K" not in axes:
            return a
        axis = axes.index("K")
        kept = np.take(a, range(0, k, k // wanted), axis)
        if not same(a, np.repeat(kept, k // wanted, axis)):
            raise Refused(f"the heads of {name} are not equal in {wanted} groups")
        return kept

    return _with(spec, w, first)


def identity_outer(w, spec, reached):
    s = spec.sizes
    return w | {f"{n}_outer": np.eye(s[a]) for n, a in zip("qkv", "DEW", strict=True)}


def identity_down(w, spec, reached):
    s = spec.sizes
    return w | {"down": np.eye(s["D"]).reshape(s["D"], s["N"], s["C"])}


def indicators(w, spec, reached):
    """The heads' q and k side by side; m_n picks the columns of head n."""
    s = spec.sizes
    flat = {n: w[n].reshape(*w[n].shape[:-2], -1) for n in ("q", "k", "q_bias", "k_bias") if n in w}
    return w | flat | {"m": np.repeat(np.eye(s["N"]), s["H"], axis=1)}


def repeat_keys(w, spec, reached):
    k, m = spec.sizes["K"], w["m"]
    made = {"q": w["q"][:, None] * m, "k": np.repeat(w["k"][:, None], k, axis=1)}
    if "q_bias" in w:
        made["q_bias"] = w["q_bias"] * m
    if "k_bias" in w:
        made["k_bias"] = np.repeat(w["k_bias"][None], k, axis=0)
    return {n: a for n, a in w.items() if n != "m"} | made


def identity_keys(w, spec, reached):
    s = spec.sizes
    keys = np.repeat(np.eye(s["E"])[:, None], s["K"], axis=1)
    return {n: a for n, a in w.items() if n != "qk"} | {"q": w["qk"], "k": keys}


def queries(left: np.ndarray, spec: HeadSpec) -> Weights:
    """Rows [N, D (+1), H] -> q and its bias."""
    q = {"q": left[:, : spec.width].swapaxes(0, 1)}
    return q | ({"q_bias": left[:, spec.width]} if "q" in spec.biases else {})


def factor_keys(w, spec, reached):
    """All heads of a key head at once: their stacked rows have the key head's columns."""
    s, h = spec.sizes, reached.sizes["H"]
    rows = stacked_scores(w).reshape(s["K"], -1, s["E"])
    left, right = split(rows, h, "the score matrix of key head")
    made = queries(left.reshape(s["N"], -1, h), spec) | {"k": np.moveaxis(right, 2, 0)}
    return {n: a for n, a in w.items() if n not in ("qk", "q_bias")} | made


def diagonalise(w, spec, reached):
    q, m, k = diagonalised(stacked_scores(w), reached.sizes["R"])
    made = {"q": q[: spec.width], "k": k, "m": m}
    made |= {"q_bias": q[-1]} if "q_bias" in w else {}
    return {n: a for n, a in w.items() if n not in ("qk", "q_bias")} | made


def interleave(w, spec, reached):
    """Column i of each half -> column i H'/H: rotary angles base^(-2i/H) that are the same."""
    h, new = spec.sizes["H"], reached.sizes["H"]

    def place(name, axes, a):
        if "H" not in axes:
            return a
        wide = np.zeros((*a.shape[:-1], 2, h // 2, new // h))
        wide[..., 0] = a.reshape(wide.shape[:-1])
        return wide.reshape(*a.shape[:-1], new)

    return _with(spec, w, place)


def values(left: np.ndarray, right: np.ndarray, spec: HeadSpec) -> Weights:
    """left [K, W (+1), V], right [K, V, N/K O] -> v, its bias, o."""
    s, (k, _, v) = spec.sizes, left.shape
    o = right.reshape(k, v, s["N"] // k, s["O"]).swapaxes(1, 2).reshape(s["N"], v, s["O"])
    made = {"v": left[:, : s["W"]].swapaxes(0, 1), "o": o}
    return made | ({"v_bias": left[:, s["W"]]} if "v" in spec.biases else {})


def factor_values(w, spec, reached):
    k = reached.sizes["K"]
    both = stacked_values(w)
    side_by_side = both.reshape(k, -1, *both.shape[1:]).swapaxes(1, 2)
    left, right = split(
        side_by_side.reshape(k, both.shape[1], -1), reached.sizes["V"], "the value map of head"
    )
    rest = {n: a for n, a in w.items() if n not in ("vo", "v_bias")}
    return rest | values(left, right, spec)


def identity_values(w, spec, reached):
    both, k = stacked_values(w), reached.sizes["K"]
    v = np.repeat(np.eye(both.shape[1])[None], k, axis=0)
    made = {"v": v[:, : spec.sizes["W"]].swapaxes(0, 1), "o": both}
    made |= {"v_bias": v[:, -1]} if "v" in spec.biases else {}
    return {n: a for n, a in w.items() if n not in ("vo", "v_bias")} | made


def share_down(w, spec, reached):
    """[q_n k_n v_n] = down_n times what is left, if its rank is at most C."""
    s = spec.sizes
    both = np.concatenate([w["q"], w["k"], w["v"]], axis=2).swapaxes(0, 1)
    left, right = split(both, s["C"], "[q k v] of head")
    q, k, v = np.split(right, [s["H"], 2 * s["H"]], axis=2)
    return w | {"down": left.swapaxes(0, 1), "q": q, "k": k, "v": v}


def cut(w, spec, reached):
    """The diagonal blocks, if all else is zero."""
    s, blocks = spec.sizes, {}
    for name in "qkv":
        parts = w[name].reshape(s["N"], s["C"], s["N"], -1)
        blocks[name] = np.stack([parts[n, :, n] for n in range(s["N"])])
        if not same(w[name], np.asarray(block_diagonal(jnp.asarray(blocks[name])))):
            raise Refused(f"a head of {name} reads more than its own chunk")
    return w | blocks


TIED = ("q", "k", "v", "q_bias", "k_bias", "v_bias")


def tie(w, spec, reached):
    for name in TIED:
        if name in w and not same(w[name], np.broadcast_to(w[name][:1], w[name].shape)):
            raise Refused(f"the heads of {name} differ")
    return {n: a[0] if n in TIED else a for n, a in w.items()}


def bias_row(w: Weights, name: str) -> np.ndarray:
    """A chunk's matrices with their bias as one more row: [N, C (+1), H]."""
    bias = f"{name}_bias"
    return np.concatenate([w[name]] + ([w[bias][:, None]] if bias in w else []), axis=1)


def tie_products(w, spec, reached):
    """Heads that differ in q and k but not in q k^T; values that have a basis in common, or are
    equal where there is no output map.
    """
    scores = bias_row(w, "q") @ w["k"].swapaxes(1, 2)
    if not same(scores, np.broadcast_to(scores[:1], scores.shape)):
        raise Refused("the scores of the heads differ")
    first = {n: a[0] if n in TIED else a for n, a in w.items()}
    rows = bias_row(w, "v")
    if not spec.output:
        if not same(rows, np.broadcast_to(rows[:1], rows.shape)):
            raise Refused("the values of the heads differ")
        return first
    maps = (rows @ w["o"]).swapaxes(0, 1)
    left, right = split(
        maps.reshape(1, rows.shape[1], -1), reached.sizes["V"], "the value map of all heads,"
    )
    c, v = spec.sizes["C"], reached.sizes["V"]
    made = {"v": left[0, :c], "o": right.reshape(v, spec.num_heads, -1).swapaxes(0, 1)}
    made |= {"v_bias": left[0, c]} if "v_bias" in w else {}
    return first | made


def drop_output(w, spec, reached):
    """o_n writes to its own chunk of the output alone, so v can do it."""
    s, new = spec.sizes, reached.sizes["V"]
    parts = w["o"].reshape(s["N"], s["V"], s["N"], new)
    blocks = np.stack([parts[n, :, n] for n in range(s["N"])])
    if not same(parts, parts * np.eye(s["N"])[:, None, :, None]):
        raise Refused("a head's o writes to more than its own chunk of the output")
    names = ending(spec, "V", "store", "read")
    axes = spec.maps[names[0]].axes
    groups = s["K"] if "K" in axes else s["N"] if "N" in axes else 1
    blocks = blocks.reshape(groups, -1, s["V"], new)
    if not same(blocks, np.broadcast_to(blocks[:, :1], blocks.shape)):
        raise Refused("heads with the same values have different o")
    head = "N" if "N" in axes else "K"
    made = {}
    for name in names:
        axes = spec.maps[name].axes
        one = blocks[0, 0] if head not in axes else blocks[:, 0]
        by = f"{head}VU" if head in axes else "VU"
        made[name] = np.einsum(f"{axes},{by}->{axes.replace('V', 'U')}", w[name], one)
    return {n: a for n, a in w.items() if n != "o"} | made


def drop_zero_bias(w, spec, reached):
    for name in set(spec.maps) - set(reached.maps):
        largest = np.max(np.abs(w[name]))
        if largest > 0:
            raise Refused(f"the bias {name} is not zero: up to {largest:.2g}")
    return keep(w, spec, reached)


def keep(w, spec, reached):
    return {name: w[name] for name in reached.shapes}


def add_zeros(w, spec, reached):
    return {name: w.get(name, np.zeros(shape)) for name, shape in reached.shapes.items()}


def rescale(w, spec, reached):
    """The ratio of the scales goes into q, or into its norm's scale and bias where q is normalised.

    Some norms count their scale from 1."""
    made = ending(spec, LAYOUTS[spec.layout].scores, "query")
    norms = [n for n in made if n.endswith(("_norm", "_norm_bias"))]
    linear = [n for n in made if spec.maps[n].start in (None, 0)]
    ratio = spec.scale / reached.scale
    new = {n: a * ratio if n in (norms or linear) else a for n, a in w.items()}
    if norms:
        new["q_norm"] = new["q_norm"] + (ratio - 1) * (1 - STARTS[spec.qk_norm])
    return new


def identity_output(w, spec, reached):
    s = spec.sizes
    return w | {"o": np.eye(s["O"]).reshape(s["N"], s["V"], s["O"])}


def expand_latent(w, spec, reached):
    return w | {"k": w["k"].transpose(2, 0, 1), "v": w["v"].transpose(1, 0, 2)}


def multiply_latent(w, spec, reached):
    """[q ; q_turned] of x, [k of the latent ; k_turned] of y; one key head per head."""
    s = spec.sizes
    q = np.concatenate([w["q"], w["q_turned"]], axis=-1)
    turned = np.repeat(w["k_turned"][:, None], s["N"], axis=1)
    made = {
        "q": np.tensordot(w["q_down"], q, 1) if "q_down" in w else q,
        "k": np.concatenate([np.tensordot(w["kv_down"], w["k"], 1), turned], axis=-1),
        "v": np.tensordot(w["kv_down"], w["v"], 1),
    }
    return keep(w | made, spec, reached)


def _latent(w: Weights, down: np.ndarray, up: np.ndarray, spec: HeadSpec, reached: Any) -> Weights:
    """down [D, M] and up [M, K (H + V)] as the maps of a latent; nothing has positions."""
    s, (m, _) = spec.sizes, up.shape
    k, v = (
        np.repeat(a.reshape(m, s["K"], -1), s["N"] // s["K"], axis=1)
        for a in np.split(up, [s["K"] * s["H"]], axis=1)
    )
    none = {n: np.zeros(reached.shapes[n]) for n in ("q_turned", "k_turned")}
    return w | none | {"kv_down": down, "k": k, "v": v}


def _beside(w: Weights) -> np.ndarray:
    """Keys and values of all heads: [D, K (H + V)]."""
    return np.concatenate([w[n].reshape(len(w[n]), -1) for n in "kv"], axis=1)


def side_by_side(w, spec, reached):
    both = _beside(w)
    return _latent(w, both, np.eye(both.shape[1]), spec, reached)


def factor_latent(w, spec, reached):
    left, right = split(_beside(w)[None], reached.sizes["M"], "[k v] of all heads,")
    return _latent(w, left[0], right[0], spec, reached)


def factor_queries(w, spec, reached):
    q = w["q"]
    left, right = split(q.reshape(1, len(q), -1), reached.sizes["Q"], "q of all heads,")
    return w | {"q_down": left[0], "q": right[0].reshape(-1, *q.shape[1:])}


def tie_states(w, spec, reached):
    h = reached.sizes["H"]
    key, turned = w["k"][..., :h], w["k"][..., h:]
    if not same(key, w["v"][..., :h]):
        raise Refused(f"the first {h} numbers of keys and values differ")
    if not same(turned, np.broadcast_to(turned[:, :1], turned.shape)):
        raise Refused(f"the keys of the heads differ beyond their first {h} numbers")
    made = {"q": w["q"][..., :h], "q_turned": w["q"][..., h:], "kv": w["v"]}
    return keep(w | made | {"k_turned": turned[:, 0]}, spec, reached)


def constant_factors(w, spec, reached):
    """q_n = 1/X sum_r alpha_rn (x Q_r) with alpha_rn = X where n is r; k and v by their groups."""
    s, made = spec.sizes, dict(w)
    for name in "qkv":
        count = w[name].shape[1]
        one = np.repeat(np.eye(count), s["N"] // count, axis=1)
        zero = np.zeros(reached.shapes[f"{name}_heads"])
        made |= {f"{name}_heads": zero, f"{name}_heads_bias": count * one}
    return made


def mix_constants(w, spec, reached):
    made = {}
    for name in "qkv":
        largest = np.max(np.abs(w[f"{name}_heads"]))
        if largest > 0:
            raise Refused(f"the factors {name}_heads look at the text: up to {largest:.2g}")
        mean = w[f"{name}_heads_bias"] / w[name].shape[1]
        made[name] = np.einsum("DRH,RN->DNH", w[name], mean)
    return keep(w | made, spec, reached)


def pad_ranks(w, spec, reached):
    """Zeros for the new factors; those of the heads grow, as the mean is over more."""
    new, old = reached.sizes, spec.sizes
    padded = pad("XYZ")(w, spec, reached)

    def grown(name, axes, a):
        rank = next((x for x in axes if x in "XYZ" and "N" in axes), None)
        return padded[name] * (new[rank] / old[rank] if rank else 1)

    return _with(spec, w, grown)
