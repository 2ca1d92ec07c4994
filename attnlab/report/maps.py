"""Attention maps and tables of head statistics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnlab.report.style import (
    BACKGROUND,
    COLOURS,
    FONT_SIZE,
    FOREGROUND,
    GRID,
    SIZE,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SMALL_FONT = 9
TOKEN_HEIGHT = 0.135
"""Inches of a token label in the small font."""


def attention_map(
    probs: np.ndarray,
    layers: Sequence[str],
    heads: Sequence[str],
    tokens: Sequence[str],
    keys: Sequence[str],
) -> "Figure":
    """A grid of attention maps, one row per layer and one column per head, with a scale below.

    The colour goes with the square root of the probability, so that small probabilities show.

    Args:
      probs: attention probabilities [L, N, T, S].
      layers, heads: their names.
      tokens, keys: query and key tokens, written at the left and below the grid.
    """
    rows, columns, *lengths = probs.shape
    cell = max(min(1.0, max(4.0 / columns, 0.62)), TOKEN_HEIGHT * max(lengths) + 0.1)
    margin = 0.6 * SMALL_FONT / 72 * max(map(len, [*tokens, *keys]))
    size = columns * cell + 0.7 + margin, rows * cell + 1.5 + margin
    figure, grid = new_figure(*size, rows, columns)
    # A dollar would start a formula.
    tokens, keys = ([word.replace("$", r"\$") for word in some] for some in (tokens, keys))
    for i, j in np.ndindex(rows, columns):
        axes = grid[i][j]
        image = _coloured(axes, probs[i, j])
        axes.set_box_aspect(1)
        axes.set(xticks=[], yticks=[])
        if j == 0:
            axes.set_yticks(range(len(tokens)), tokens, fontsize=SMALL_FONT, color=FOREGROUND)
            axes.set_ylabel(layers[i], fontsize=FONT_SIZE, color=FOREGROUND)
        if i == rows - 1:
            axes.set_xticks(
                range(len(keys)), keys, rotation=90, fontsize=SMALL_FONT, color=FOREGROUND
            )
        if i == 0:
            axes.set_title(heads[j], fontsize=FONT_SIZE, color=FOREGROUND)
    grid[-1][0].set_xlabel("keys →", fontsize=FONT_SIZE, color=FOREGROUND, loc="left")
    figure.supylabel("← queries", fontsize=FONT_SIZE, color=FOREGROUND)
    bar = figure.colorbar(
        image, ax=[axes for line in grid for axes in line], location="bottom", aspect=30,
        shrink=min(0.6, SIZE[0] / figure.get_figwidth()), ticks=[0, 0.1, 0.5, 1],
    )  # fmt: skip
    bar.ax.tick_params(labelcolor=FOREGROUND, color=GRID, labelsize=FONT_SIZE)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=FONT_SIZE, color=FOREGROUND)
    return figure


def _coloured(axes: "Axes", shares: np.ndarray) -> "AxesImage":
    """An image of shares: 0 has the colour of the paper, 1 the first colour."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("shares", [BACKGROUND, COLOURS[0]])
    axes.tick_params(length=0, labelsize=SMALL_FONT)
    axes.grid(visible=False)
    axes.spines[:].set(visible=True, color=GRID)
    return axes.imshow(
        shares, colours, norm=PowerNorm(0.5, 0, 1), interpolation="none", aspect="auto"
    )


class HeadTable(NamedTuple):
    """A statistic of every head."""

    title: str
    """Above the table."""
    values: np.ndarray
    """[L, N]; NaN where a head has no value."""
    maximum: float
    """The value of full colour; a value of 0 has none."""
    digits: int
    """Decimals of a number."""


def head_tables(tables: Sequence[HeadTable], layers: Sequence[str]) -> "Figure":
    """Small tables of numbers, one row per layer and one column per head; two stand beside each
    other. NaN stays empty; for more than eight heads only colours are drawn."""
    rows, columns = tables[0].values.shape
    down = -(-len(tables) // 2)
    figure, grid = new_figure(SIZE[0], down * (0.19 * rows + 0.62), down, 2)
    for axes in (axes for line in grid for axes in line):
        axes.set_axis_off()
    for i, table in enumerate(tables):
        axes = grid[i // 2][i % 2]
        axes.set_axis_on()
        # At most a ninth: a third of the colour, so that text on it can be read.
        _coloured(axes, (np.nan_to_num(table.values) / max(table.maximum, 1e-9)) ** 2 / 9)
        axes.set_xticks(range(columns), list(map(str, range(columns))))
        axes.set_yticks(range(rows), layers if i % 2 == 0 else [""] * rows)
        axes.set_title(table.title, fontsize=SMALL_FONT, color=FOREGROUND, loc="left")
        for (y, x), value in np.ndenumerate(table.values) if columns <= 8 else ():
            if not np.isnan(value):
                text = axes.text(x, y, f"{value:.{table.digits}f}", fontsize=SMALL_FONT)
                text.set(ha="center", va="center", color=FOREGROUND)
    return figure
