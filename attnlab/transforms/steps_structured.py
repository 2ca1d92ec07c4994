"""Conversion steps that need weights of some structure: a low rank, equal heads, blocks, zeros."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from attnlab.heads import (
    Absorbed,
    Alt,
    Bilinear,
    Collaborative,
    GroupedTied,
    LatentAbsorbed,
    Layout,
    Narrow,
    NarrowTied,
    SoftCap,
    Standard,
    TalkingHeads,
)
from attnlab.transforms.forms import Goal, axes, changed, extra_of, rows_sum_to_one
from attnlab.transforms.matrices import (
    ROUNDING,
    diagonalize,
    rank_at_least,
    same,
    split,
    stacked_scores,
    stacked_values,
    zero,
)
from attnlab.transforms.measure import Floats, Weights
from attnlab.transforms.permute import reorder_heads
from attnlab.transforms.steps import Made, equal, finish, grouped, step


@step("factor_keys", structured=True)
def factor_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Bilinear to standard: the score matrices of a key head, below each other, factored by SVD."""
    to = goal.untied
    if not isinstance(layout, Bilinear) or goal.call.rotary or not hasattr(to, "head_dim"):
        return None
    heads, width = layout.num_heads, layout.size("key_width")
    shared = isinstance(to, Collaborative)
    h = to.size("head_dim") // heads if shared else to.size("head_dim")
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


