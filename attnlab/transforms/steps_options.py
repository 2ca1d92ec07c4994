"""Conversion steps for biases, scale, gates, sinks, extra keys, norms and ties.

What an option adds is added last, when all else is as in the goal; where one is lost, the weights
decide.
"""

import dataclasses
from typing import cast

import numpy as np

from attnlab.heads import (
    Collaborative,
    ExtraKeys,
    Gate,
    HeadNorm,
    Layout,
    Sink,
    TalkingHeads,
    score_scale,
    weight_shapes,
)
from attnlab.heads.standard import UNTIED, Separate, Tie
from attnlab.norms import STARTS
from attnlab.transforms.forms import (
    Goal,
    axes,
    canonical,
    changed,
    extra_of,
    has_norms,
    with_extra,
)
from attnlab.transforms.matrices import same, split
from attnlab.transforms.measure import Floats, Weights
from attnlab.transforms.steps import Made, finish, step

NO_SINK = -1e30
"""A learnt sink whose share of the softmax is 0 in every dtype, as long as some score of the row is
above it by 1000. It gets no gradient."""


def with_zeros(w: Weights, layout: Layout | None) -> Made:
    """The layout, with zeros for the weights that are new."""
    if layout is None:
        return None
    return layout, {n: w.get(n, np.zeros(shape)) for n, shape in weight_shapes(layout).items()}


# Biases and scale ---------------------------------------------------------------------------------


@step("drop_key_bias")
def drop_key_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A key bias adds the same to all scores of a query."""
    seen = goal.call.rotary or not goal.call.shift_invariant or getattr(layout, "qk_norm", None)
    seen = seen or not all(extra.shift_invariant for extra in layout.extras)
    if "k" not in layout.biases or "k" in goal.untied.biases or seen:
        return None
    return finish(w, changed(layout, biases=tuple(b for b in layout.biases if b != "k")))


@step("drop_zero_bias", structured=True)
def drop_zero_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A bias of zeros."""
    spare = [b for b in layout.biases if b not in goal.untied.biases]
    kept = changed(layout, biases=tuple(b for b in layout.biases if b not in spare))
    if not spare or kept is None or any(np.any(w[n]) for n in set(w) - set(weight_shapes(kept))):
        return None
    return finish(w, kept)


@step("add_zero_bias")
def add_zero_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A bias of zeros."""
    if not goal.nearly(layout) or layout.biases == goal.untied.biases:
        return None
    return with_zeros(w, changed(layout, biases=goal.untied.biases))


@step("rescale")
def rescale(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The ratio of the scales goes into q, or into its norm where q is normalized."""
    if not goal.nearly(layout) or layout.scale == goal.untied.scale:
        return None
    ratio, made = score_scale(layout) / score_scale(goal.untied), dict(w)
    norm = getattr(layout, "qk_norm", None)
    if norm is not None:
        start = 1 - STARTS[norm.kind]  # some norms count their scale from 1
        made["q_norm"] = w["q_norm"] * ratio + (ratio - 1) * start
        names: tuple[str, ...] = ("q_norm_bias",)
    else:
        names = (
            ("mixing",) if isinstance(layout, Collaborative) else ("qk", "q", "q_bias", "q_rotary")
        )
    made |= {name: w[name] * ratio for name in names if name in w}
    return finish(made, changed(layout, scale=goal.untied.scale))


# Gates --------------------------------------------------------------------------------------------


def scale_output(w: Weights, factor: float) -> dict[str, Floats] | None:
    """What heads return, times a number: in the output projection, or in the values without one."""
    choices: tuple[tuple[str, ...], ...] = ("o",), ("vo", "v_bias"), ("v", "v_bias", "extra_v")
    names = next((choice for choice in choices if choice[0] in w), None)
    if names is None:
        return None
    return {n: a * factor if n in names else a for n, a in w.items()}


@step("half_gate")
def half_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A gate of weights 0, which is 1/2, and an output twice as large."""
    gate, scaled = extra_of(goal.untied, Gate), scale_output(w, 2.0)
    if not goal.nearly(layout) or gate is None or extra_of(layout, Gate) or scaled is None:
        return None
    return with_zeros(scaled, with_extra(layout, Gate, gate))


@step("drop_gate", structured=True)
def drop_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A gate of weights 0, and an output half as large."""
    gate, scaled = extra_of(layout, Gate), scale_output(w, 0.5)
    if gate is None or extra_of(goal.untied, Gate) or scaled is None:
        return None
    name = "head_gate" if gate.by == "head" else "gate"
    return None if np.any(w[name]) else finish(scaled, with_extra(layout, Gate, None))


