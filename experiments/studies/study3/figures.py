"""Figures of study 3 from rows: loss over head_dim by positions, runs that have copied, loss over
the bytes of a cache, and layers that a shared sublayer is worth."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.study3 import analysis, parts, worth
from experiments.studies.study3.spec import Variant, cache_numbers

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
    table: pd.DataFrame,
    widths: Mapping[int, Sequence[tuple[int, int]]],
    chosen: Sequence[str] = tuple(POSITIONS),
) -> Figure:
    """Mean loss over head_dim, a line for each positions and a panel for each D.

    Args:
      table: of `analysis.read_table`.
      widths: D -> its (num_heads, head_dim). A point is the mean over the texts that
        have a row, two at least.
      chosen: which positions are drawn.
    """
    figure, grid = new_axes(len(widths), 3.4)
    for axes, (width, points) in zip(grid, widths.items(), strict=True):
        for i, (positions, name) in enumerate(POSITIONS.items()):
            variants = [Variant(n, h, width=width, positions=positions) for n, h in sorted(points)]
            means = {v.head_dim: analysis.scores(table, v) for v in variants}
            drawn = sorted(h for h, bits in means.items() if len(bits) > 1)
            if drawn and positions in chosen:
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


NUMBER_BYTES = 4
"""Of a float32 number in a cache."""


SHORT = {
    "gqa": "GQA",
    "gqa_double": "GQA, head_dim x 2",
    "mqa": "MQA",
    "fewer": "fewer heads",
    "tied": "value = key",
    "grouped_tied": "GTA",
    "mla": "MLA",
    "tensor_product": "TPA",
    "cla": "CLA:2",
}
"""Kind -> its name in the legend."""


def cache_figure(table: pd.DataFrame) -> Figure:
    """Mean loss over the bytes of the cache, a token and layer; a line for each kind of heads."""
    figure, [axes] = new_axes(1, 4.8)
    kinds = [(kind, "muon") for kind in parts.CACHE_KINDS] + [("mla", "muon_per_head")]
    for i, (kind, optimizer) in enumerate(kinds):
        variants = [
            v
            for cache in (8, 4, 2)
            for v in parts.at_cache(cache)
            if (v.kind, v.optimizer) == (kind, optimizer)
        ]
        name = SHORT[kind] + (", per-head Muon" if optimizer == "muon_per_head" else "")
        x = [NUMBER_BYTES * cache_numbers(v) for v in variants]
        axes.plot(x, [_mean(table, v) for v in variants], MARKERS[i % len(MARKERS)], label=name,
                  linestyle=DASHES[i // len(COLOURS)], color=COLOURS[i % len(COLOURS)],
                  markersize=4)  # fmt: skip
    everything = NUMBER_BYTES * cache_numbers(parts.MHA)
    axes.plot([everything], [_mean(table, parts.MHA)], "*", color=INK, label="MHA")
    axes.set_xscale("log", base=2)
    ticks = [everything // n for n in (8, 4, 2, 1)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("bytes of the cache, a token and layer")
    axes.set_ylabel("held-out bits per byte")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    return figure


MARKERS = ("o", "s", "^", "D", "v", "P")


def _mean(table: pd.DataFrame, variant: Variant) -> float:
    return float(np.mean([*analysis.scores(table, variant).values()]))


def worth_figure(table: pd.DataFrame) -> Figure:
    """Layers of its own that a sublayer is worth, over the layers that share it, with intervals."""
    _, losses = worth.losses_of(table)
    found = worth.estimate(worth.design_of(worth.planned()), losses).found
    figure, [axes] = new_axes(1, 3.4)
    repeats = np.array([1, 2, 4, 8])
    names = {"phi_a": "attention", "phi_f": "FFN", "phi_b": "both"}
    for i, (key, name) in enumerate(names.items()):
        one = found[key]
        axes.plot(repeats, repeats**one.mean, "o", linestyle=DASHES[i], color=COLOURS[i],
                  markersize=4, label=name)  # fmt: skip
        axes.fill_between(repeats, repeats**one.low, repeats**one.high, color=COLOURS[i],
                          alpha=0.15, linewidth=0)  # fmt: skip
    for exponent, label in ((1, "as layers of their own"), (0, "as one layer")):
        axes.plot(repeats, repeats**exponent, color=INK, linewidth=0.8, linestyle=":")
        place = (-4, 4 - 14 * exponent)
        axes.annotate(label, (8, 8.0**exponent), textcoords="offset points", xytext=place,
                      ha="right", fontsize=8, color=INK)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(repeats, [str(r) for r in repeats])
    axes.set_yticks(repeats, [str(r) for r in repeats])
    axes.set_xlabel("layers that share it")
    axes.set_ylabel("layers of its own that it is worth")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
