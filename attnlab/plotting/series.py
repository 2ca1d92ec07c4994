"""Numbers of arms: curves, scatters, intervals, bars, all labelled where they lie."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnlab.plot.frame import (
    INK,
    LETTERS,
    SIZE,
    Bar,
    Curve,
    Interval,
    Point,
    marker_of,
    new_figure,
)
from attnlab.plot.joint import draw_points
from attnlab.plot.labels import label_ends, label_points


def learning_curves(series: Sequence[Curve], ylabel: str) -> Any:
    """The mean over seeds as a line and min to max as a band, labelled at the right end.

    The range is that of the last three quarters: the fall at the start would flatten the rest.
    """
    # Many labels need a taller figure: 0.19 inches each, on 80 % of it.
    figure, [[axes]] = new_figure(SIZE[0], max(SIZE[1], 0.24 * len(series)), 1, 1)
    for curve in series:
        mean, look = curve.values.mean(0), curve.style
        band = curve.values.min(0), curve.values.max(0)
        axes.fill_between(curve.steps, *band, color=look.colour, alpha=0.18, linewidth=0)
        axes.plot(
            curve.steps,
            mean,
            color=look.colour,
            linestyle=look.dashes,
            linewidth=1.6,
            **marker_of(look, 4.0),
        )
    sound = [c for c in series if not c.broken] or series
    last = max(int(c.steps[-1]) for c in series)
    late = [c.values[:, c.steps >= min(last / 4, c.steps[-1])] for c in sound]
    values = np.concatenate([v.ravel() for v in late])
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(right=last)
    axes.set(xlabel="training step", ylabel=ylabel)
    axes.locator_params(axis="x", nbins=6, integer=True)
    label_ends(axes, series)
    return figure


def loss_against(points: Sequence[Point], xlabel: str, ylabel: str) -> Any:
    """A scatter with error bars; x is logarithmic where it spans more than a factor of 5."""
    figure, [[axes]] = new_figure(*SIZE, 1, 1)
    draw_points(axes, points)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_points(axes, points)
    return figure


def intervals(rows: Sequence[Interval], xlabel: str) -> Any:
    """One line a row with its interval, first row on top, and zero marked."""
    figure, [[axes]] = new_figure(SIZE[0], max(1.9, 0.9 + 0.38 * len(rows)), 1, 1)
    axes.axvline(0, color=INK, linewidth=1)
    for y, row in enumerate(rows):
        axes.plot([row.low, row.high], [y, y], color=row.style.colour, linewidth=1.6)
        axes.plot(
            row.mean,
            y,
            color=row.style.colour,
            linestyle="none",
            **marker_of(row.style, 7.0),
        )
    _name_rows(axes, rows, xlabel)
    return figure


def dots(rows: Sequence[Bar], xlabel: str, digits: int = 3) -> Any:
    """One dot a row with its spread, first row on top, its number with so many `digits` behind it:
    values that lie close together, on an axis that does not begin at zero."""
    figure, [[axes]] = new_figure(SIZE[0], max(1.9, 0.9 + 0.44 * len(rows)), 1, 1)
    for y, row in enumerate(rows):
        spread = float(np.nan_to_num(row.spread))
        look = dict(color=row.style.colour, linestyle="none", **marker_of(row.style, 7.0))
        axes.errorbar(row.value, y, xerr=spread or None, elinewidth=1.6, **look)
        axes.annotate(
            f"{row.value:.{digits}f}", (row.value + spread, y), (6, 0), textcoords="offset points",
            va="center", fontsize=LETTERS, color=INK,
        )  # fmt: skip
    axes.margins(x=0.25)
    _name_rows(axes, rows, xlabel)
    return figure


def bars(rows: Sequence[Bar], lines: dict[str, float], xlabel: str) -> Any:
    """One bar a row from zero, first row on top, its number behind it; each of `lines` is a dashed
    upright at its value, named above."""
    height = max(1.9, 0.9 + 0.38 * len(rows)) + 0.19 * len(lines)
    figure, [[axes]] = new_figure(SIZE[0], height, 1, 1)
    for y, row in enumerate(rows):
        spread = None if np.isnan(row.spread) else row.spread
        axes.barh(y, row.value, height=0.6, color=row.style.colour, alpha=0.75)
        axes.errorbar(row.value, y, xerr=spread, color=INK, elinewidth=1.2, capsize=2.5)
        end = row.value + (spread or 0.0)
        axes.annotate(
            f"{row.value:.1f}", (end, y), (4, 0), textcoords="offset points",
            va="center", fontsize=LETTERS, color=INK,
        )  # fmt: skip
    most = max([r.value + np.nan_to_num(r.spread) for r in rows] + list(lines.values()))
    for step, (name, value) in enumerate(sorted(lines.items(), key=lambda line: line[1])):
        axes.axvline(value, color=INK, linewidth=1, linestyle="--")
        left = value > most / 2  # its name lies to the left of it
        axes.annotate(
            name,
            (value, 1),
            (-3 if left else 3, 4 + 13 * (len(lines) - 1 - step)),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=LETTERS,
            color=INK,
            annotation_clip=False,
        )
    axes.set_xlim(0, 1.14 * most)
    _name_rows(axes, rows, xlabel)
    return figure


def _name_rows(axes: Any, rows: Sequence[Interval | Bar], xlabel: str) -> None:
    """Every row by its label in its colour, the first on top."""
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.style.colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=xlabel)


def over(
    series: Sequence[Curve],
    yardsticks: Sequence[Curve],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Any:
    """Values over a quantity that was varied: mean over seeds with lowest and highest, `yardsticks`
    as thin dotted lines. The quantity is shown by its own values, apart by their ratios; so are the
    values with `log`."""
    count = len(series) + len(yardsticks)
    figure, [[axes]] = new_figure(SIZE[0], max(SIZE[1], 0.24 * count), 1, 1)
    for number, curve in enumerate((*series, *yardsticks)):
        mean, look, quiet = curve.values.mean(0), curve.style, number >= len(series)
        apart = [mean - curve.values.min(0), curve.values.max(0) - mean] if not quiet else None
        axes.errorbar(
            curve.steps, mean, yerr=apart, color=look.colour, capsize=2.5,
            linestyle=":" if quiet else look.dashes, linewidth=1.0 if quiet else 1.6,
            **({} if quiet else marker_of(look, 6.0)),
        )  # fmt: skip
    ticks = sorted({int(x) for curve in series for x in curve.steps})
    axes.set_xscale("log")
    if log:
        axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, [*series, *yardsticks])
    return figure


def ratios(series: Sequence[Curve], xlabel: str, ylabel: str) -> Any:
    """Ratios of times over a size that doubles: `values` are the low end, the ratio and the high
    end, [3, P]. Both axes go by their logarithms, and 1 is marked: as fast."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, [[axes]] = new_figure(SIZE[0], max(SIZE[1], 0.24 * len(series)), 1, 1)
    axes.axhline(1.0, color=INK, linewidth=1.0)
    for curve in series:
        (low, middle, high), look = curve.values, curve.style
        axes.errorbar(
            curve.steps, middle, yerr=[middle - low, high - middle], color=look.colour, capsize=2.5,
            linestyle=look.dashes, linewidth=1.6, **marker_of(look, 6.0),
        )  # fmt: skip
    ticks = sorted({int(x) for curve in series for x in curve.steps})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0.8), max(top, 1.25))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, series)
    return figure