@step("spread_gate")
def spread_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The gate of a head for each number of its value."""
    one, two = extra_of(layout, Gate), extra_of(goal.untied, Gate)
    if not (one and two and (one.by, two.by) == ("head", "element") and goal.nearly(layout)):
        return None
    gate = np.repeat(w["head_gate"][..., None], layout.size("value_dim"), axis=-1)
    return finish(w, with_extra(layout, Gate, two), gate=gate)


@step("gather_gate", structured=True)
def gather_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Gates that are equal within each head."""
    one, two = extra_of(layout, Gate), extra_of(goal.untied, Gate)
    if not (one and two and (one.by, two.by) == ("element", "head")):
        return None
    if not same(w["gate"], np.broadcast_to(w["gate"][..., :1], w["gate"].shape)):
        return None
    return finish(w, with_extra(layout, Gate, two), head_gate=w["gate"][..., 0])


# Sinks, extra keys, talking heads -----------------------------------------------------------------


def swap_sink(layout: Layout, sink: Sink | None, keys: int) -> Layout | None:
    """The layout with another sink and number of extra keys."""
    reached = with_extra(layout, Sink, sink)
    return reached and with_extra(reached, ExtraKeys, ExtraKeys(keys) if keys else None)


def num_extra_keys(layout: Layout) -> int:
    """Extra keys of a layout."""
    return sum(extra.num_keys for extra in layout.extras if isinstance(extra, ExtraKeys))


@step("zero_sink")
def zero_sink(w: Weights, layout: Layout, goal: Goal) -> Made:
    """From a sink of the constant 0 to a learnt one of 0."""
    one, two = extra_of(layout, Sink), extra_of(goal.untied, Sink)
    if not (one and two and two.learnt and not one.learnt and goal.nearly(layout)):
        return None
    return with_zeros(w, with_extra(layout, Sink, two))


