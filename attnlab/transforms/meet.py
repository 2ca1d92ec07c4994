"""Two layouts meet in a more general one, where weights get other sizes, and come back down.

    source -> general -> ... -> common layout <- ... <- general <- target
                                     | resize
                                     v inverse, one a layout

`Layout.general` leads up, `Layout.inverse` down. Nothing here is trusted: `convert` measures every
candidate, so an inverse may guess.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from attnlab.heads import Absorbed, Blocked, Layout, Params, weight_shapes
from attnlab.heads.factors import Floats, Weights
from attnlab.ops import NORM_STARTS
from attnlab.transforms.measure import CallOptions

ROUNDING = 1e-12
"""Relative to the largest number: what is smaller is taken for rounding."""
KV_AXES = ("num_kv_heads", "num_key_heads", "num_value_heads")


class Form(NamedTuple):
    """A layout of a chain, and its weights from those of the layout before it."""

    layout: Layout
    params: Callable[[Weights], Weights] = dict


class Candidate(NamedTuple):
    """Weights of the target, and what was done."""

    params: dict[str, Floats]
    steps: tuple[str, ...]


def climb(layout: Layout, call: CallOptions) -> list[Form]:
    """The layout and the more general ones of the same function, in order."""
    chain = [Form(layout.to(type(layout), scale=layout.score_scale))]
    if not layout.output_projection:
        width = layout.size("out_width")
        o = np.eye(width).reshape(layout.num_heads, -1, width)
        wider = chain[0].layout.to(type(layout), output_projection=True, out_width=width)
        chain.append(Form(wider, lambda w: {**w, "o": o}))
    while True:
        step = chain[-1].layout.general()
        if isinstance(step, Blocked):
            return chain
        if step.blocked(rotary=call.rotary, shift_invariant=call.shift_invariant):
            return chain
        chain.append(Form(step.layout, functools.partial(_in_numpy, step.params)))


def _in_numpy(params: Callable[[Params], Params], w: Weights) -> Weights:
    made = params({name: jnp.asarray(a) for name, a in w.items()})
    return {name: np.asarray(a) for name, a in made.items()}


def candidates(
    w: Weights, layout: Layout, target: Layout, call: CallOptions
) -> Iterator[Candidate]:
    """Weights of the target from each layout in which the two chains meet, the nearest first."""
    ours, theirs = climb(layout, call), [form.layout for form in climb(target, call)]
    for i, upper in enumerate(ours):
        w = upper.params(w)
        for j, lower in enumerate(theirs):
            if kind(upper.layout) != kind(lower):
                continue
            made = resize(w, upper.layout, lower)
            made = None if made is None else descend(made, theirs[: j + 1])
            if made is not None:
                steps = [f"to {form.layout.name}" for form in ours[1 : i + 1]]
                steps += ["resize"] if upper.layout != lower else []
                yield Candidate(made, (*steps, *(f"back to {a.name}" for a in theirs[:j][::-1])))


def absorbed(w: Weights, layout: Layout, call: CallOptions) -> Weights | None:
    """The same function as weights of `Absorbed` whose scores need no scale; None if there are
    none."""
    for form in climb(layout, call):
        w = form.params(w)
        if isinstance(form.layout, Absorbed):
            scale = form.layout.score_scale
            return {**w, **{n: w[n] * scale for n in ("qk", "q_bias") if n in w}}
    return None


def kind(layout: Layout) -> tuple[type, frozenset[str]]:
    """Layouts of one kind differ in sizes, biases and scale only."""
    owner = next(base for base in type(layout).__mro__ if "weights" in vars(base))
    return owner, frozenset(n for n in layout.all_weights if not n.endswith("_bias"))


def resize(w: Weights, source: Layout, target: Layout) -> dict[str, Floats] | None:
    """Weights of `source` in the sizes and the scale of `target`, a layout of its kind.

    New heads and columns are zeros. None where weights would be cut, but for biases and for heads
    that write nothing; whether those matter shows in the error.
    """
    heads = [(a.num_heads, a.size("num_kv_heads")) for a in (source, target)]
    between = target  # the sizes of the target, with a key head for each head where heads change
    if heads[0] != heads[1]:
        w, between = _with_kv_head_each(w, source), _one_kv_head_each(target)
    if source.num_heads > target.num_heads:
        live = _writes(w, source)
        if live.sum() > target.num_heads:
            return None
        kept = np.sort(np.argsort(~live, kind="stable")[: target.num_heads])
        w = change_axes(w, source, source.head_axes, lambda a, axis, _: np.take(a, kept, axis))
    weights = between.all_weights
    made = {n: np.full(between.shapes[n], a.constant or 0.0) for n, a in weights.items()}
    for name in made.keys() & w.keys():
        a = w[name]
        if a.ndim != made[name].ndim or np.any(np.array(a.shape) > made[name].shape):
            return None
        made[name][tuple(map(slice, a.shape))] = a
    made = rescale(made, target, source.score_scale / target.score_scale)
    if between is target:
        return made
    # That the heads of a group were equal shows in the error.
    return change_axes(made, target, KV_AXES, lambda a, axis, name: np.take(
        a, range(0, a.shape[axis], a.shape[axis] // target.size(name)), axis))  # fmt: skip


def rescale(w: Weights, layout: Layout, ratio: float) -> dict[str, Floats]:
    """The ratio of two scales in what makes queries: in their norm, or in the weights of heads."""
    norm = layout.qk_norm
    made = dict(w)
    if ratio == 1:
        return made
    if norm is not None:
        start = 1 - NORM_STARTS[norm.kind]  # some norms count their scale from 1
        made["q_norm"] = w["q_norm"] * ratio + (ratio - 1) * start
        names = ["q_norm_bias"]
    else:
        names = [
            name
            for name, weight in layout.all_weights.items()
            if "project_q" in weight.stages and "num_heads" in weight.axes
        ]
    return made | {name: w[name] * ratio for name in names if name in w}


def descend(w: Weights, chain: Sequence[Layout]) -> dict[str, Floats] | None:
    """Weights of the last layout of a chain -> weights of the first; None where there are none."""
    for lower, upper in reversed(list(itertools.pairwise(chain))):
        made: dict[str, Floats] | None = {}
        if type(lower) is not type(upper):  # else ties, or a W_O that has to be 1
            made = lower.inverse(w, upper, ROUNDING)
        if made is None:
            return None
        both, shapes = {**w, **made}, weight_shapes(lower)
        w = {n: both[n] if n in both else np.zeros(shape) for n, shape in shapes.items()}
    return dict(w)


def _with_kv_head_each(w: Weights, layout: Layout) -> dict[str, Floats]:
    """The weights of `_one_kv_head_each`: those of a group are copies."""
    wide = _one_kv_head_each(layout)
    return change_axes(w, layout, KV_AXES, lambda a, axis, name: np.repeat(
        a, wide.size(name) // layout.size(name), axis))  # fmt: skip


def _one_kv_head_each(layout: Layout) -> Layout:
    if layout.size("num_kv_heads") == layout.num_heads:
        return layout
    return layout.to(type(layout), num_kv_heads=layout.num_heads)


def change_axes(
    w: Weights, layout: Layout, axes: Sequence[str], change: Callable[[Floats, int, str], Floats]
) -> dict[str, Floats]:
    """The weights, each changed along every axis of one of these names."""
    made = dict(w)
    for name, weight in layout.all_weights.items():
        for axis, axis_name in enumerate(weight.axes):
            if axis_name in axes and name in made:
                made[name] = change(made[name], axis, str(axis_name))
    return made


def _writes(w: Weights, layout: Layout) -> np.ndarray:
    """[N]: may the head write anything? Not where a weight of its output is zero."""
    live = np.ones(layout.num_heads, bool)
    for name, weight in layout.all_weights.items():
        if "project_out" in weight.stages and "num_heads" in weight.axes and weight.in_axes:
            axis = weight.axes.index("num_heads")
            live &= np.any(np.moveaxis(w[name], axis, 0).reshape(layout.num_heads, -1), axis=1)
    return live