def parabolas(tried: Sequence[Curve], fitted: Sequence[Curve], xlabel: str, ylabel: str) -> Any:
    """Scores over a quantity shown by its logarithm: points, and lines that go through the best."""
    figure, [[axes]] = new_figure(SIZE[0], max(SIZE[1], 0.24 * len(tried)), 1, 1)
    for curve in tried:
        axes.plot(
            curve.steps, curve.values[0], color=curve.style.colour, linestyle="none",
            **marker_of(curve.style, 5.0),
        )  # fmt: skip
    for curve in fitted:
        axes.plot(
            curve.steps, curve.values[0], color=curve.style.colour, linewidth=1.4,
            linestyle=curve.style.dashes,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, tried)
    return figure


def ladder(
    measured: Sequence[Sequence[Curve]],
    fitted: Sequence[Sequence[Curve]],
    xlabels: Sequence[str],
    ylabel: str,
) -> Any:
    """Losses over several sizes, an axis each, both ways by their logarithms: points (mean over
    seeds, lowest to highest) and the laws that were fitted to them."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, ScalarFormatter

    rows = len(xlabels)
    each = max(2.5, 0.24 * len(measured[0]) + 0.6)
    figure, grid = new_figure(SIZE[0], each * rows, rows, 1)
    for axes, points, laws, xlabel in zip(grid[:, 0], measured, fitted, xlabels, strict=True):
        for curve in points:
            mean, look = curve.values.mean(0), curve.style
            apart = [mean - curve.values.min(0), curve.values.max(0) - mean]
            axes.errorbar(
                curve.steps, mean, yerr=apart, color=look.colour, linestyle="none",
                capsize=2.5, elinewidth=1.2, **marker_of(look, 6.0),
            )  # fmt: skip
        for curve in laws:
            look = curve.style
            axes.plot(
                curve.steps, curve.values[0], color=look.colour, linestyle=look.dashes,
                linewidth=1.4,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        label_ends(axes, points)
    return figure
