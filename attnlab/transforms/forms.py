"""Canonical layouts, whose sizes are all set, and the goal of a search for a conversion."""

import dataclasses
from typing import NamedTuple, TypeVar

from attnlab.heads import (
    Absorbed,
    Alt,
    Bilinear,
    Collaborative,
    ExtraKeys,
    Gate,
    GroupedTied,
    Latent,
    LatentAbsorbed,
    Layout,
    LowRankQuery,
    Narrow,
    NarrowTied,
    Sink,
    SoftCap,
    Standard,
    TalkingHeads,
    TensorProduct,
    TwoStage,
    Wide,
    score_scale,
)
from attnlab.heads.layout import Extra, all_weights
from attnlab.heads.standard import Separate
from attnlab.transforms.measure import CallOptions

BUILT_IN = frozenset({
    Absorbed, Alt, Bilinear, Collaborative, GroupedTied, Latent, LatentAbsorbed, LowRankQuery,
    Narrow, NarrowTied, Standard, TensorProduct, TwoStage, Wide,
})  # fmt: skip
BUILT_IN_EXTRAS = frozenset({ExtraKeys, Gate, Sink, SoftCap, TalkingHeads})
"""The layouts and extras whose functions are known; not their subclasses."""

PROJECTED = (Standard, TwoStage, Narrow, NarrowTied, Alt, LowRankQuery)
"""Layouts in which `head_dim` is the width of a projected query of one head."""

ExtraT = TypeVar("ExtraT", bound=Extra)
LayoutT = TypeVar("LayoutT", bound=Layout)


def is_known(layout: Layout) -> bool:
    """Are the layout and all of its extras built in?"""
    extras = all(type(extra) in BUILT_IN_EXTRAS for extra in layout.extras)
    return type(layout) in BUILT_IN and extras


def canonical(layout: Layout) -> Layout:
    """The layout with every size and the scale set, `Wide` as `Standard`.

    Two layouts of the same function and weights have equal canonical forms. A layout that is not
    built in is returned unchanged.
    """
    if type(layout) not in BUILT_IN:
        return layout
    sizes: dict[str, object] = {}
    for field in dataclasses.fields(layout):
        is_set = getattr(layout, field.name) is not None
        if is_set or not hasattr(layout, f"default_{field.name}"):
            continue
        if field.name == "query_latent_dim" and isinstance(layout, Latent):
            continue  # None is no latent
        if field.name != "out_width" or layout.output_projection:
            sizes[field.name] = layout.size(field.name)
    extras = tuple(sorted(layout.extras, key=lambda extra: type(extra).__name__))
    changes: dict[str, object] = {
        "scale": score_scale(layout),
        "biases": tuple(sorted(layout.biases)),
        "extras": extras,
        "norm_eps": layout.norm_eps if has_norms(layout) else Layout.norm_eps,
    }
    kind = Standard if type(layout) is Wide else type(layout)
    return layout.to(kind, **sizes, **changes)


def kv_heads_of(layout: Layout) -> int:
    """Key/value heads; without a field for them one for each query head.

    >>> kv_heads_of(Standard(width=8, num_heads=4, num_kv_heads=2))
    2
    """
    return layout.size("num_kv_heads") if hasattr(layout, "num_kv_heads") else layout.num_heads


def reads_slices(layout: Layout) -> bool:
    """Does head n read slice n of x, so that its place matters?"""
    sliced = any("slice_width" in weight.axes for weight in all_weights(layout).values())
    return sliced and not isinstance(layout, Alt)


def has_norms(layout: Layout) -> bool:
    """Is there a norm, of queries and keys or of a latent?"""
    return any(name.endswith("_norm") for name in all_weights(layout))


def untied(layout: Layout) -> Layout:
    """The canonical layout with a projection of its own for each of q, k and v."""
    if isinstance(layout, Separate) and layout.tie and type(layout) in BUILT_IN:
        return canonical(layout.untied().layout)
    return layout


def changed(layout: LayoutT, **changes: object) -> LayoutT | None:
    """The layout with other fields; None where they do not fit each other."""
    try:
        return layout.to(type(layout), **changes)
    except ValueError:
        return None


def extra_of(layout: Layout, kind: type[ExtraT]) -> ExtraT | None:
    """The extra of this class, if the layout has one."""
    return next((extra for extra in layout.extras if isinstance(extra, kind)), None)


def axes(layout: Layout) -> dict[str, tuple[str | int, ...]]:
    """Axes of every weight, with names for the head axes of extra keys and values."""
    made = {name: weight.axes for name, weight in all_weights(layout).items()}
    for name, merged in (
        ("extra_k", (Absorbed, LatentAbsorbed, Collaborative, Bilinear)),
        ("extra_v", (Absorbed, LatentAbsorbed)),
    ):
        if name in made and not isinstance(layout, merged):
            count, _, width = made[name]
            head = "num_kv_heads" if hasattr(layout, "num_kv_heads") else "num_heads"
            made[name] = (count, head, width)
    return made


class Goal(NamedTuple):
    """The goal of a search."""

    tied: Layout
    """The target, canonical."""
    untied: Layout
    """The target with a projection of its own for each of q, k and v."""
    call: CallOptions

    def nearly(self, layout: Layout) -> bool:
        """Does it differ from the goal only in what the last steps add: biases and scale?"""
        goal = self.untied
        if type(layout) is not type(goal) or set(layout.biases) - set(goal.biases):
            return False
        if goal.scale == 0 != layout.scale:
            return False
        return changed(layout, biases=goal.biases, scale=goal.scale) == goal
