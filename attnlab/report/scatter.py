"""Scatter plots with error bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnlab.report.labels import label_points
from attnlab.report.style import (
    FONT_SIZE,
    FOREGROUND,
    SIZE,
    Point,
    Style,
    marker_options,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def scatter_with_front(
    points: Sequence[Point],
    front: Sequence[Point],
    legend: Sequence[tuple[str, Style]],
    xlabel: str,
    ylabel: str,
) -> "Figure":
    """A scatter plot of too many points to label each.

    Args:
      points: all points.
      front: those to connect by steps and to label, from left to right.
      legend: (name, style) pairs that explain colours and markers.
      xlabel, ylabel: of the axes; x is logarithmic if it is above 0 and spans more than a factor
        of 5.

    >>> from attnlab.report.style import style
    >>> point = Point("a", style(0, 0), 1.0, 2.0, 0.1)
    >>> figure = scatter_with_front([point], [point], [("a", style(0, 0))], "FLOPs", "loss")
    >>> figure.axes[0].get_ylabel()
    'loss'
    """
    from matplotlib.lines import Line2D

    rows = (len(legend) + 1) // 2
    figure, [[axes]] = new_figure(SIZE[0], SIZE[1] + 0.3 + 0.22 * rows)
    draw_points(axes, points)
    axes.plot(
        [p.x for p in front], [p.y for p in front], zorder=1, color=FOREGROUND, linewidth=1.0,
        linestyle=":", drawstyle="steps-post",
    )  # fmt: skip
    axes.set(xlabel=xlabel, ylabel=ylabel)
    marks = [
        Line2D([], [], color=look.colour, linestyle="none", **marker_options(look, 6.0))
        for _, look in legend
    ]
    below = figure.legend(
        marks, [name for name, _ in legend], ncols=2, loc="outside lower left", frameon=False,
        fontsize=FONT_SIZE, labelcolor=FOREGROUND, handletextpad=0.3, columnspacing=1.2,
    )  # fmt: skip
    below.set_in_layout(True)
    label_points(axes, points, named=front)
    return figure


def scatter(points: Sequence[Point], xlabel: str, ylabel: str) -> "Figure":
    """A labelled scatter plot; x is logarithmic if it is above 0 and spans more than a factor of 5.

    Args:
      points: at least one.
      xlabel: of the x axis.
      ylabel: of the y axis.

    >>> from attnlab.report.style import style
    >>> scatter([Point("a", style(0, 0), 1.0, 2.0, 0.1)], "FLOPs", "loss").axes[0].get_ylabel()
    'loss'
    """
    figure, [[axes]] = new_figure(*SIZE)
    draw_points(axes, points)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_points(axes, points)
    return figure


def draw_points(axes: "Axes", points: Sequence[Point]) -> None:
    """Draws markers with error bars, on a logarithmic x axis if all x are above 0 and span a factor
    of 5."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    for point in points:
        axes.errorbar(
            point.x,
            point.y,
            yerr=point.spread,
            color=point.style.colour,
            linestyle="none",
            elinewidth=1.2,
            capsize=2.5,
            **marker_options(point.style, 7.0),
        )
    xs = [p.x for p in points]
    if max(xs) > 5 * min(xs) > 0:
        axes.set_xscale("log")
        # Over many decades, label powers of ten only.
        several = max(xs) > 300 * min(xs)
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if several else (1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(0.14, 0.14)
