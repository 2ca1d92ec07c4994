"""Figures of study 3 from rows: loss over head_dim by positions, and runs that have copied."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.study3 import analysis
from experiments.studies.study3.spec import Variant

DASHES = ("-", "--", ":", "-.", (0, (8, 3)))
POSITIONS = {
    "rotary": "rotary",
    "t5": "T5 bias",
    "half": "rotary on half a head",
    "rotary100": "rotary, base 100",
    "none": "none",
}
"""Positions -> their name in the legend."""


def positions_figure(
    table: pd.DataFrame, widths: Mapping[int, Sequence[tuple[int, int]]]
) -> Figure:
    """Mean loss over head_dim, a line for each positions and a panel for each D.

    Args:
      table: of `analysis.read_table`.
      widths: D -> its (num_heads, head_dim). A point is the mean over the texts that
        have a row, two at least.
    """
    figure, grid = new_axes(len(widths), 3.4)
    for axes, (width, points) in zip(grid, widths.items(), strict=True):
        for i, (positions, name) in enumerate(POSITIONS.items()):
            variants = [Variant(n, h, width=width, positions=positions) for n, h in sorted(points)]
            means = {v.head_dim: analysis.scores(table, v) for v in variants}
            drawn = sorted(h for h, bits in means.items() if len(bits) > 1)
            if drawn:
                y = [float(np.mean([*means[h].values()])) for h in drawn]
                axes.plot(drawn, y, "o", linestyle=DASHES[i], color=COLOURS[i], markersize=4,
                          label=name)  # fmt: skip
        axes.set_xscale("log", base=2)
        dims = sorted(h for _, h in points)
        axes.set_xticks(dims, [str(h) for h in dims])
        axes.set_xlabel("head_dim")
        axes.set_ylabel("held-out bits per byte")
        axes.set_title(f"D = {width}, num_heads × head_dim = D", fontsize=9, loc="left")
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def copying_figure(table: pd.DataFrame, variants: Sequence[Variant]) -> Figure:
    """Share of runs that have not copied yet over training, a line for each head_dim."""
    figure, [axes] = new_axes(1, 3.4)
    for i, variant in enumerate(variants):
        found = analysis.events(table, [variant], [])
        steps = np.sort(found.step[found.copied])
        left = 1 - np.arange(len(steps) + 1) / len(found.step)
        end = analysis.rows_of(table, variant)["steps"].max()
        axes.step([0, *steps, end], [*left, left[-1]], where="post", linestyle=DASHES[i],
                  color=COLOURS[i], label=f"{variant.num_heads}x{variant.head_dim}")  # fmt: skip
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("training step")
    axes.set_ylabel("share of runs that have not copied")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
