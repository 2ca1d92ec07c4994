"""The page of looped_depth.csv, and the learning rates that its tuning seeds choose."""

import numpy as np
import pandas
from matplotlib.figure import Figure

from attnlab import flops_per_token, num_parameters
from attnlab.lab.stats import paired_difference
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.looped_depth import study
from experiments.studies.looped_depth.study import COLUMNS, HOPS, NODES, VARIANTS
from experiments.studies.rows import conclusions, render


def accuracy(rows: pandas.DataFrame) -> pandas.Series:
    """Percent right of each row, mean over hops."""
    return rows[COLUMNS].mean(axis=1)


def best_rates(rows: pandas.DataFrame) -> dict[str, float]:
    """Of each variant the learning rate with the best mean accuracy over the tuning seeds."""
    tuning = rows[rows.seed.isin(study.TUNING_SEEDS)]
    means = accuracy(tuning).groupby([tuning.variant, tuning.rate]).mean().unstack()
    return {name: float(means.loc[name].idxmax()) for name in VARIANTS}


def judged(rows: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """The rows of each variant at its best rate that are not of tuning, by seed."""
    own = rows[~rows.seed.isin(study.TUNING_SEEDS)].set_index("seed").sort_index()
    rates = best_rates(rows).items()
    return {name: own[(own.variant == name) & (own.rate == rate)] for name, rate in rates}


def page(rows: pandas.DataFrame) -> str:
    """The Markdown page of looped_depth.csv."""
    of = judged(rows)
    compared = conclusions({name: accuracy(some) for name, some in of.items()}, digits=1)
    return render(
        __file__,
        study=study,
        compared=compared,
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        runs=len(rows),
        variants=of,
        mean_of=lambda some: paired_difference(accuracy(some)),
        parameters={name: num_parameters(config) for name, config in VARIANTS.items()},
        flops={name: flops_per_token(config, NODES) for name, config in VARIANTS.items()},
    )


def figure(rows: pandas.DataFrame) -> Figure:
    """Percent right over hops, a line per variant."""
    drawn, [axes] = new_axes(1, 3.4)
    x = np.arange(1, HOPS + 1)
    for i, (name, some) in enumerate(judged(rows).items()):
        y = some[COLUMNS].to_numpy()
        shifted = x + 0.06 * (i - 1.5)
        axes.plot(shifted, y.T, "o", color=COLOURS[i], alpha=0.35, markersize=3)
        axes.plot(shifted, y.mean(0), color=COLOURS[i], marker="os^D"[i], label=name)
    axes.set_xticks(x)
    axes.set_xlabel("hops")
    axes.set_ylabel("percent right")
    axes.set_ylim(0, 104)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return drawn
