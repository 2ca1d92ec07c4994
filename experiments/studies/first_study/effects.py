"""The figure of the main answer.

Three forest plots of differences in held-out bits per byte. From docs/results/head_width/runs.csv
(D = 64): head widths at equal FLOPs and parameters (stage 3), and sharing plans at equal parameters
and at equal FLOPs (stage 5). From docs/results/heads_and_sharing.csv: wide heads, narrow heads and
sharing at equal parameters, FLOPs and seconds.

A difference is paired by text and seed, then averaged over the seeds of a text. The 95 % interval
is Student's t over texts; in the panels of the head-width study it is not narrower than that of the
variance pooled over comparisons, as in the registered analysis.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from attnlab.lab.text_table import counted
from attnlab.report.style import INK, themed_svg
from experiments.studies.first_study.study import read_table
from experiments.studies.head_width import hypotheses
from experiments.studies.head_width.analysis import over_texts
from experiments.studies.head_width.rows import read_rows

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BUDGETS = {"parameters": ("o", "#3b8fd4"), "flops": ("s", "#d55e00"), "seconds": ("^", "#12a17a")}
"""What is equal -> marker and colour."""
SHARED = {
    "albert": "all layers shared", "cycle:2": "two sets in turn",
    "attention_only": "attention shared", "ffn_only": "FFN shared",
}  # fmt: skip
"""Sharing plan -> its label."""


class Effect(NamedTuple):
    """A mean difference with its 95 % interval over texts."""

    label: str
    budget: str
    mean: float
    low: float
    high: float


def intervals(differences: Mapping[tuple[str, str], Series]) -> list[Effect]:
    """(label, budget) -> differences by text; the interval of each.

    >>> [one] = intervals({("wide", "flops"): {"a": [0.1], "b": [0.2], "c": [0.3]}})
    >>> f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})"
    '0.200 (-0.048 to 0.448)'
    """
    found = {key: over_texts(pairs) for key, pairs in differences.items()}
    return [Effect(*key, e.value, e.low, e.high) for key, e in found.items()]


def head_widths(study: hypotheses.Study) -> list[Effect]:
    """Effects of the head-width study on N h = D, against 4 heads of 16 in layout `standard`."""
    points = {f"{counted(64 // h, 'head')} of {h}": f"{64 // h}x{h}" for h in (4, 8, 32, 64)}
    points |= {f"{64 // h} heads of {h}, narrow": f"{64 // h}x{h} narrow" for h in (8, 16)}
    found = {label: hypotheses.difference(study, 64, point) for label, point in points.items()}
    return [Effect(label, "flops", e.value, e.low, e.high) for label, e in found.items()]


def shared_layers(study: hypotheses.Study) -> list[Effect]:
    """Effects of the sharing plans of the head-width study, against separate layers."""
    costs = {budget: hypotheses.sharing_costs(study, budget) for budget in ("parameters", "flops")}
    return [
        Effect(label, budget, of[plan].value, of[plan].low, of[plan].high)
        for budget, of in costs.items()
        for plan, label in SHARED.items()
    ]


def budgets(rows: DataFrame) -> list[Effect]:
    """Effects of the first study, seeds 0 to 2: layouts averaged over plans, plans over layouts."""
    rows = rows[rows["seed"] <= 2]
    compared = {
        "wide heads (4 of 64)": ("layout", "wide", "standard"),
        "narrow heads": ("layout", "narrow", "standard"),
        SHARED["albert"]: ("sharing", "albert", "separate"),
        SHARED["cycle:2"]: ("sharing", "cycle:2", "separate"),
    }
    found: dict[tuple[str, str], Series] = {}
    for label, (column, one, other) in compared.items():
        for budget in BUDGETS:
            of_budget = rows[rows["match"] == budget]
            mean = of_budget.groupby([column, "text"])["heldout_bits_per_byte"].mean()
            found[label, budget] = mean[one] - mean[other]
    return intervals(found)


def draw(widths: list[Effect], sharing: list[Effect], first: list[Effect]) -> str:
    """The three panels as SVG; its ink follows the theme of the reader."""
    figure = Figure(figsize=(4.9, 8.4), layout="constrained", facecolor="none")
    rows = [len({e.label for e in effects}) for effects in (widths, sharing, first)]
    heights = [rows[0] + 1, 1.4 * rows[1] + 1, 1.4 * rows[2] + 1]
    panels = figure.subplots(3, 1, height_ratios=heights)
    titles = (
        "Head widths against 4 heads of 16 (rotary, Muon),\nequal FLOPs and parameters, 8 texts",
        "Shared against separate layers (rotary, Muon),\nheads of 16 and 32, 2 budgets, 4 texts",
        "First study (learned positions, AdamW): against\nstandard or separate, 3 budgets, 3 texts",
    )
    for axes, effects, title in zip(panels, (widths, sharing, first), titles, strict=True):
        forest(axes, effects)
        axes.set_title(title, fontsize=10, color=INK, loc="left", x=-0.3)
    panels[2].set_xlabel("difference in bits per byte (left is better)", x=0.3)
    _add_legend(figure, panels[2])
    return svg(figure, "effects")


def draw_summary(widths: list[Effect], sharing: list[Effect]) -> str:
    """Head widths and shared layers of the head-width study, in one scale, as SVG."""
    figure = Figure(figsize=(4.9, 4.2), layout="constrained", facecolor="none")
    axes = figure.subplots()
    forest(axes, [effect for effect in widths if "narrow" not in effect.label] + sharing)
    axes.set_xlabel("bits per byte more than 4 heads of 16, or than separate layers", x=0.3)
    _add_legend(figure, axes)
    return svg(figure, "summary")


def _add_legend(figure: Figure, axes: Axes) -> None:
    """What is equal, below the axes."""
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), [f"equal {name.replace('flops', 'FLOPs')}" for name in named],
        frameon=False, fontsize=9.5, labelcolor=INK, loc="outside lower center", ncols=3,
        columnspacing=1, handletextpad=0.2,
    )  # fmt: skip


def forest(axes: Axes, effects: list[Effect]) -> None:
    """One line per label from the top, one marker per budget."""
    labels = list(dict.fromkeys(effect.label for effect in effects))
    shown = list(dict.fromkeys(effect.budget for effect in effects))
    for effect in effects:
        marker, colour = BUDGETS[effect.budget]
        y = labels.index(effect.label) + 0.22 * (shown.index(effect.budget) - (len(shown) - 1) / 2)
        axes.plot([effect.low, effect.high], [y, y], color=colour, linewidth=1.6)
        axes.plot(effect.mean, y, marker, color=colour, markersize=5.5, label=effect.budget)
    axes.axvline(0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_facecolor("none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=INK, alpha=0.2, linewidth=0.6)
    axes.xaxis.label.set_color(INK)


def svg(figure: Figure, name: str) -> str:
    """The same bytes each time, in the font of the reader."""
    text = themed_svg(figure, name)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)


def write(path: Path) -> None:
    """Prints the effects, writes the figure and beside it summary.svg."""
    study = hypotheses.read_study(read_rows(RESULTS / "head_width" / "runs.csv"))
    widths, sharing, first = head_widths(study), shared_layers(study), budgets(read_table())
    for effect in widths + sharing + first:
        ends = f"{effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f})"
        print(f"{effect.label}, equal {effect.budget}: {ends}")
    path.write_text(draw(widths, sharing, first))
    path.with_name("summary.svg").write_text(draw_summary(widths, sharing))
