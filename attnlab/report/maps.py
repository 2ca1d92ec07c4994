"""Attention maps and tables of head statistics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from attnlab.report.style import COLOURS, FONT_SIZE, FOREGROUND, GRID, SIZE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL_FONT = 9
TOKEN_HEIGHT = 0.135
"""Inches of a token label in the small font."""


def attention_map(
    probs: Float[ArrayLike, "*L N T S"],
    layers: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    colour: str = COLOURS[0],
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    text: int = 0,
    outer_labels: bool = False,
) -> "Figure":
    """A grid of attention maps, one row per layer and one column per head, with a scale below.

    The opacity of a cell is the square root of its probability, so that small probabilities show
    and zero is the background.

    Args:
      probs: captured "probs" [L, B, N, T, S], or of one text [L, N, T, S] or [N, T, S].
      layers, heads: their names; None counts from 0.
      colour: of probability 1.
      tokens: query tokens, and key tokens unless `keys` is given.
      keys: key tokens.
      text: index of the text in [L, B, N, T, S].
      outer_labels: write tokens only at the left and bottom of the grid, not at every map.

    Raises:
      ValueError: shapes that do not fit.

    >>> figure = attention_map(np.tri(3)[None] / np.arange(1, 4)[:, None], tokens=["a", "b", "c"])
    >>> figure.axes[0].get_title()
    'head 0'
    """
    maps = np.asarray(probs)
    if maps.ndim not in (3, 4, 5):
        raise ValueError(f"probs {maps.shape} must be [L, B, N, T, S], [L, N, T, S] or [N, T, S]")
    if not maps.size:
        raise ValueError(f"probs {maps.shape} are empty")
    if maps.ndim == 5 and not -maps.shape[1] <= text < maps.shape[1]:
        raise ValueError(f"text {text} is not there; probs {maps.shape} have {maps.shape[1]} texts")
    maps = maps[:, text] if maps.ndim == 5 else maps.reshape(-1, *maps.shape[-3:])
    rows, columns, *lengths = maps.shape
    layers = [f"layer {i}" for i in range(rows)] if layers is None else layers
    heads = [f"head {i}" for i in range(columns)] if heads is None else heads
    labels = [
        None if some is None else list(map(str, some))
        for some in (tokens, tokens if keys is None else keys)
    ]
    for name, some, length in (
        ("layers", layers, rows),
        ("heads", heads, columns),
        ("tokens", labels[0], lengths[0]),
        ("keys", labels[1], lengths[1]),
    ):
        if some is not None and len(some) != length:
            raise ValueError(f"{len(some)} {name} do not fit probs {maps.shape}: give {length}")
    figure, grid = new_figure(*_figure_size(maps.shape, labels, outer_labels), rows, columns)
    for i, j in np.ndindex(rows, columns):
        at_edge = (not outer_labels or j == 0, not outer_labels or i == rows - 1)
        here = [some if at else None for some, at in zip(labels, at_edge, strict=True)]
        _draw_map(grid[i][j], maps[i, j], colour, here)
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(name, fontsize=FONT_SIZE, color=FOREGROUND)
    for line, name in zip(grid, layers, strict=True):
        line[0].set_ylabel(name, fontsize=FONT_SIZE, color=FOREGROUND)
    grid[-1][0].set_xlabel("keys →", fontsize=FONT_SIZE, color=FOREGROUND, loc="left")
    figure.supylabel("← queries", fontsize=FONT_SIZE, color=FOREGROUND)
    _colour_scale(figure, grid, colour)
    return figure


def _figure_size(
    shape: tuple[int, ...], labels: Sequence[Sequence[str] | None], outer_labels: bool
) -> tuple[float, float]:
    """Inches, with space for "head 12" above each map and for tokens."""
    rows, columns, *lengths = shape
    cell = min(1.0, max(4.0 / columns, 0.62))
    if labels[0] is not None:
        per_token, more = (TOKEN_HEIGHT, 0.1) if outer_labels else (0.16, 0.5)
        cell = max(cell, per_token * max(lengths) + more)
    longest = max([0, *(len(word) for some in labels for word in some or ())])
    margin = 0.6 * SMALL_FONT / 72 * longest if outer_labels else 0.0
    return columns * cell + 0.7 + margin, rows * cell + 1.3 + margin + 0.2 * outer_labels


def _draw_map(
    axes: "Axes", probs: np.ndarray, colour: str, labels: Sequence[Sequence[str] | None]
) -> None:
    """One map, square whatever its shape, with labels at queries and at keys."""
    axes.imshow(_rgba(probs, colour), interpolation="none", aspect="auto")
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

    >>> table = HeadTable("entropy", np.ones((2, 4)), 1.0, 1)
    >>> len(head_tables([table], ["0", "1"]).axes)  # the table, and an empty place beside it
    2
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
        axes.imshow(_rgba(share / 3, COLOURS[0]), interpolation="none", aspect="auto")
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


def _rgba(probs: np.ndarray, colour: str) -> np.ndarray:
    """[..., T, S] -> RGBA whose opacity is the square root of the probability."""
    from matplotlib.colors import to_rgb

    opacity = np.sqrt(np.clip(probs.astype(np.float64), 0, 1))
    rgb = np.broadcast_to(to_rgb(colour), (*probs.shape, 3))
    return np.concatenate([rgb, opacity[..., None]], -1)


def _colour_scale(figure: "Figure", grid: "list[list[Axes]]", colour: str) -> None:
    """A colour bar below the grid."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb

    rgb = to_rgb(colour)
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
