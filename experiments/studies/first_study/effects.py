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
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from attnlab.lab.text_table import counted
from attnlab.report.style import INK, themed_svg
from experiments.studies.first_study.study import read_table
from experiments.studies.head_width import hypotheses
from experiments.studies.head_width.analysis import over_texts
from experiments.studies.head_width.mixed_model import Estimate
from experiments.studies.head_width.rows import read_rows
from experiments.studies.head_width.tables import ends

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BUDGETS = {"parameters": ("o", "#3b8fd4"), "flops": ("s", "#d55e00"), "seconds": ("^", "#12a17a")}
"""What is equal -> marker and colour."""
FONT_SIZE = 12
"""Points: a phone shows a figure at three quarters of its size."""
SHARED = {
    "albert": "all layers shared", "cycle:2": "two sets in turn",
    "attention_only": "attention shared", "ffn_only": "FFN shared",
}  # fmt: skip
"""Sharing plan -> its label."""


class Effect(NamedTuple):
    """A mean difference with its 95 % interval over texts."""

    label: str
    budget: str
    found: Estimate


def head_widths(study: hypotheses.Study) -> list[Effect]:
    """Effects of the head-width study on N h = D, against 4 heads of 16 in layout `standard`."""
    points = {f"{counted(64 // h, 'head')} of {h}": f"{64 // h}x{h}" for h in (4, 8, 32, 64)}
    points |= {f"{64 // h} heads of {h}, narrow": f"{64 // h}x{h} narrow" for h in (8, 16)}
    return [Effect(label, "flops", hypotheses.difference(study, 64, point))
            for label, point in points.items()]  # fmt: skip


def shared_layers(study: hypotheses.Study) -> list[Effect]:
    """Effects of the sharing plans of the head-width study, against separate layers."""
    costs = {budget: hypotheses.sharing_costs(study, budget) for budget in ("parameters", "flops")}
    return [Effect(label, budget, of[plan])
            for budget, of in costs.items() for plan, label in SHARED.items()]  # fmt: skip


def budgets(rows: DataFrame) -> list[Effect]:
    """Effects of the first study, seeds 0 to 2: layouts averaged over plans, plans over layouts."""
    compared = {
        "wide heads (4 of 64)": ("layout", "wide", "standard"),
        "narrow heads": ("layout", "narrow", "standard"),
        SHARED["albert"]: ("sharing", "albert", "separate"),
        SHARED["cycle:2"]: ("sharing", "cycle:2", "separate"),
    }
    found = []
    for label, (column, one, other) in compared.items():
        groups = rows[rows["seed"] <= 2].groupby(["match", column, "text"])
        means = groups["heldout_bits_per_byte"].mean()
        for budget in BUDGETS:
            gaps = means[budget, one] - means[budget, other]
            found.append(Effect(label, budget, over_texts(gaps)))
    return found


TITLES = (
    "Head widths against 4 heads of 16 (rotary, Muon),\nequal FLOPs and parameters, 8 texts",
    "Shared against separate layers (rotary, Muon),\nheads of 16 and 32, 2 budgets, 4 texts",
    "First study (learned positions, AdamW): against\nstandard or separate, 3 budgets, 3 texts",
)


def draw(widths: list[Effect], sharing: list[Effect], first: list[Effect]) -> str:
    """The three panels as SVG; its ink follows the theme of the reader."""
    rows = [len({e.label for e in effects}) for effects in (widths, sharing, first)]
    heights = [rows[0] + 1, 1.4 * rows[1] + 1, 1.4 * rows[2] + 1]
    figure = Figure(figsize=(4.9, 9.4), layout="constrained", facecolor="none")
    panels = figure.subplots(3, 1, height_ratios=heights)
    for axes, effects, title in zip(panels, (widths, sharing, first), TITLES, strict=True):
        forest(axes, effects)
        axes.set_title(title, fontsize=FONT_SIZE, color=INK, loc="left", x=-0.48)
    return finished(figure, panels[2], "difference in bits per byte\n(left is better)", "effects")


def draw_summary(widths: list[Effect], sharing: list[Effect]) -> str:
    """Head widths and shared layers of the head-width study, in one scale, as SVG."""
    figure = Figure(figsize=(4.9, 4.6), layout="constrained", facecolor="none")
    axes = figure.subplots()
    forest(axes, [effect for effect in widths if "narrow" not in effect.label] + sharing)
    label = "bits per byte more than 4 heads of 16,\nor than separate layers"
    return finished(figure, axes, label, "summary")


def finished(figure: Figure, axes: Axes, label: str, name: str) -> str:
    """The figure with a legend of what is equal below its lowest axes, as SVG: the same bytes each
    time, in the font of the reader."""
    axes.set_xlabel(label, x=0.3, fontsize=FONT_SIZE)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), [f"equal {name.replace('flops', 'FLOPs')}" for name in named],
        frameon=False, fontsize=FONT_SIZE, labelcolor=INK, loc="outside lower center", ncols=2,
        columnspacing=1, handletextpad=0.2,
    )  # fmt: skip
    text = themed_svg(figure, name)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    return re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)


def forest(axes: Axes, effects: list[Effect]) -> None:
    """One line per label from the top, one marker per budget."""
    labels = list(dict.fromkeys(effect.label for effect in effects))
    for label, budget, found in effects:
        marker, colour = BUDGETS[budget]
        shown = [effect.budget for effect in effects if effect.label == label]
        y = labels.index(label) + 0.22 * (shown.index(budget) - (len(shown) - 1) / 2)
        axes.plot([found.low, found.high], [y, y], color=colour, linewidth=1.6)
        axes.plot(found.value, y, marker, color=colour, markersize=5.5, label=budget)
    axes.axvline(0, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_facecolor("none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)
    axes.tick_params(colors=INK, labelsize=FONT_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=INK, alpha=0.2, linewidth=0.6)
    axes.xaxis.label.set_color(INK)


def write(path: Path) -> None:
    """Prints the effects, writes the figure and beside it summary.svg."""
    study = hypotheses.read_study(read_rows(RESULTS / "head_width" / "runs.csv"))
    widths, sharing, first = head_widths(study), shared_layers(study), budgets(read_table())
    for label, budget, found in widths + sharing + first:
        print(f"{label}, equal {budget}: {ends(found, 3)}")
    path.write_text(draw(widths, sharing, first))
    path.with_name("summary.svg").write_text(draw_summary(widths, sharing))
