"""Shared by all figures: colours, axes without global state, reproducible SVG."""

import io
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from attnlab.extras import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOREGROUND, GRID, BACKGROUND = "#222222", "#d8d8d8", "#ffffff"
"""Colours of text, of the lines of the grid, and behind a figure."""
INK = "#57606a"
"""Grey that is legible on white and black. SVG text takes `currentColor` instead."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of series: Okabe and Ito 2008, https://jfly.uni-koeln.de/color, without black and yellow."""
THEMED_COLOURS = ("#3b8fd4", "#d55e00", "#12a17a", "#cc79a7", "#e69f00")
"""Legible on both themes."""
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
"""Of series, as matplotlib names them."""

SIZE = (4.7, 3.6)
"""Inches: about as many points wide as a phone has pixels, so text keeps its size."""
FONT_SIZE = 10
"""Points."""


Style: TypeAlias = dict[str, Any]
"""How a series looks: options of matplotlib for its line and its markers."""


def style(colour: int, pattern: int, ink: str = "") -> Style:
    """The style of a series by two numbers; both repeat, and odd patterns have hollow markers.

    Args:
      colour: index into `COLOURS`.
      pattern: index into the dashes and into `MARKERS`.
      ink: a colour in place of that of the index.

    >>> style(0, 0) == style(len(COLOURS), len(DASHES) * len(MARKERS))
    True
    """
    ink = ink or COLOURS[colour % len(COLOURS)]
    return {
        "color": ink,
        "linestyle": DASHES[pattern % len(DASHES)],
        "marker": MARKERS[pattern % len(MARKERS)],
        "markerfacecolor": BACKGROUND if pattern % 2 else ink,
        "markeredgecolor": ink,
        "markeredgewidth": 1.4,
    }


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, themed: bool = False
) -> tuple["Figure", "list[list[Axes]]"]:
    """A figure outside of pyplot's global state, and its axes [rows][columns]; `themed`: for
    `themed_svg`, transparent and all in `INK`."""
    with extra("plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    text, line = (INK, INK) if themed else (FOREGROUND, GRID)
    background = "none" if themed else BACKGROUND
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=background)
    with rc_context({"text.color": text, "axes.labelcolor": text}):  # titles at all places, too
        grid = figure.subplots(rows, columns, squeeze=False)
    axes: Axes
    for axes in grid.flat:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(line)
        axes.tick_params(which="both", labelcolor=text, color=line, labelsize=FONT_SIZE)
        axes.grid(color=line, linewidth=0.6, alpha=0.2 if themed else None)
        axes.set_axisbelow("line" if themed else True)
    return figure, grid.tolist()


def literal(text: str) -> str:
    """Text in which matplotlib finds no formula, whatever dollars it has."""
    return text.replace("$", r"\$")


def add_legend(figure: "Figure") -> None:
    """The labels of the lines on the only axes, below them."""
    lines = figure.axes[0].lines
    names = [str(line.get_label()) for line in lines]  # also those that begin with "_"
    columns = 2 if max(map(len, names)) < 24 else 1
    figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(names) // columns))
    figure.legend(
        lines,
        names,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=FOREGROUND,
    )


def to_svg(figure: "Figure", name: str) -> str:
    """The figure as an <svg> element, self-contained and reproducible. Text stays text.

    Args:
      figure: of any function of this package.
      name: makes its ids differ from those of other figures on a page.

    >>> to_svg(new_figure(2, 2)[0], "empty").startswith("<svg")
    True
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


def new_axes(rows: int, height: float = 3.2) -> tuple["Figure", "list[Axes]"]:
    """A transparent figure as wide as a phone, `rows` panels below each other.

    Args:
      rows: panels.
      height: inches of each.

    Returns:
      (figure, axes of each panel, from top to bottom).

    >>> figure, axes = new_axes(2)
    >>> len(axes)
    2
    """
    figure, grid = new_figure(SIZE[0], height * rows, rows, themed=True)
    return figure, [axes for [axes] in grid]


def themed_svg(figure: "Figure", name: str) -> str:
    """The figure as SVG, the same each time; what is drawn in `INK` follows the theme.

    Args:
      figure: of `new_axes`.
      name: as in `to_svg`.

    >>> "prefers-color-scheme:dark" in themed_svg(new_axes(1)[0], "empty")
    True
    """
    text = re.sub(INK, "currentColor", to_svg(figure, name), flags=re.IGNORECASE)
    style = (
        "<style>svg{color:#24292f;max-width:100%;height:auto}"
        "@media(prefers-color-scheme:dark){svg{color:#d8dee4}}</style>"
    )
    return text.replace(">", f">{style}", 1) + "\n"
