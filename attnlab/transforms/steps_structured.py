"""Conversion steps that need weights of some structure: a low rank, equal heads, blocks, zeros.

Rounding is judged in `matrices`. A wrong guess does no harm: it shows in the measured error.
"""

import numpy as np

from attnlab.heads import (
    Absorbed,
    Bilinear,
    Collaborative,
    GroupedTied,
    Latent,
    Layout,
    LowRankQuery,
    Narrow,
    NarrowTied,
    Standard,
    weight_shapes,
)
from attnlab.heads.standard import UNTIED, Separate
from attnlab.transforms.forms import Goal, axes, canonical, changed, kv_heads_of
from attnlab.transforms.matrices import ROUNDING, same, split, stacked_scores, stacked_values
from attnlab.transforms.measure import Floats, Weights
from attnlab.transforms.steps import Made, Step, finish


def drop_zero_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A bias of zeros."""
    spare = [b for b in layout.biases if b not in goal.untied.biases]
    kept = changed(layout, biases=tuple(b for b in layout.biases if b not in spare))
    if not spare or kept is None or any(np.any(w[n]) for n in set(w) - set(weight_shapes(kept))):
        return None
    return finish(w, kept)


def factor_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Bilinear to standard: the score matrices of a key head, below each other, factored by SVD."""
    to = goal.untied
    if not isinstance(layout, Bilinear) or goal.call.rotary or not hasattr(to, "head_dim"):
        return None
    heads, width = layout.num_heads, layout.size("key_width")
    h = to.size("head_dim") // (heads if isinstance(to, Collaborative) else 1)
    if isinstance(to, GroupedTied):
        h += to.size("rotary_dim")
    if not 0 < h < width or "extra_k" in w:
        return None
    rows = stacked_scores(w).reshape(layout.size("num_kv_heads"), -1, width)
    if (factors := split(rows, h)) is None:
        return None
    q = factors[0].reshape(heads, -1, h)
    made = {"q": q[:, : layout.width].swapaxes(0, 1), "k": np.moveaxis(factors[1], 2, 0)}
    made |= {"q_bias": q[:, -1]} if "q_bias" in w else {}
    return finish(w, layout.to(Standard, head_dim=h), **made)


