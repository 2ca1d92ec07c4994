"""Maps of attention: who looks at whom."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from attnlab.plot.frame import COLOURS, GRID, INK, LETTERS, new_figure


def attention_map(
    probs: Float[np.ndarray, "*L N T S"],
    layers: Sequence[str] | None = None,
    heads: Sequence[str] | None = None,
    colour: str = COLOURS[0],
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    text: int = 0,
) -> Any:
    """A grid of maps, one row a layer and one column a head, with a scale below.

    A cell is as opaque as the square root of its probability, so that weak attention shows and
    no attention is the paper itself, light or dark. `probs` are those that a model shows,
    [L, B, N, T, S] of which `text` says which, or of one text [L, N, T, S] or [N, T, S].

    Args:
      layers, heads: what to call them; None counts from 1.
      tokens: what stands at the queries, and at the keys where `keys` says nothing else.
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
    cell = cell if tokens is None else max(cell, 0.16 * max(lengths) + 0.5)
    figure, grid = new_figure(columns * cell + 0.7, rows * cell + 1.3, rows, columns)
    for i, j in np.ndindex(rows, columns):
        axes = grid[i, j]
        axes.imshow(_tint(probs[i, j], colour), interpolation="none", aspect="auto")
        axes.set(xticks=[], yticks=[])
        if tokens is not None:
            axes.set_yticks(range(lengths[0]), written[0], fontsize=LETTERS, color=INK)
            axes.set_xticks(range(lengths[1]), written[1], rotation=90, fontsize=LETTERS, color=INK)
            axes.tick_params(length=0)
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