@step("diagonalize", structured=True)
def diagonalize_scores(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Bilinear to collaborative: score matrices that are diagonal in one pair of bases."""
    to = goal.untied
    if not isinstance(layout, Bilinear) or not isinstance(to, Collaborative) or goal.call.rotary:
        return None
    found = diagonalize(stacked_scores(w), to.size("head_dim"))
    if found is None or "extra_k" in w:
        return None
    q, mixing, k = found
    made = {"q": q[: layout.width], "k": k, "mixing": mixing}
    made |= {"q_bias": q[-1]} if "q_bias" in w else {}
    return finish(w, layout.to(Collaborative, head_dim=to.size("head_dim")), **made)


@step("simplify", structured=True)
def simplify(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed heads that attend alike become one and a head of zeros, heads without an effect all
    zero, value biases that cancel zero."""
    if not isinstance(layout, Absorbed) or extra_of(layout, TalkingHeads) or "extra_v" in w:
        return None
    scores, values = stacked_scores(w), w["vo"].copy()
    bias = w["v_bias"].copy() if "v_bias" in w else np.zeros((layout.num_heads, 1))
    if all(isinstance(extra, SoftCap) for extra in layout.extras):
        for n, m in zip(*np.triu_indices(layout.num_heads, 1), strict=True):
            if same(scores[n], scores[m]) and np.any(values[m]):
                largest = values[[n, m]]
                values[n], values[m] = values[n] + values[m], 0.0
                values[n] = 0.0 if zero(values[n], largest) else values[n]
    if rows_sum_to_one(layout) and zero(np.sum(bias, axis=0), bias) and not layout.extras:
        bias[:] = 0.0
    dead = [zero(a, values) and zero(b, bias) for a, b in zip(values, bias, strict=True)]
    made = {"vo": values, "qk": w["qk"].copy()}
    made["vo"][dead], made["qk"][:, dead] = 0.0, 0.0
    if "q_bias" in w:
        made["q_bias"] = np.where(np.array(dead)[:, None], 0.0, w["q_bias"])
    if "v_bias" in w:
        bias[dead] = 0.0
        made["v_bias"] = bias
    if all(np.array_equal(a, w[name]) for name, a in made.items()):
        return None
    return finish(w, layout, **made)


@step("drop_heads", structured=True)
def drop_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed heads of zeros, to the number of heads of the goal."""
    wanted = goal.untied.num_heads
    if not isinstance(layout, Absorbed) or wanted >= layout.num_heads:
        return None
    bias = w.get("v_bias", np.zeros((layout.num_heads, 1)))
    live = [n for n, a in enumerate(w["vo"]) if np.any(a) or np.any(bias[n])]
    if len(live) > wanted or extra_of(layout, TalkingHeads):
        return None
    spare = [n for n in range(layout.num_heads) if n not in live]
    kept = sorted(live + spare[: wanted - len(live)])
    return finish(reorder_heads(w, layout, kept), changed(layout, num_heads=wanted))


def factored_values(w: Weights, layout: Layout, goal: Goal, groups: int) -> Made:
    """Absorbed to bilinear with this many value heads; heads that share one are brought together.

    Value biases add up over the heads of rows of probabilities that sum to 1, so where those of the
    single heads do not fit, any others of the same sum do.
    """
    to, heads = goal.untied, layout.num_heads
    if "extra_v" in w or heads % groups:
        return None
    rank, scores = to.size("value_dim"), stacked_scores(w)
    key_rank = to.size("head_dim") if hasattr(to, "head_dim") else layout.size("key_width")
    key_rank = layout.size("key_width") if isinstance(to, Collaborative) else key_rank
    values = w["vo"]

    def fit(members: list[int]) -> bool:
        keys = rank_at_least(np.concatenate(scores[members]), ROUNDING) <= key_rank
        return keys and rank_at_least(np.concatenate(values[members], axis=1), ROUNDING) <= rank

    order = grouped(heads, groups, fit)
    if order is None and groups < heads:
        return None
    if order is not None and order != list(range(heads)):
        w = reorder_heads(w, layout, order)
    found = layout.to(Bilinear, num_kv_heads=groups, value_dim=rank)
    made = split_values(w, stacked_values(w), groups, rank)
    if made is None and "v_bias" in w and rows_sum_to_one(layout) and not layout.extras:
        made = split_values(w, w["vo"], groups, rank)
        if made is not None:
            total = np.sum(w["v_bias"], axis=0)
            by_group = made["o"].reshape(groups, -1, rank, len(total)).sum(axis=1)
            rows = by_group.reshape(-1, len(total))
            bias = np.linalg.lstsq(rows.T, total, rcond=ROUNDING)[0]
            made["v_bias"] = bias.reshape(groups, rank)
            if np.max(np.abs(bias @ rows - total)) > 1e-11 * np.max(np.abs(w["v_bias"])):
                return None
    return None if made is None else finish(w, found, **made)


def split_values(w: Weights, both: Floats, groups: int, rank: int) -> dict[str, Floats] | None:
    """[N, W (+1), O] -> v, its bias and o, by a factorization of each group side by side."""
    heads, rows, out = both.shape
    beside = both.reshape(groups, -1, rows, out).swapaxes(1, 2).reshape(groups, rows, -1)
    if (factors := split(beside, rank)) is None:
        return None
    left, right = factors
    width = w["vo"].shape[1]
    o = right.reshape(groups, rank, heads // groups, out).swapaxes(1, 2).reshape(heads, rank, out)
    made = {"v": left[:, :width].swapaxes(0, 1), "o": o}
    return made | ({"v_bias": left[:, -1]} if rows > width else {})


@step("factor_values", structured=True)
def factor_values(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed to bilinear, a value head for each head: W_V W_O factored by SVD."""
    fits = isinstance(layout, Absorbed) and hasattr(goal.untied, "value_dim")
    return factored_values(w, layout, goal, layout.num_heads) if fits else None


@step("factor_values", structured=True)
def factor_grouped_values(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Absorbed to bilinear, as many value heads as the goal has."""
    fits = isinstance(layout, Absorbed) and hasattr(goal.untied, "num_kv_heads")
    fits = fits and hasattr(goal.untied, "value_dim")
    return factored_values(w, layout, goal, goal.untied.size("num_kv_heads")) if fits else None


def sliced(layout: Layout) -> bool:
    """Are these standard heads that could read slices?"""
    return (
        type(layout) is Standard
        and len(set(layout.input_widths)) == 1
        and layout.width % layout.num_heads == 0
        and layout.size("num_kv_heads") == layout.num_heads
    )


def without_effect(v: Floats, w: Weights, layout: Layout) -> list[int]:
    """Heads whose values [N, C, V], multiplied with their output projection, are rounding."""
    if "o" not in w or "extra_v" in w or extra_of(layout, TalkingHeads):
        return []
    rows = np.concatenate([v] + ([w["v_bias"][:, None]] if "v_bias" in w else []), axis=1)
    largest = np.max(np.abs(rows), axis=(1, 2)) * np.max(np.abs(w["o"]), axis=(1, 2))
    moved = np.max(np.abs(rows @ w["o"]), axis=(1, 2))
    return [n for n, size in enumerate(moved) if size <= ROUNDING * np.max(largest)]


@step("cut_slices", structured=True)
def cut_slices(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to narrow: heads that read one slice of x each, in any order."""
    if not sliced(layout) or type(goal.untied) not in (Narrow, NarrowTied, Alt):
        return None
    heads = layout.num_heads
    made = {n: w[n].copy() for n in "qkv"}
    for a in made.values():
        a[:, without_effect(np.moveaxis(w["v"], 1, 0), w, layout)] = 0.0
    parts = {n: a.reshape(heads, -1, heads, a.shape[-1]) for n, a in made.items()}
    reads = np.zeros((heads, heads), bool)  # does head n read slice s?
    for a in parts.values():
        reads |= ROUNDING * np.max(np.abs(a)) < np.max(np.abs(a), axis=(1, 3)).T
    misfit = reads.sum(axis=1, keepdims=True) > reads  # it reads another slice
    order = np.arange(heads)  # head n reads slice order[n]
    if misfit[order, order].any():
        order = linear_sum_assignment(misfit)[1]
        if misfit[np.arange(heads), order].any() or "o" not in w:
            return None
    heads_of = [int(np.flatnonzero(order == s)[0]) for s in range(heads)]
    moved = reorder_heads({**w, **made}, layout, heads_of)
    blocks = {
        n: np.stack([moved[n].reshape(heads, -1, heads, moved[n].shape[-1])[s, :, s]
                     for s in range(heads)]) for n in "qkv"
    }  # fmt: skip
    return finish(moved, layout.to(Narrow), **blocks)


TIED = ("q", "k", "v", "q_bias", "k_bias", "v_bias")


@step("tie_heads", structured=True)
def tie_heads(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Narrow to narrow_tied: equal projections; a head without an effect may have any."""
    if type(layout) is not Narrow or type(goal.untied) is not NarrowTied:
        return None
    dead = without_effect(w["v"], w, layout)
    live = [n for n in range(layout.num_heads) if n not in dead] or [0]
    for name in TIED:
        if name in w and not equal(w[name][live]):
            return None
    made = {name: a[live[0]] if name in TIED else a for name, a in w.items()}
    if dead:
        made["o"] = w["o"].copy()
        made["o"][dead] = 0.0
    return finish(made, layout.to(NarrowTied))


def bias_row(w: Weights, name: str) -> Floats:
    """Projections of slices with their bias as one more row: [N, C (+1), H]."""
    bias = f"{name}_bias"
    return np.concatenate([w[name]] + ([w[bias][:, None]] if bias in w else []), axis=1)


@step("tie_products", structured=True)
def tie_products(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Narrow to narrow_tied: heads of equal q k^T whose values have a basis in common, or are equal
    where there is no output projection."""
    if type(layout) is not Narrow or type(goal.untied) is not NarrowTied:
        return None
    if goal.call.rotary or layout.qk_norm is not None or "extra_k" in w:
        return None
    dead = without_effect(w["v"], w, layout)
    live = [n for n in range(layout.num_heads) if n not in dead] or [0]
    if not equal((bias_row(w, "q") @ w["k"].swapaxes(1, 2))[live]):
        return None
    first = {n: a[live[0]] if n in TIED else a for n, a in w.items()}
    rows, tied = bias_row(w, "v"), layout.to(NarrowTied)
    if not layout.output_projection:
        return finish(first, tied) if equal(rows) else None
    both, rank = (rows @ w["o"]).swapaxes(0, 1), layout.size("value_dim")
    if (factors := split(both.reshape(1, rows.shape[1], -1), rank)) is None:
        return None
    left, right = factors[0][0], factors[1][0]
    width = w["v"].shape[1]
    made = {"v": left[:width], "o": right.reshape(rank, layout.num_heads, -1).swapaxes(0, 1)}
    made |= {"v_bias": left[-1]} if "v_bias" in w else {}
    return finish(first, tied, **made)


@step("share_mix", structured=True)
def share_mix(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Standard to alt: [q k v] of each head has a rank of at most D/N (SVD)."""
    if not sliced(layout) or type(goal.untied) is not Alt:
        return None
    both = np.concatenate([w["q"], w["k"], w["v"]], axis=2).swapaxes(0, 1)
    if (factors := split(both, layout.slice_width)) is None:
        return None
    head_dim = layout.size("head_dim")
    q, k, v = np.split(factors[1], [head_dim, 2 * head_dim], axis=2)
    return finish(w, layout.to(Alt), mix=factors[0].swapaxes(0, 1), q=q, k=k, v=v)


@step("drop_output", structured=True)
def drop_output(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Without an output projection, where each head writes to its own slice of the output: the
    values do it."""
    to = goal.untied
    if not layout.output_projection or to.output_projection or "o_bias" in w or "v" not in w:
        return None
    heads, new, names = layout.num_heads, to.size("value_dim"), axes(layout)
    fits = heads == to.num_heads and layout.size("out_width") == heads * new
    if not fits or isinstance(layout, LatentAbsorbed):
        return None
    parts = w["o"].reshape(heads, -1, heads, new)
    blocks = np.stack([parts[n, :, n] for n in range(heads)])
    if not same(parts, blocks[:, :, None] * np.eye(heads)[:, None, :, None]):
        return None
    head = next((a for a in names["v"] if a in ("num_heads", "num_kv_heads")), None)
    groups = layout.size(head) if head is not None else 1
    grouped_blocks = blocks.reshape(groups, -1, *blocks.shape[1:])
    if not all(map(equal, grouped_blocks)):
        return None
    basis, made = grouped_blocks[:, 0], {}
    for name in ("v", "v_bias", "extra_v"):
        if name in w:
            at = names[name].index(head) if head is not None and head in names[name] else None
            a = w[name] if at is None else np.moveaxis(w[name], at, 0)
            b = basis if at is not None else basis[0]
            b = b.reshape(len(b), *[1] * (a.ndim - 3), *b.shape[1:]) if at is not None else b
            a = (a[:, None] @ b)[:, 0] if at is not None and a.ndim == 2 else a @ b
            made[name] = a if at is None else np.moveaxis(a, 0, at)
    without = changed(layout, output_projection=False, out_width=None, value_dim=new)
    return finish(w, without, **made)