def factor_values(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed to bilinear: W_V W_O of the heads that share values, side by side, factored by SVD.

    As many value heads as the goal has, or else one for each head.
    """
    to, heads = goal.untied, layout.num_heads
    if not isinstance(layout, Absorbed) or not hasattr(to, "value_dim") or "extra_v" in w:
        return None
    for count in dict.fromkeys((kv_heads_of(to), heads)):
        if heads % count == 0 and (made := _values(w, count, to.size("value_dim"))) is not None:
            found = layout.to(Bilinear, num_kv_heads=count, value_dim=to.size("value_dim"))
            return finish(w, found, **made)
    return None


def _values(w: Weights, groups: int, rank: int) -> dict[str, Floats] | None:
    """v, its bias and o of absorbed weights."""
    both = stacked_values(w)
    heads, rows, out = both.shape
    beside = both.reshape(groups, -1, rows, out).swapaxes(1, 2).reshape(groups, rows, -1)
    if (factors := split(beside, rank)) is None:
        return None
    left, right = factors
    width = w["vo"].shape[1]
    o = right.reshape(groups, rank, heads // groups, out).swapaxes(1, 2).reshape(heads, rank, out)
    made = {"v": left[:, :width].swapaxes(0, 1), "o": o}
    return made | ({"v_bias": left[:, -1]} if rows > width else {})


def factor_latent(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to latent: keys and values of all heads side by side, or factored by SVD where the
    latent is narrower."""
    to = goal.untied
    plain = type(layout) is Standard and layout.qk_norm is None and "extra_k" not in w
    if not isinstance(to, Latent) or not plain or len(set(layout.input_widths)) > 1:
        return None
    if any(layout.size(name) > to.size(name) for name in ("head_dim", "value_dim")):
        return None  # heads of a latent are only made wider
    no_latent = to.latent_norm or to.query_latent_dim is not None
    if no_latent or goal.call.rotary or not set(layout.biases) <= {"o"}:
        return None
    heads, groups, m = layout.num_heads, layout.size("num_kv_heads"), to.size("latent_dim")
    both = np.concatenate([w[n].reshape(len(w[n]), -1) for n in "kv"], axis=1)
    size = both.shape[1]
    if size <= m:
        down, up = np.pad(both, [(0, 0), (0, m - size)]), np.eye(m, size)
    else:
        factors = split(both[None], m)
        if factors is None:
            return None
        down, up = factors[0][0], factors[1][0]
    parts = np.split(up, [groups * layout.size("head_dim")], axis=1)
    k, v = (np.repeat(a.reshape(m, groups, -1), heads // groups, axis=1) for a in parts)
    found = layout.to(Latent, latent_norm=False, latent_dim=m, rotary_dim=to.size("rotary_dim"))
    none = {n: np.zeros(weight_shapes(found)[n]) for n in ("q_rotary", "k_rotary")}
    return finish(w, found, kv_down=down, k=k, v=v, **none)


def factor_queries(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to low_rank_query without a norm: queries of all heads factored by SVD."""
    to = goal.untied
    if type(layout) is not Standard or not isinstance(to, LowRankQuery) or to.latent_norm:
        return None
    q, rank = w["q"], to.size("query_latent_dim")
    if (factors := split(q.reshape(1, len(q), -1), rank)) is None:
        return None
    found = layout.to(LowRankQuery, latent_norm=False, query_latent_dim=rank)
    left, right = factors
    return finish(w, found, q_down=left[0], q=right[0].reshape(-1, *q.shape[1:]))


def all_equal(heads: Floats) -> bool:
    """Are all heads [N, ...] equal, up to rounding?"""
    return same(heads, np.broadcast_to(heads[:1], heads.shape))


def share_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Key and value heads that are equal within groups."""
    to = goal.untied
    if not (hasattr(layout, "num_kv_heads") and hasattr(to, "num_kv_heads")):
        return None
    heads, wanted = layout.size("num_kv_heads"), to.size("num_kv_heads")
    if wanted >= heads or heads % wanted or layout.num_heads != to.num_heads:
        return None
    made = {}
    for name, names in axes(layout).items():
        if "num_kv_heads" in names:
            axis = names.index("num_kv_heads")
            groups = np.moveaxis(w[name], axis, 0).reshape(wanted, heads // wanted, -1)
            if not all(map(all_equal, groups)):
                return None
            made[name] = np.take(w[name], range(0, heads, heads // wanted), axis)
    return finish(w, changed(layout, num_kv_heads=wanted), **made)


def cut_slices(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to narrow: head n reads slice n of x alone."""
    heads = layout.num_heads
    fits = type(layout) is Standard and isinstance(goal.untied, Narrow)
    if not fits or layout.size("num_kv_heads") != heads or layout.width % heads:
        return None
    if len(set(layout.input_widths)) > 1:
        return None
    made = {}
    for name in "qkv":
        parts = w[name].reshape(heads, -1, heads, w[name].shape[-1])  # slice, its columns, head
        beside = np.where(np.eye(heads, dtype=bool)[:, None, :, None], 0.0, parts)
        if np.max(np.abs(beside)) > ROUNDING * np.max(np.abs(parts)):
            return None
        made[name] = np.stack([parts[n, :, n] for n in range(heads)])
    return finish(w, layout.to(Narrow), **made)


def tie_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Narrow to narrow_tied: the projections of all heads are equal."""
    if type(layout) is not Narrow or type(goal.untied) is not NarrowTied:
        return None
    tied = [name for name in w if name[0] in "qkv" and name.removesuffix("_bias") in "qkv"]
    if not all(all_equal(w[name]) for name in tied):
        return None
    return finish(w, layout.to(NarrowTied), **{name: w[name][0] for name in tied})


def tie_projections(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The goal with its tie: projections that are equal."""
    to = goal.tied
    if layout != goal.untied or not isinstance(to, Separate) or not to.tie:
        return None
    for ours, theirs in UNTIED[to.tie].items():
        for end in ("", "_outer", "_bias"):
            one, two = w.get(f"{ours}{end}"), w.get(f"{theirs}{end}")
            if one is not None and (two is None or not same(one, two)):
                return None
    return finish(w, canonical(to))


STRUCTURED: tuple[Step, ...] = (
    drop_zero_bias, factor_keys, factor_values, factor_latent, factor_queries, share_heads,
    cut_slices, tie_heads, tie_projections,
)  # fmt: skip
