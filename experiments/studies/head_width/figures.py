"""Figures of the head-width study as SVG that is legible on light and dark pages."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.head_width.mixed_model import Array, Estimate

BASELINES = {"unigram": "unigram", "ngram3": "3-gram", "ngram4": "4-gram", "ngram5": "5-gram",
             "gzip": "gzip -9"}  # fmt: skip
"""Column of rows -> name."""
DASHES = {"unigram": "-", "ngram3": ":", "ngram4": "--", "ngram5": "-.", "gzip": (0, (8, 3))}
TITLE_CHARACTERS = 68
"""Of a line of a title, as wide as its panel."""


class SizePanel(NamedTuple):
    """A model size of figure 1: loss by head_dim, and baselines."""

    width: int
    parameters: int
    reference: int
    """The head_dim with which the others are compared."""
    level: float
    """Its loss, without an interval."""
    differences: Mapping[int, Estimate]
    """head_dim -> the difference from it."""
    baselines: Mapping[str, float]


def _head_dims(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(values)), [str(v) for v in sorted(set(values))])
    axes.set_xlabel("head_dim")


def _ticks(values: Sequence[float], low: float, high: float) -> tuple[list[float], list[str]]:
    """Those between the ends of an axis, and their labels."""
    inside = [value for value in values if low <= value <= high]
    return inside, [f"{value:g}" for value in inside]


def _losses(axes: Axes, panel: SizePanel) -> None:
    level, differences = panel.level, panel.differences
    values = {panel.reference: level} | {h: level + d.value for h, d in differences.items()}
    x, colour = sorted(values), COLOURS[0]
    axes.plot(x, [values[h] for h in x], color=colour, linewidth=1.2, label="models")
    for h in x:
        axes.plot([h], [values[h]], "o", color=colour, markersize=5)
        if d := differences.get(h):
            axes.plot([h, h], [level + d.low, level + d.high], color=colour, linewidth=1.6)
    _head_dims(axes, x)


def loss_figure(panels: Sequence[SizePanel]) -> Figure:
    """Figure 1: loss over head_dim on N h = D, a panel per model size, baselines as lines."""
    figure, grid = new_axes(len(panels), 3.4)
    for axes, panel in zip(grid, panels, strict=True):
        _losses(axes, panel)
        low, high = axes.get_ylim()
        near = [y for y in panel.baselines.values() if low - 0.15 < y < high + 0.15]
        axes.set_ylim(min([low, *near]) - 0.01, max([high, *near]) + 0.02)
        outside = []
        for name, y in panel.baselines.items():
            if y not in near:
                outside.append(f"{BASELINES[name]} {y:.3f}")
                continue
            axes.axhline(y, color=INK, linestyle=DASHES[name], linewidth=1)
            axes.text(0.02, y, f"{BASELINES[name]} {y:.3f}", ha="left", va="bottom", color=INK,
                      fontsize=8, transform=axes.get_yaxis_transform())  # fmt: skip
        title = f"D = {panel.width}, {panel.parameters:,} parameters"
        note = textwrap.wrap(f"outside: {', '.join(outside)}", TITLE_CHARACTERS) if outside else []
        axes.set_title("\n".join([title, *note]), fontsize=8, color=INK, loc="left")
        axes.set_ylabel("held-out bits per byte")
    return figure


def surface_figure(u: Array, v: Array, bits: Array, points: Sequence[tuple[int, float]]) -> Figure:
    """Figure 2: the fitted surface at D = 64 in (h, N h / D), measured points marked."""
    figure, [axes] = new_axes(1)
    levels = np.arange(math.floor(bits.min() * 100), math.ceil(bits.max() * 100) + 1) / 100
    lines = axes.contour(2.0**u, 2.0**v, bits, levels, colors=COLOURS[0], linewidths=1.2)
    axes.clabel(lines, levels[:6], fmt="%.2f", fontsize=8)
    h, total = zip(*points, strict=True)
    axes.plot(h, total, "o", color=COLOURS[1], markersize=5, clip_on=False)
    _head_dims(axes, h)
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 1, 1.5], ["1/2", "1", "3/2"])
    axes.minorticks_off()
    axes.set_ylabel("num_heads × head_dim / width")
    return figure


def sharing_figure(multiples: Mapping[str, Estimate]) -> Figure:
    """Figure 3: the compute multiple of each sharing plan."""
    figure, [axes] = new_axes(1, 1.0 + 0.4 * len(multiples))
    for i, found in enumerate(list(multiples.values())[::-1]):
        axes.plot([found.low, found.high], [i, i], color=COLOURS[0], linewidth=1.8)
        axes.plot([found.value], [i], "o", color=COLOURS[0])
        axes.text(found.value, i + 0.18, f"{found.value:.2f}", color=INK, fontsize=9, ha="center")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(multiples)), list(multiples)[::-1])
    axes.set_ylim(-0.6, len(multiples) - 0.3)
    axes.set_xscale("log")
    low = min(0.8, *(found.low for found in multiples.values())) * 0.95
    high = max(1.25, *(found.high for found in multiples.values())) * 1.05
    axes.set_xlim(low, high)
    axes.set_xticks(*_ticks((0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100), low, high))
    axes.minorticks_off()
    axes.set_xlabel("compute multiple at equal loss")
    return figure


def rate_figure(cells: DataFrame) -> Figure:
    """Figure 4: the best learning rate over head_dim on N h = D, a line per model size and text."""
    figure, [axes] = new_axes(1)
    rates = np.exp(cells["log_rate"])
    for i, ((width, text), some) in enumerate(cells.groupby(["width", "text"], sort=False)):
        x = some["head_dim"].sort_values()
        label = f"D = {width}, {text}"
        axes.plot(x, rates[x.index], color=COLOURS[i], marker="os^D"[i % 4], label=label)
    _head_dims(axes, cells["head_dim"])
    axes.set_yscale("log")
    ticks = (0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05)
    axes.set_yticks(*_ticks(ticks, rates.min() * 0.7, rates.max() * 1.4))
    axes.set_ylim(rates.min() * 0.6, rates.max() * 1.5)
    axes.minorticks_off()
    axes.set_ylabel("best learning rate (Muon)")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure
