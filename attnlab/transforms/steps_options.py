"""Conversion steps that add a bias, a scale, a gate, a sink, extra keys or a norm's bias.

They are last in a chain: each applies where all else is as in the goal (`Goal.nearly`).
"""

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
from attnlab.norms import STARTS
from attnlab.transforms.forms import Goal, changed, extra_of, has_norms, with_extra
from attnlab.transforms.measure import Floats, Weights
from attnlab.transforms.steps import Made, finish

NO_SINK = -1e30
"""A learnt sink whose share of the softmax is 0 in every dtype, as long as some score of the row is
above it by 1000. It gets no gradient."""


def with_zeros(w: Weights, layout: Layout | None) -> Made:
    """The layout, with zeros for the weights that are new."""
    if layout is None:
        return None
    return layout, {n: w.get(n, np.zeros(shape)) for n, shape in weight_shapes(layout).items()}


def add_zero_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A bias of zeros."""
    if not goal.nearly(layout) or layout.biases == goal.untied.biases:
        return None
    return with_zeros(w, changed(layout, biases=goal.untied.biases))


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
    elif isinstance(layout, Collaborative):
        names = ("mixing",)
    else:
        names = ("qk", "q", "q_bias", "q_rotary")
    made |= {name: w[name] * ratio for name in names if name in w}
    return finish(made, changed(layout, scale=goal.untied.scale))


def half_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A gate of weights 0, which is 1/2, and an output twice as large."""
    gate = extra_of(goal.untied, Gate)
    if not goal.nearly(layout) or gate is None or extra_of(layout, Gate):
        return None
    choices: tuple[tuple[str, ...], ...] = ("o",), ("vo", "v_bias"), ("v", "v_bias", "extra_v")
    names = next((choice for choice in choices if choice[0] in w), None)
    if names is None:
        return None
    twice = {n: a * 2.0 if n in names else a for n, a in w.items()}
    return with_zeros(twice, with_extra(layout, Gate, gate))


def spread_gate(w: Weights, layout: Layout, goal: Goal) -> Made:
    """The gate of a head for each number of its value."""
    one, two = extra_of(layout, Gate), extra_of(goal.untied, Gate)
    if not (one and two and (one.by, two.by) == ("head", "element") and goal.nearly(layout)):
        return None
    gate = np.repeat(w["head_gate"][..., None], layout.size("value_dim"), axis=-1)
    return finish(w, with_extra(layout, Gate, two), gate=gate)


def num_extra_keys(layout: Layout) -> int:
    """Extra keys of a layout."""
    return sum(extra.num_keys for extra in layout.extras if isinstance(extra, ExtraKeys))


def zero_sink(w: Weights, layout: Layout, goal: Goal) -> Made:
    """From a sink of the constant 0 to a learnt one of 0."""
    one, two = extra_of(layout, Sink), extra_of(goal.untied, Sink)
    if not (one and two and two.learnt and not one.learnt and goal.nearly(layout)):
        return None
    return with_zeros(w, with_extra(layout, Sink, two))


def no_sink(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A learnt sink of `NO_SINK`: a share of 0 in every dtype, though not in real numbers."""
    sink = extra_of(goal.untied, Sink)
    if extra_of(layout, Sink) or sink is None or not sink.learnt or not goal.nearly(layout):
        return None
    if num_extra_keys(layout) != num_extra_keys(goal.untied):
        return None
    found = with_extra(layout, Sink, sink)
    return finish(w, found, sink=np.full(layout.num_score_maps, NO_SINK))


def zero_key(w: Weights, layout: Layout, goal: Goal) -> Made:
    """A sink of the constant 0 as an extra key and value of zeros, behind the others."""
    sink, count = extra_of(layout, Sink), num_extra_keys(layout) + 1
    if sink is None or sink.learnt or num_extra_keys(goal.untied) != count:
        return None
    without = with_extra(layout, Sink, None) if goal.nearly(layout) else None
    found = with_extra(without, ExtraKeys, ExtraKeys(count)) if without else None
    if found is None:
        return None
    shapes, made = weight_shapes(found), dict[str, Floats]()
    for name in ("extra_k", "extra_v"):
        made[name] = np.zeros(shapes[name])
        made[name][: count - 1] = w.get(name, 0.0)
    return finish(w, found, **made)


def identity_mixing(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Talking heads whose matrices are identities."""
    extra, one = extra_of(goal.untied, TalkingHeads), np.eye(layout.num_score_maps)
    if extra is None or extra_of(layout, TalkingHeads) or not goal.nearly(layout):
        return None
    return finish(w, with_extra(layout, TalkingHeads, extra), mix_scores=one, mix_probs=one)


def add_norm_bias(w: Weights, layout: Layout, goal: Goal) -> Made:
    """Norms of q and k with biases of zeros."""
    one, two = (cast("HeadNorm | None", getattr(a, "qk_norm", None)) for a in (layout, goal.untied))
    if not (one and two and two.bias and not one.bias and goal.nearly(layout)):
        return None
    return with_zeros(w, changed(layout, qk_norm=two))


def rescale_norms(w: Weights, layout: Layout, goal: Goal) -> Made:
    """c a / sqrt(c^2 m + c^2 eps) = a / sqrt(m + eps), with c^2 the ratio of the epsilons."""
    old, new = layout.norm_eps, goal.untied.norm_eps
    if old == new or min(old, new) <= 0 or not has_norms(layout) or not goal.nearly(layout):
        return None
    normed = [n for n in w if f"{n}_norm" in w]
    scaled = {*normed, *(f"{n}_bias" for n in normed)}
    made = {n: a * (new / old) ** 0.5 if n in scaled else a for n, a in w.items()}
    return finish(made, changed(layout, norm_eps=new))
