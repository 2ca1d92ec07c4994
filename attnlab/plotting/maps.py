"""Maps of attention: who looks at whom."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from attnlab.plot.frame import COLOURS, GRID, INK, LETTERS, SIZE, new_figure

SMALL = 7
"""Points of letters where many stand together."""


def attention_map(
    probs: Float[np.ndarray, "*L N T S"],
    layers: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    colour: str = COLOURS[0],
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    text: int = 0,
    outer: bool = False,
) -> Any:
    """A grid of maps, one row a layer and one column a head, with a scale below.

    A cell is as opaque as the square root of its probability, so that weak attention shows and
    no attention is the paper itself, light or dark. `probs` are those that a model shows,
    [L, B, N, T, S] of which `text` says which, or of one text [L, N, T, S] or [N, T, S].

    Args:
      layers, heads: what to call them; None counts from 1.
      tokens: what stands at the queries, and at the keys where `keys` says nothing else.
      outer: words stand at the outer sides of the grid alone, not at every map.
    """
    probs = np.asarray(probs)
    if probs.ndim not in (3, 4, 5):
        raise ValueError(f"probs {probs.shape} must be [L, B, N, T, S], [L, N, T, S] or [N, T, S]")
    probs = probs[:, text] if probs.ndim == 5 else probs.reshape(-1, *probs.shape[-3:])
    rows, columns, *lengths = probs.shape
    layers = [f"layer {i + 1}" for i in range(rows)] if layers is None else layers
    heads = [f"head {i + 1}" for i in range(columns)] if heads is None else heads
    written = [tokens, tokens if keys is None else keys]
    for name, some, length in zip(("tokens", "keys"), written, lengths, strict=True):
        if some is not None and len(some) != length:
            raise ValueError(f"{len(some)} {name} for {length} places of probs {probs.shape}")
    # Room for "head 12" above, and for words; a map that is not square fills a square.
    cell = min(1.0, max(4.0 / columns, 0.62))
    if tokens is not None:
        cell = (
            max(cell, WORD * max(lengths) + 0.1) if outer else max(cell, 0.16 * max(lengths) + 0.5)
        )
    longest = max([0, *(len(word) for some in written for word in some or ())])
    aside = 0.6 * SMALL / 72 * longest if outer else 0.0
    width, height = columns * cell + 0.7 + aside, rows * cell + 1.3 + aside + 0.2 * outer
    figure, grid = new_figure(width, height, rows, columns)
    for i, j in np.ndindex(rows, columns):
        axes = grid[i, j]
        axes.imshow(_tint(probs[i, j], colour), interpolation="none", aspect="auto")
        axes.set(xticks=[], yticks=[])
        if tokens is not None:
            here = (not outer or j == 0, not outer or i == rows - 1)
            _write(axes, [some if at else None for some, at in zip(written, here, strict=True)])
        axes.grid(visible=False)
        axes.set_box_aspect(1)
        axes.spines[:].set(visible=True, color=GRID)
    for axes, name in zip(grid[0], heads, strict=True):
        axes.set_title(name, fontsize=LETTERS, color=INK)
    for axes, name in zip(grid[:, 0], layers, strict=True):
        axes.set_ylabel(name, fontsize=LETTERS, color=INK)
    grid[-1, 0].set_xlabel("keys →", fontsize=LETTERS, color=INK, loc="left")
    figure.supylabel("← queries", fontsize=LETTERS, color=INK)
    _scale(figure, grid, colour)
    return figure


WORD = 0.105
"""Inches that a token takes at the side of a map, where it is small print."""


def _write(axes: Any, words: Sequence[Sequence[str] | None]) -> None:
    """Words at the queries and at the keys; None: none there."""
    # A dollar would begin a formula.
    told = [None if some is None else [w.replace("$", r"\$") for w in some] for some in words]
    if told[0] is not None:
        axes.set_yticks(range(len(told[0])), told[0], fontsize=SMALL, color=INK)
    if told[1] is not None:
        axes.set_xticks(range(len(told[1])), told[1], rotation=90, fontsize=SMALL, color=INK)
    axes.tick_params(length=0)


class HeadTable(NamedTuple):
    """A statistic of every head."""

    title: str
    values: Float[np.ndarray, "L N"]
    most: float
    """Where the colour is full; at 0 there is none."""
    digits: int


def head_tables(
    tables: Sequence[HeadTable], layers: Sequence[str], colour: str = COLOURS[0]
) -> Any:
    """Small tables of numbers, a row a layer and a column a head. A value that is not a number
    stays empty; more than eight heads have colours alone."""
    rows, columns = tables[0].values.shape
    down = -(-len(tables) // 2)
    figure, grid = new_figure(SIZE[0], down * (0.19 * rows + 0.62), down, 2)
    for place, axes in enumerate(grid.flat):
        if place >= len(tables):
            axes.set_axis_off()
            continue
        table = tables[place]
        values = np.asarray(table.values, np.float64)
        share = np.nan_to_num(values / max(table.most, 1e-9))
        # A third at most, so that letters can be read on it.
        axes.imshow(_tint(share / 3, colour), interpolation="none", aspect="auto")
        axes.set_xticks(range(columns), range(1, columns + 1))
        axes.set_yticks(range(rows), layers if place % 2 == 0 else [""] * rows)
        axes.tick_params(length=0, labelsize=SMALL + 1)
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, color=GRID)
        axes.set_title(table.title, fontsize=SMALL + 1, color=INK, loc="left")
        for i, j in np.ndindex(rows, columns) if columns <= 8 else ():
            if not np.isnan(values[i, j]):
                told = f"{values[i, j]:.{table.digits}f}"
                middle = {"ha": "center", "va": "center"}
                axes.text(j, i, told, fontsize=SMALL + 1, color=INK, **middle)
    return figure


def _tint(probs: np.ndarray, colour: str) -> np.ndarray:
    """[..., T, S] -> RGBA: the colour, as opaque as the square root of the probability."""
    from matplotlib.colors import to_rgb

    opacity = np.sqrt(np.clip(probs.astype(np.float64), 0, 1))
    return np.concatenate(
        [np.broadcast_to(to_rgb(colour), (*probs.shape, 3)), opacity[..., None]], -1
    )


def _scale(figure: Any, grid: Any, colour: str) -> None:
    """A bar below the grid that says which tint is which probability."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb

    rgb = to_rgb(colour)
    tints = LinearSegmentedColormap.from_list("tints", [(*rgb, 0.0), (*rgb, 1.0)])
    bar = figure.colorbar(
        ScalarMappable(PowerNorm(0.5, 0, 1), tints),
        ax=grid,
        location="bottom",
        shrink=min(0.6, SIZE[0] / figure.get_figwidth()),
        aspect=30,
        ticks=[0, 0.1, 0.5, 1],
    )
    bar.ax.set_xticklabels(["0", "0.1", "0.5", "1"])
    bar.ax.tick_params(labelcolor=INK, color=GRID, labelsize=LETTERS)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=LETTERS, color=INK)
