"""Maps of attention: who looks at whom."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from attnlab.plot.frame import GRID, INK, LETTERS, new_figure


def attention_map(
    probs: Float[np.ndarray, "L N T S"],
    layers: Sequence[str],
    heads: Sequence[str],
    colour: str,
) -> Any:
    """A grid of maps, one row a layer and one column a head, with a scale below.

    A cell is as opaque as the square root of its probability, so that weak attention shows and
    no attention is the paper itself, light or dark.
    """
    rows, columns = probs.shape[:2]
    # Room for "head 12" above; a map that is not square fills a square, to be seen at all.
    cell = min(1.0, max(4.0 / columns, 0.62))
    figure, grid = new_figure(columns * cell + 0.7, rows * cell + 1.3, rows, columns)
    for i, j in np.ndindex(rows, columns):
        axes = grid[i, j]
        axes.imshow(_tint(probs[i, j], colour), interpolation="none", aspect="auto")
        axes.set(xticks=[], yticks=[])
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
        shrink=0.6,
        aspect=30,
        ticks=[0, 0.1, 0.5, 1],
    )
    bar.ax.set_xticklabels(["0", "0.1", "0.5", "1"])
    bar.ax.tick_params(labelcolor=INK, color=GRID, labelsize=LETTERS)
    bar.outline.set_edgecolor(GRID)
    bar.set_label("attention probability", fontsize=LETTERS, color=INK)
