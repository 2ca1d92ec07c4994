"""The ratios of a suite as one figure: a panel per group, a row per case, a mark per peer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attnlab.plotting import BACKGROUND, COLOURS, FONT_SIZE, FOREGROUND, GRID, MARKERS
from experiments.benchmarks.measure import NOT_SLOWER, Case, Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 2
TWIN = {"color": "#888888", "marker": "|"}
Shown: TypeAlias = tuple[Case, list[Measurement]]
Style: TypeAlias = dict[str, Any]
"""Keywords of matplotlib."""


def ratios(results: Sequence[tuple[Case, Sequence[Measurement]]]) -> "Figure | None":
    """Time of ours / time of each peer with its interval, on a logarithmic axis; 1 is marked.

    The A/A pair stands in grey. Cases in which nothing was compared are left out; None where
    none is left.
    """
    from matplotlib.figure import Figure

    groups: dict[str, list[Shown]] = {}
    for case, rows in results:
        shown = [r for r in rows if r.ratio is not None and not r.ours]
        if shown and case.most_rounds is None:
            groups.setdefault(case.group, []).append((case, shown))
    if not groups:
        return None
    names = list(dict.fromkeys(r.name for r in _all(groups.values()) if not r.twin))
    styles = {name: _style(k) for k, name in enumerate(names)} | {"": TWIN}
    columns = min(MOST_COLUMNS, len(groups))
    panels = list(groups.items())
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(_places(cases)[1] for _, cases in line) for line in lines]
    figure = Figure(
        figsize=(4.7 * columns, 0.8 + sum(0.6 + 0.13 * n for n in heights)),
        layout="constrained",
        facecolor=BACKGROUND,
    )
    grid = figure.subplots(len(lines), columns, squeeze=False, sharex=True, height_ratios=heights)
    for axes in grid.flat:
        axes.set_visible(False)
    for line, places in zip(lines, grid, strict=True):
        for (group, cases), axes in zip(line, places, strict=False):
            axes.set_visible(True)
            _panel(axes, group, cases, styles)
    every = _all(groups.values())
    low = min(r.ratio.low if r.ratio else 1.0 for r in every)
    high = max(r.ratio.high if r.ratio else 1.0 for r in every)
    grid[0, 0].set_xlim(min(0.5, low / 1.1), max(2.0, high * 1.1))
    figure.supxlabel(
        "time, ours / this (below 1: ours is faster)", fontsize=FONT_SIZE, color=FOREGROUND
    )
    _legend(figure, styles)
    return figure


def _all(groups: Iterable[Sequence[Shown]]) -> list[Measurement]:
    return [row for cases in groups for _, rows in cases for row in rows]


def _places(cases: Sequence[Shown]) -> tuple[list[list[float]], float]:
    """Where each row of each case lies, with a gap between cases, and the height of it all."""
    places, y = [], 0.0
    for _, rows in cases:
        places.append([y + k for k in range(len(rows))])
        y += len(rows) + 1
    return places, y


def _panel(axes: "Axes", group: str, cases: Sequence[Shown], styles: Mapping[str, Style]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    places, height = _places(cases)
    axes.axvline(1.0, color=FOREGROUND, linewidth=1.0, zorder=1)
    axes.axvline(NOT_SLOWER, color=FOREGROUND, linewidth=0.8, linestyle=":", zorder=1)
    for (_, rows), ys in zip(cases, places, strict=True):
        for row, y in zip(rows, ys, strict=True):
            style = styles["" if row.twin else row.name]
            assert row.ratio is not None
            median, low, high = row.ratio
            axes.plot([low, high], [y, y], color=style["color"], linewidth=1.4, zorder=2)
            axes.plot(median, y, linestyle="none", markersize=4.5, zorder=3, **style)
        if ys[0]:
            axes.axhline(ys[0] - 1, color=GRID, linewidth=0.8)
    axes.set_yticks([(ys[0] + ys[-1]) / 2 for ys in places], [case.label for case, _ in cases])
    axes.set_ylim(height - 1, -1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(which="both", labelcolor=FOREGROUND, color=GRID, labelsize=FONT_SIZE - 1)
    axes.tick_params(axis="x", labelbottom=True)
    axes.tick_params(axis="y", length=0)
    axes.grid(color=GRID, linewidth=0.6, axis="x")
    axes.set_axisbelow(True)
    axes.set_title(group, fontsize=FONT_SIZE, color=FOREGROUND, loc="left")


def _style(k: int) -> Style:
    return {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}


def _legend(figure: "Figure", styles: Mapping[str, Style]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", label=name or "one peer twice", **style)
        for name, style in styles.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=min(4, len(handles)),
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=FOREGROUND,
        handletextpad=0.1,
        columnspacing=1.2,
    )