@step("no_sink")
def no_sink(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A learnt sink of `NO_SINK`: a share of 0 in every dtype, though not in real numbers."""
    sink = extra_of(goal.untied, Sink)
    if extra_of(layout, Sink) or sink is None or not sink.learnt or not goal.nearly(layout):
        return None
    if num_extra_keys(layout) != num_extra_keys(goal.untied):
        return None
    found = with_extra(layout, Sink, sink)
    return finish(w, found, sink=np.full(layout.num_score_maps, NO_SINK))


@step("drop_sink", structured=True)
def drop_sink(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Learnt sinks of 0 become the constant; sinks of `NO_SINK` none."""
    one, two = extra_of(layout, Sink), extra_of(goal.untied, Sink)
    if one is None or not one.learnt or (two is not None and two.learnt):
        return None
    lost = np.all(w["sink"] <= NO_SINK / 2) if two is None else not np.any(w["sink"])
    return finish(w, with_extra(layout, Sink, two)) if lost else None


@step("zero_key")
def zero_key(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A sink of the constant 0 as an extra key and value of zeros, behind the others."""
    sink, count = extra_of(layout, Sink), num_extra_keys(layout) + 1
    if sink is None or sink.learnt or num_extra_keys(goal.untied) != count:
        return None
    if extra_of(goal.untied, Sink) == sink or not goal.nearly(layout):
        return None
    if (found := swap_sink(layout, None, count)) is None:
        return None
    shapes, made = weight_shapes(found), {}
    for name in ("extra_k", "extra_v"):
        made[name] = np.zeros(shapes[name])
        made[name][: count - 1] = w.get(name, 0.0)
    return finish(w, found, **made)


@step("drop_zero_key", structured=True)
def drop_zero_key(w: Weights, layout: Layout, goal: Goal) -> Made:
    """An extra key and value of zeros as a sink of 0, added to a learnt one."""
    count, sink = num_extra_keys(layout), extra_of(layout, Sink)
    if count <= num_extra_keys(goal.untied):
        return None
    sizes = sum(np.abs(w[n]).reshape(count, -1).max(axis=1) for n in ("extra_k", "extra_v"))
    least = int(np.argmin(sizes))
    if np.asarray(sizes)[least] > 0:
        return None
    made = {n: np.delete(w[n], least, axis=0) for n in ("extra_k", "extra_v")}
    if sink is not None:
        made["sink"] = np.logaddexp(w.get("sink", np.zeros(layout.num_score_maps)), 0.0)
    return finish(w, swap_sink(layout, Sink(learnt=sink is not None), count - 1), **made)


def mixes(w: Weights) -> list[Floats]:
    """How far the mixing matrices of talking heads are from the identity."""
    return [w[n] - np.eye(len(w[n])) for n in ("mix_scores", "mix_probs")]


@step("identity_mixing")
def identity_mixing(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Talking heads whose matrices are identities."""
    extra, one = extra_of(goal.untied, TalkingHeads), np.eye(layout.num_score_maps)
    if extra is None or extra_of(layout, TalkingHeads) or not goal.nearly(layout):
        return None
    return finish(w, with_extra(layout, TalkingHeads, extra), mix_scores=one, mix_probs=one)


@step("drop_identity_mixing", structured=True)
def drop_identity_mixing(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Talking heads whose matrices are identities are none."""
    if not extra_of(layout, TalkingHeads) or extra_of(goal.untied, TalkingHeads):
        return None
    if any(np.any(a) for a in mixes(w)):
        return None
    return finish(w, with_extra(layout, TalkingHeads, None))


# Norms --------------------------------------------------------------------------------------------


def head_norm(layout: Layout) -> HeadNorm | None:
    """The norm of queries and keys."""
    return cast("HeadNorm | None", getattr(layout, "qk_norm", None))


@step("add_norm_bias")
def add_norm_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Norms of q and k with biases of zeros."""
    one, two = head_norm(layout), head_norm(goal.untied)
    if not (one and two and two.bias and not one.bias and goal.nearly(layout)):
        return None
    return with_zeros(w, changed(layout, qk_norm=two))


@step("drop_norm_bias", structured=True)
def drop_norm_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Norm biases of zeros; that of k may be any where it adds the same to all of a query."""
    one, two = head_norm(layout), head_norm(goal.untied)
    if not (one and two and one.bias and not two.bias):
        return None
    free = not goal.call.rotary and goal.call.shift_invariant
    free = free and all(extra.shift_invariant for extra in layout.extras)
    if np.any(w["q_norm_bias"]) or (np.any(w["k_norm_bias"]) and not free):
        return None
    return finish(w, changed(layout, qk_norm=dataclasses.replace(one, bias=False)))


@step("rescale_norms")
def rescale_norms(w: Weights, layout: Layout, goal: Goal) -> Made:
    """c a / sqrt(c^2 m + c^2 eps) = a / sqrt(m + eps), with c^2 the ratio of the epsilons."""
    old, new = layout.norm_eps, goal.untied.norm_eps
    if old == new or min(old, new) <= 0 or not has_norms(layout) or not goal.nearly(layout):
        return None
    normed = [n for n in w if f"{n}_norm" in w]
    scaled = {*normed, *(f"{n}_bias" for n in normed)}
    made = {n: a * (new / old) ** 0.5 if n in scaled else a for n, a in w.items()}
    return finish(made, changed(layout, norm_eps=new))


# Ties ---------------------------------------------------------------------------------------------
#
# A = scale W_Q W_K^T and B = W_V W_O are settled by the function, the projections are not. A tie
# of k and v asks for one W with A^T and B in the span of its columns: rank [A^T B] <= H. A tie of q
# and k asks for A = W W^T: symmetric and without a negative eigenvalue.


def tied(layout: Layout, goal: Goal, before: Tie, after: Tie) -> Separate | None:
    """The goal with the tie `after`, where `layout` is the goal with the tie `before`."""
    to = goal.tied
    if not (isinstance(layout, Separate) and isinstance(to, Separate) and to.tie):
        return None
    if after not in (to.tie, "qk") or not set(after) <= set(to.tie):
        return None
    return under(goal, after) if layout == under(goal, before) else None


def under(goal: Goal, tie: Tie) -> Separate | None:
    """The goal with this tie, without the biases that are then those of another projection."""
    free = goal.untied
    if not isinstance(free, Separate):
        return None
    biases = tuple(b for b in free.biases if b not in UNTIED[tie])
    found = changed(free, tie=tie, biases=biases)
    return None if found is None else cast("Separate", canonical(found))


def head_axis(layout: Layout, name: str) -> int | None:
    """Which axis of a weight counts heads."""
    names = axes(layout)[name]
    return next((i for i, a in enumerate(names) if a in ("num_heads", "num_kv_heads")), None)


def by_head(w: Weights, layout: Layout, name: str, bias: bool = True) -> Floats:
    """A projection by its heads, times what stands before it, its bias below: [K, D (+1), H]."""
    at, a = head_axis(layout, name), w[name]
    a = a[None] if at is None else np.moveaxis(a, at, 0)
    if f"{name}_outer" in w:
        a = w[f"{name}_outer"] @ a
    if bias and f"{name}_bias" in w:
        a = np.concatenate([a, w[f"{name}_bias"].reshape(len(a), 1, -1)], axis=1)
    return a


def from_heads(rows: Floats, w: Weights, layout: Layout, name: str) -> dict[str, Floats]:
    """`by_head` backwards; what stood before the projection is the identity."""
    at, made = head_axis(layout, name), dict[str, Floats]()
    if f"{name}_bias" in w:
        rows, last = rows[:, :-1], rows[:, -1]
        made[f"{name}_bias"] = last.reshape(w[f"{name}_bias"].shape)
    if f"{name}_outer" in w:
        made[f"{name}_outer"] = np.eye(len(w[f"{name}_outer"]))
    return made | {name: rows[0] if at is None else np.moveaxis(rows, 0, at)}


@step("tie_queries", structured=True)
def tie_queries(w: Weights, layout: Layout, goal: Goal) -> Made:
    """q = c k with c > 0 for each number of a head, or for each pair that is rotated."""
    found = tied(layout, goal, "", "qk")
    if found is None:
        return None
    q, k = by_head(w, layout, "q"), by_head(w, layout, "k")
    if q.shape != k.shape:
        return None
    pairs = 2 if q.shape[-1] % 2 == 0 else 1
    one, two = (a.reshape(*a.shape[:2], pairs, -1) for a in (q, k))
    square = np.sum(two * two, axis=(1, 2), keepdims=True)
    product = np.sum(one * two, axis=(1, 2), keepdims=True)
    ratio = np.where(square > 0, product / np.where(square > 0, square, 1), 1)
    ratio = np.ones_like(ratio) if head_norm(layout) else ratio
    if np.min(ratio) <= 0 or not same(one, ratio * two):
        return None
    root = np.sqrt(ratio)
    made = from_heads((root * two).reshape(q.shape), w, layout, "q")
    if "extra_k" in w:
        keys = np.moveaxis(w["extra_k"], 1, 0)  # [K, count, H]
        keys = (root * keys.reshape(*keys.shape[:2], pairs, -1)).reshape(keys.shape)
        made["extra_k"] = np.moveaxis(keys, 0, 1)
    return finish(w, found, **made)


def square_root(a: Floats, width: int) -> Floats | None:
    """a = W W^T -> W [D, width]; None where there is none."""
    if not same(a, a.T):
        return None
    values, vectors = np.linalg.eigh((a + a.T) / 2)
    small = 1e-12 * np.max(np.abs(values), initial=0)
    order = [i for i in np.argsort(-values) if values[i] > small]
    if values[0] < -small or len(order) > width:
        return None
    made = vectors[:, order] * np.sqrt(values[order])
    return np.pad(made, [(0, 0), (0, width - made.shape[1])])


@step("tie_squares", structured=True)
def tie_squares(w: Weights, layout: Layout, goal: Goal) -> Made:
    """W_Q W_K^T = W W^T for each head; a query bias b' with W b' = W_K b."""
    found = tied(layout, goal, "", "qk")
    sees = goal.call.rotary or head_norm(layout) or "extra_k" in w
    if found is None or sees:
        return None
    q, k = (by_head(w, layout, n, bias=False) for n in "qk")
    roots = [square_root(a, q.shape[-1]) for a in q @ k.swapaxes(1, 2)]
    if any(root is None for root in roots):
        return None
    rows = np.stack([root for root in roots if root is not None])
    if "q_bias" in w:
        wanted = k @ w["q_bias"].reshape(len(k), -1, 1)
        bias = np.linalg.pinv(rows, rcond=1e-10) @ wanted
        if not close(rows @ bias, wanted):
            return None
        rows = np.concatenate([rows, bias.swapaxes(1, 2)], axis=1)
    return finish(w, found, **from_heads(rows, w, layout, "q"))


def close(got: Floats, wanted: Floats) -> bool:
    """As good as the rounding of a pseudo-inverse allows."""
    largest = np.max(np.abs(wanted), initial=1e-300)
    return bool(np.max(np.abs(got - wanted)) <= 1e-11 * largest)


def tie_values(w: Weights, layout: Layout, goal: Goal, before: Tie, after: Tie) -> Made:
    """v_n W_O,n = k_n W'_O,n: the output projection reads the values from the keys."""
    found = tied(layout, goal, before, after)
    if found is None:
        return None
    k, v = by_head(w, layout, UNTIED[before].get("k", "k")), by_head(w, layout, "v")
    if k.shape[1] != v.shape[1]:
        return None
    if same(v, k):
        return finish(w, found)
    gate = extra_of(layout, Gate)
    if not layout.output_projection or "extra_v" in w or (gate and gate.by == "element"):
        return None
    o = w["o"].reshape(len(k), -1, *w["o"].shape[1:])
    wanted = v[:, None] @ o
    made = np.linalg.pinv(k, rcond=1e-10)[:, None] @ wanted
    return (
        finish(w, found, o=made.reshape(w["o"].shape)) if close(k[:, None] @ made, wanted) else None
    )


@step("tie_values", structured=True)
def tie_values_to_keys(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Values that are a product of the keys."""
    return tie_values(w, layout, goal, "", "kv")


@step("tie_values", structured=True, ties=True)
def tie_values_to_queries(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Values that are a product of the keys, which are the queries."""
    return tie_values(w, layout, goal, "qk", "qkv")


@step("tie_ranges", structured=True)
def tie_ranges(w: Weights, layout: Layout, goal: Goal) -> Made:
    """One basis for [A^T, W_V W_O] of each key head, of rank at most head_dim (SVD). A key bias is
    free, so it is the one that adds no rank."""
    found, gate = tied(layout, goal, "", "kv"), extra_of(layout, Gate)
    sees = (
        goal.call.rotary or head_norm(layout) or "extra_k" in w or (gate and gate.by == "element")
    )
    if found is None or sees or not layout.output_projection or not goal.call.shift_invariant:
        return None
    k, v = by_head(w, layout, "k", bias=False), by_head(w, layout, "v")
    groups, texts, width = k.shape
    q = by_head(w, layout, "q")
    q = q.reshape(groups, -1, *q.shape[1:])  # [K, N/K, D (+1), H]
    o = w["o"].reshape(groups, -1, *w["o"].shape[1:])
    scores, values = k[:, None] @ q.swapaxes(2, 3), v[:, None] @ o
    both = [np.concatenate(list(np.moveaxis(a, 1, 0)), axis=2) for a in (scores, values)]
    if v.shape[1] > texts:
        last = both[1][:, texts:] @ np.linalg.pinv(both[1][:, :texts], rcond=1e-10)
        both[0] = np.concatenate([both[0], last @ both[0]], axis=1)
    # The sizes of scores and values say nothing about each other.
    sizes = [np.maximum(np.max(np.abs(a), axis=(1, 2), keepdims=True), 1e-300) for a in both]
    beside = np.concatenate([a / size for a, size in zip(both, sizes, strict=True)], axis=2)
    if (factors := split(beside, width)) is None:
        return None
    rows, right = factors
    parts = np.split(right, [both[0].shape[2]], axis=2)
    new_q = (parts[0] * sizes[0]).reshape(groups, width, -1, q.shape[2])
    new_o = (parts[1] * sizes[1]).reshape(groups, width, -1, o.shape[3])
    new_q = np.moveaxis(new_q, 1, 3).reshape(-1, q.shape[2], width)
    made = from_heads(new_q, w, layout, "q") | from_heads(rows, w, layout, "k")
    return finish(w, found, **made, o=np.moveaxis(new_o, 1, 2).reshape(w["o"].shape))
