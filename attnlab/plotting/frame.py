"""What figures have in common: colours, a frame without state, SVG that is the same each time."""

import io
import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from attnlab.extras import extra

INK, GRID, PAPER = "#222222", "#d8d8d8", "#ffffff"
# Okabe and Ito 2008, https://jfly.uni-koeln.de/color, without black and yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")

SIZE = (
    4.7,
    3.6,
)  # inches: about as many points as a phone has pixels, so letters keep their size
LETTERS = 10


class Style(NamedTuple):
    """How a series looks."""

    colour: str
    dashes: str
    marker: str
    hollow: bool


class Curve(NamedTuple):
    """A loss over steps, one row per seed. The range of the axes leaves broken curves out."""

    label: str
    style: Style
    steps: Int[np.ndarray, " P"]
    values: Float[np.ndarray, "S P"]
    broken: bool


class Point(NamedTuple):
    """A value at x with its spread to both sides (NaN: not known)."""

    label: str
    style: Style
    x: float
    y: float
    spread: float


class Interval(NamedTuple):
    """A difference with the ends of its interval (NaN: not known)."""

    label: str
    style: Style
    mean: float
    low: float
    high: float


class Bar(NamedTuple):
    """A value with its spread to both sides (NaN: not known)."""

    label: str
    style: Style
    value: float
    spread: float


def style(colour: int, pattern: int) -> Style:
    """The `colour`-th colour with the `pattern`-th dashes and marker; both go round."""
    return Style(
        COLOURS[colour % len(COLOURS)],
        DASHES[pattern % len(DASHES)],
        MARKERS[pattern % len(MARKERS)],
        pattern % 2 == 1,
    )


def new_figure(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    """A figure that no global state knows, and its quiet axes [rows, columns]."""
    with extra("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.tick_params(which="both", labelcolor=INK, color=GRID, labelsize=LETTERS)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(fontsize=LETTERS, color=INK)
    return figure, grid


def marker_of(look: Style, size: float) -> dict[str, Any]:
    return {
        "marker": look.marker,
        "markersize": size,
        "markerfacecolor": PAPER if look.hollow else look.colour,
        "markeredgecolor": look.colour,
        "markeredgewidth": 1.4,
    }


def svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element that loads nothing and is the same each time.

    `name` keeps its inner ids apart from those of other figures on one page. Text stays text.
    """
    import matplotlib

    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", text)
