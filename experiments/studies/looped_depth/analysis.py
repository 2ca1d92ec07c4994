"""The page of looped_depth.csv, and the learning rates that its tuning seeds choose."""

from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

from attnlab import flops_per_token, num_parameters
from attnlab.lab.stats import paired_difference
from attnlab.report.page import render, table
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.looped_depth import study
from experiments.studies.looped_depth.study import COLUMNS, HOPS, NODES, SEPARATE, VARIANTS
from experiments.studies.rows import conclusions


def accuracy(rows: pandas.DataFrame) -> pandas.Series:
    """Percent right of each row, mean over hops."""
    return rows[COLUMNS].mean(axis=1)


def best_rate(rows: pandas.DataFrame, variant: str) -> float:
    """The learning rate with the best mean accuracy over the tuning seeds."""
    tuning = rows[(rows.variant == variant) & rows.seed.isin(study.TUNING_SEEDS)]
    return float(accuracy(tuning).groupby(tuning.rate).mean().idxmax())


def judged(rows: pandas.DataFrame, variant: str) -> pandas.DataFrame:
    """The rows of a variant at its best rate that are not of tuning, by seed."""
    chosen = (rows.variant == variant) & (rows.rate == best_rate(rows, variant))
    return rows[chosen & ~rows.seed.isin(study.TUNING_SEEDS)].set_index("seed").sort_index()


COMMAND = "python -m experiments.studies.looped_depth --out=docs/results"


def page(rows: pandas.DataFrame, command: str = COMMAND) -> str:
    """The Markdown page of looped_depth.csv; `command` wrote it."""
    of = {name: judged(rows, name) for name in VARIANTS}
    said, lines = conclusions({name: accuracy(some) for name, some in of.items()}, digits=1), []
    for name, config in VARIANTS.items():
        cells = [name, f"{num_parameters(config):,}", f"{flops_per_token(config, NODES):,}"]
        cells += [str(of[name].rate.iloc[0]), *(f"{of[name][k].mean():.1f}" for k in COLUMNS)]
        found = paired_difference(accuracy(of[name]))
        interval = f"{found.low:.1f} to {min(found.high, 100):.1f}"
        lines.append([*cells, f"{found.mean:.1f} ({interval})"])
    header = ("variant", "parameters", "FLOPs per token", "learning rate",
              *(f"k = {k + 1}" for k in range(HOPS)), "mean over hops (95 %)")  # fmt: skip
    differences = [(name, text) for name, (text, _) in said.items()]
    text = render(
        Path(__file__).with_name("page.md.jinja"),
        words={name: word for name, (_, word) in said.items()},
        differences=table(("variant", "percentage points (95 %)"), differences),
        command=command,
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        runs=len(rows),
        seeds=len(of[SEPARATE]),
        steps=of[SEPARATE].steps.iloc[0],
        variants=table(header, lines),
    )
    return f"{text}\n"


def figure(rows: pandas.DataFrame) -> Figure:
    """Percent right over hops, a line per variant."""
    drawn, [axes] = new_axes(1, 3.4)
    x = np.arange(1, HOPS + 1)
    for i, name in enumerate(VARIANTS):
        y = judged(rows, name)[COLUMNS].to_numpy()
        shifted = x + 0.06 * (i - 1.5)
        axes.plot(shifted, y.T, "o", color=COLOURS[i], alpha=0.35, markersize=3)
        axes.plot(shifted, y.mean(0), color=COLOURS[i], marker="os^D"[i], label=name)
    axes.set_xticks(x)
    axes.set_xlabel("hops")
    axes.set_ylabel("percent right")
    axes.set_ylim(0, 104)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return drawn
