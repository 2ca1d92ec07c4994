"""Transparent figures for Markdown pages: ink follows the light or dark theme of the reader."""

import re
from typing import TYPE_CHECKING

from attnlab.extras import extra
from attnlab.plotting.style import to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#57606a"
"""Grey that is legible on white and black. SVG text takes `currentColor` instead."""
THEMED_COLOURS = ("#3b8fd4", "#d55e00", "#12a17a", "#cc79a7", "#e69f00")
"""Legible on both themes."""


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
    with extra("plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(4.7, height * rows), layout="constrained", facecolor="none")
    grid: list[Axes] = list(figure.subplots(rows, 1, squeeze=False)[:, 0])
    for axes in grid:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(which="both", colors=INK)
        axes.grid(color=INK, alpha=0.2, linewidth=0.6)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.title.set_color(INK)
    return figure, grid


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
