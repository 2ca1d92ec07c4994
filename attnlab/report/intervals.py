"""One row per variant: intervals, dots and bars."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnlab.report.style import (
    FONT_SIZE,
    FOREGROUND,
    SIZE,
    Bar,
    Interval,
    marker_options,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def interval_plot(rows: Sequence[Interval], xlabel: str) -> "Figure":
    """Mean differences with intervals, the first row on top, and a line at zero.

    Args:
      rows: differences.
      xlabel: the metric and its unit.

    >>> from attnlab.report.style import style
    >>> interval_plot([Interval("a", style(0, 0), 0.2, 0.1, 0.3)], "nats").axes[0].get_xlabel()
    'nats'
    """
    figure, [[axes]] = new_figure(SIZE[0], max(1.9, 0.9 + 0.38 * len(rows)))
    axes.axvline(0, color=FOREGROUND, linewidth=1)
    for y, row in enumerate(rows):
        axes.plot([row.low, row.high], [y, y], color=row.style.colour, linewidth=1.6)
        marker = marker_options(row.style, 7.0)
        axes.plot(row.mean, y, color=row.style.colour, linestyle="none", **marker)
    _name_rows(axes, rows, xlabel)
    return figure


def dot_plot(rows: Sequence[Bar], xlabel: str, digits: int = 3) -> "Figure":
    """Values with their spread, the first row on top, on an axis that need not start at zero.

    Args:
      rows: values, each written next to its dot.
      xlabel: the metric and its unit.
      digits: decimals of a value.

    >>> from attnlab.report.style import style
    >>> dot_plot([Bar("a", style(0, 0), 1.0, 0.1)], "nats").axes[0].get_xlabel()
    'nats'
    """
    figure, [[axes]] = new_figure(SIZE[0], max(1.9, 0.9 + 0.44 * len(rows)))
    for y, row in enumerate(rows):
        spread = float(np.nan_to_num(row.spread))
        axes.errorbar(
            row.value, y, xerr=spread or None, elinewidth=1.6, color=row.style.colour,
            linestyle="none", **marker_options(row.style, 7.0),
        )  # fmt: skip
        axes.annotate(
            f"{row.value:.{digits}f}", (row.value + spread, y), (6, 0), textcoords="offset points",
            va="center", fontsize=FONT_SIZE, color=FOREGROUND,
        )  # fmt: skip
    axes.margins(x=0.25)
    _name_rows(axes, rows, xlabel)
    return figure


def bar_plot(rows: Sequence[Bar], lines: Mapping[str, float], xlabel: str) -> "Figure":
    """Bars from zero, the first row on top, each with its value to one decimal.

    Args:
      rows: values.
      lines: name -> value of a dashed vertical line, such as a baseline.
      xlabel: the metric and its unit.

    >>> from attnlab.report.style import style
    >>> bar_plot([Bar("a", style(0, 0), 1.0, 0.1)], {"chance": 2.0}, "nats").axes[0].get_xlabel()
    'nats'
    """
    height = max(1.9, 0.9 + 0.38 * len(rows)) + 0.19 * len(lines)
    figure, [[axes]] = new_figure(SIZE[0], height)
    for y, row in enumerate(rows):
        spread = None if np.isnan(row.spread) else row.spread
        axes.barh(y, row.value, height=0.6, color=row.style.colour, alpha=0.75)
        axes.errorbar(row.value, y, xerr=spread, color=FOREGROUND, elinewidth=1.2, capsize=2.5)
        end = row.value + (spread or 0.0)
        axes.annotate(
            f"{row.value:.1f}", (end, y), (4, 0), textcoords="offset points",
            va="center", fontsize=FONT_SIZE, color=FOREGROUND,
        )  # fmt: skip
    spreads = [float(np.nan_to_num(r.spread)) for r in rows]
    ends = [r.value + sign * s for r, s in zip(rows, spreads, strict=True) for sign in (-1, 1)]
    ends = [end for end in [0.0, *ends, *lines.values()] if np.isfinite(end)]
    least, most = min(ends), max(ends)
    for step, (name, value) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        axes.axvline(value, color=FOREGROUND, linewidth=1, linestyle="--")
        left = value > most / 2  # its name is left of it
        axes.annotate(
            name,
            (value, 1),
            (-3 if left else 3, 4 + 13 * (len(lines) - 1 - step)),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=FONT_SIZE,
            color=FOREGROUND,
            annotation_clip=False,
        )
    has_negative = any(row.value < 0 for row in rows)
    axes.set_xlim(1.14 * least if has_negative else 0, 1.14 * most if most or has_negative else 1)
    _name_rows(axes, rows, xlabel)
    return figure


def _name_rows(axes: "Axes", rows: Sequence[Interval | Bar], xlabel: str) -> None:
    """Labels rows in their colours, the first on top."""
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.style.colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=xlabel)
