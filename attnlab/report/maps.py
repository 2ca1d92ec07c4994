"""Attention maps and tables of head statistics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from attnlab.report.style import COLOURS, FONT_SIZE, FOREGROUND, GRID, SIZE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL_FONT = 9
TOKEN_HEIGHT = 0.135
"""Inches of a token label in the small font."""


def attention_map(
    probs: np.ndarray,
    layers: Sequence[str],
    heads: Sequence[str],
    tokens: Sequence[str] | None,
    keys: Sequence[str] | None,
) -> "Figure":
    """A grid of attention maps, one row per layer and one column per head, with a scale below.

    The opacity of a cell is the square root of its probability, so that small probabilities show
    and zero is the background.

    Args:
      probs: attention probabilities [L, N, T, S].
      layers, heads: their names.
      tokens, keys: query and key tokens, written at the left and below the grid; None: neither.
    """
    rows, columns, *lengths = probs.shape
    cell = min(1.0, max(4.0 / columns, 0.62))
    if tokens is not None:
        cell = max(cell, TOKEN_HEIGHT * max(lengths) + 0.1)
    longest = max([0, *map(len, [*(tokens or ()), *(keys or ())])])
    margin = 0.6 * SMALL_FONT / 72 * longest
    size = columns * cell + 0.7 + margin, rows * cell + 1.5 + margin
    figure, grid = new_figure(*size, rows, columns)
    for i, j in np.ndindex(rows, columns):
        at_edge = tokens if j == 0 else None, keys if i == rows - 1 else None
        _draw_map(grid[i][j], probs[i, j], at_edge)
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(name, fontsize=FONT_SIZE, color=FOREGROUND)
    for line, name in zip(grid, layers, strict=True):
        line[0].set_ylabel(name, fontsize=FONT_SIZE, color=FOREGROUND)
    grid[-1][0].set_xlabel("keys →", fontsize=FONT_SIZE, color=FOREGROUND, loc="left")
    figure.supylabel("← queries", fontsize=FONT_SIZE, color=FOREGROUND)
    _colour_scale(figure, grid)
    return figure


def _draw_map(axes: "Axes", probs: np.ndarray, labels: Sequence[Sequence[str] | None]) -> None:
    """One map, square whatever its shape, with labels at queries and at keys."""
    axes.imshow(_rgba(probs), interpolation="none", aspect="auto")
    axes.set(xticks=[], yticks=[])
    # A dollar would start a formula.
    queries, keys = ([w.replace("$", r"\$") for w in some or ()] for some in labels)
    if queries:
        axes.set_yticks(range(len(queries)), queries, fontsize=SMALL_FONT, color=FOREGROUND)
    if keys:
        axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=SMALL_FONT, color=FOREGROUND)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_box_aspect(1)
    axes.spines[:].set(visible=True, color=GRID)


class HeadTable(NamedTuple):
    """A statistic of every head."""

    title: str
    """Above the table."""
    values: Float[np.ndarray, "L N"]
    """NaN where a head has no value."""
    maximum: float
    """The value of full colour; a value of 0 has none."""
    digits: int
    """Decimals of a number."""


def head_tables(tables: Sequence[HeadTable], layers: Sequence[str]) -> "Figure":
    """Small tables of numbers, one row per layer and one column per head. NaN stays empty; for more
    than eight heads only colours are drawn.

    Args:
      tables: at least one, all of the same numbers of layers and heads; two stand beside each
        other.
      layers: the name of each layer.
    """
    rows, columns = tables[0].values.shape
    down = -(-len(tables) // 2)
    figure, grid = new_figure(SIZE[0], down * (0.19 * rows + 0.62), down, 2)
    for i, axes in enumerate(axes for line in grid for axes in line):
        if i >= len(tables):
            axes.set_axis_off()
            continue
        table = tables[i]
        values = np.asarray(table.values, np.float64)
        share = np.nan_to_num(values / max(table.maximum, 1e-9))
        # At most a third, so that text on it can be read.
        axes.imshow(_rgba(share / 3), interpolation="none", aspect="auto")
        axes.set_xticks(range(columns), list(map(str, range(columns))))
        axes.set_yticks(range(rows), layers if i % 2 == 0 else [""] * rows)
        axes.tick_params(length=0, labelsize=SMALL_FONT)
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, color=GRID)
        axes.set_title(table.title, fontsize=SMALL_FONT, color=FOREGROUND, loc="left")
        for y, x in np.ndindex(rows, columns) if columns <= 8 else ():
            if not np.isnan(values[y, x]):
                number = f"{values[y, x]:.{table.digits}f}"
                text = axes.text(x, y, number, fontsize=SMALL_FONT, color=FOREGROUND)
                text.set(ha="center", va="center")
    return figure


def _rgba(probs: np.ndarray) -> np.ndarray:
    """[..., T, S] -> RGBA whose opacity is the square root of the probability."""
    from matplotlib.colors import to_rgb

    opacity = np.sqrt(np.clip(probs.astype(np.float64), 0, 1))
    rgb = np.broadcast_to(to_rgb(COLOURS[0]), (*probs.shape, 3))
    return np.concatenate([rgb, opacity[..., None]], -1)


def _colour_scale(figure: "Figure", grid: "list[list[Axes]]") -> None:
    """A colour bar below the grid."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb

    rgb = to_rgb(COLOURS[0])
    colours = LinearSegmentedColormap.from_list("opacity", [(*rgb, 0.0), (*rgb, 1.0)])
    bar = figure.colorbar(
        ScalarMappable(PowerNorm(0.5, 0, 1), colours),
        ax=[axes for line in grid for axes in line],
        location="bottom",
        shrink=min(0.6, SIZE[0] / figure.get_figwidth()),
        aspect=30,
        ticks=[0, 0.1, 0.5, 1],
    )
    bar.ax.set_xticklabels(["0", "0.1", "0.5", "1"])
    bar.ax.tick_params(labelcolor=FOREGROUND, color=GRID, labelsize=FONT_SIZE)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=FONT_SIZE, color=FOREGROUND)
