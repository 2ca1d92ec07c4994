"""Several experiments in one scatter."""

from collections.abc import Sequence
from typing import Any

from attnlab.plot.frame import INK, LETTERS, SIZE, Point, Style, marker_of, new_figure
from attnlab.plot.labels import label_points


def joint(
    points: Sequence[Point],
    front: Sequence[Point],
    legend: Sequence[tuple[str, Style]],
    xlabel: str,
    ylabel: str,
) -> Any:
    """A scatter with error bars of more points than have room for names: those of `front`, from
    left to right, are joined by steps and named, and `legend` says below what the others' colours
    and markers mean. x is logarithmic where it spans more than a factor of 5.
    """
    from matplotlib.lines import Line2D

    rows = (len(legend) + 1) // 2
    figure, [[axes]] = new_figure(SIZE[0], SIZE[1] + 0.3 + 0.22 * rows, 1, 1)
    draw_points(axes, points)
    steps = {"color": INK, "linewidth": 1.0, "linestyle": ":", "drawstyle": "steps-post"}
    axes.plot([p.x for p in front], [p.y for p in front], zorder=1, **steps)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    marks = [
        Line2D([], [], color=look.colour, linestyle="none", **marker_of(look, 6.0))
        for _, look in legend
    ]
    told = figure.legend(
        marks, [name for name, _ in legend], ncols=2, loc="outside lower left", frameon=False,
        fontsize=LETTERS, labelcolor=INK, handletextpad=0.3, columnspacing=1.2,
    )  # fmt: skip
    told.set_in_layout(True)
    label_points(axes, points, named=front)
    return figure


def draw_points(axes: Any, points: Sequence[Point]) -> None:
    """Markers with error bars, and an x axis that suits their span."""
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
            **marker_of(point.style, 7.0),
        )
    xs = [p.x for p in points]
    if max(xs) > 5 * min(xs):
        axes.set_xscale("log")
        # Of many decades only the powers of ten have room.
        several = max(xs) > 300 * min(xs)
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if several else (1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(0.14, 0.14)
