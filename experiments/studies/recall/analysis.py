"""The page of recall.csv, and the logistic curve of its fractions."""

import math

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy import optimize

from attnlab.lab.stats import paired_difference
from attnlab.report.style import INK, new_axes
from attnlab.report.style import THEMED_COLOURS as COLOURS
from experiments.studies.recall import study
from experiments.studies.recall.study import FIXED_TOTAL, LONGER, PAIRS, STEPS
from experiments.studies.rows import render


def fitted(pairs: np.ndarray, dims: np.ndarray, count: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Coefficients [constant, ln pairs, ln h, ln N] of the logistic curve

        recalled = 1 / pairs + (1 - 1 / pairs) sigmoid(a + b ln pairs + c ln h + d ln N)

    by the least binomial cross-entropy; 1 / pairs is guessing among the stated values.
    """
    x = np.stack([np.ones(len(pairs)), np.log(pairs), np.log(dims), np.log(count)], 1)
    y = np.clip((right - 1 / pairs) / (1 - 1 / pairs), 0, 1)

    def cost(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ w
        gradient = x.T @ (1 / (1 + np.exp(-z)) - y) + 1e-3 * w
        return float(np.sum(np.logaddexp(0, z) - y * z) + 5e-4 * w @ w), gradient

    found: np.ndarray = optimize.minimize(cost, np.zeros(4), jac=True).x
    return found


def fit_curve(rows: pandas.DataFrame, draws: int = 300) -> dict[str, tuple[float, float, float]]:
    """Coefficients with 95 % intervals of a bootstrap over seeds; "ratio" is b + c, 0 where only
    pairs / h counts; "half" the pairs / h at which half is recalled, at N h = 32 and h = 2."""
    names = ["pairs", "head_dim", "num_heads", "recalled"]
    of_seed = {seed: some[names].to_numpy(float) for seed, some in rows.groupby("seed")}
    random, seeds, found = np.random.default_rng(0), list(of_seed), []
    for i in range(draws + 1):
        chosen = seeds if i == 0 else random.choice(seeds, len(seeds))
        w = fitted(*np.concatenate([of_seed[seed] for seed in chosen]).T)
        half = math.exp(-(w[0] + w[2] * math.log(2) + w[3] * math.log(16)) / w[1]) / 2
        found.append([*w, w[1] + w[2], half])
    low, high = np.quantile(found[1:], [0.025, 0.975], axis=0)
    labels = ("constant", "ln pairs", "ln h", "ln N", "ratio", "half")
    return {name: (found[0][i], low[i], high[i]) for i, name in enumerate(labels)}


def recalled(rows: pandas.DataFrame, shape: tuple[int, int], pairs: int) -> pandas.Series:
    """Fractions recalled by the seeds of a (num_heads, head_dim)."""
    chosen = (rows.num_heads == shape[0]) & (rows.head_dim == shape[1]) & (rows.pairs == pairs)
    return rows.recalled[chosen]


def percent(rows: pandas.DataFrame, shape: tuple[int, int], pairs: int = PAIRS[-1]) -> str:
    """Mean percent recalled with its 95 % interval, or "not run"."""
    values = recalled(rows, shape, pairs)
    if values.empty:
        return "not run"
    found = paired_difference(100 * values)
    return f"{found.mean:.1f} ({max(found.low, 0):.1f} to {min(found.high, 100):.1f})"


def page(rows: pandas.DataFrame) -> str:
    """The Markdown page of recall.csv."""
    main, longer = rows[rows.steps == STEPS], rows[rows.steps == LONGER]
    return render(
        __file__,
        study=study,
        main=main,
        longer=longer,
        percent=percent,
        minutes=f"{rows.seconds.sum() / 60:.0f}",
        runs=len(rows),
        fit=fit_curve(main),
        names={"ratio": "ln pairs + ln h", "half": "pairs / h at half, 16x2"},
    )


def figure(rows: pandas.DataFrame) -> Figure:
    """Fraction recalled over pairs / head_dim, a line per head_dim."""
    drawn, [axes] = new_axes(1, 3.4)
    main = rows[rows.steps == STEPS]
    for i, (n, h) in enumerate(FIXED_TOTAL):
        y = [recalled(main, (n, h), pairs).mean() for pairs in PAIRS]
        axes.plot([p / h for p in PAIRS], y, color=COLOURS[i], marker="os^Dv"[i], label=f"{n}x{h}")
    x = np.geomspace(1, 32, 100)
    a, b, c, d = (fit_curve(main, 1)[k][0] for k in ("constant", "ln pairs", "ln h", "ln N"))
    of_two = 2 * x
    z = a + b * np.log(of_two) + c * math.log(2) + d * math.log(16)
    axes.plot(x, 1 / of_two + (1 - 1 / of_two) / (1 + np.exp(-z)), "--", color=INK, linewidth=1)
    axes.axvline(1, color=INK, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 1, 4, 16], ["1/4", "1", "4", "16"])
    axes.set_xlabel("pairs / head_dim")
    axes.set_ylabel("fraction recalled")
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, title=None, loc="lower left")
    return drawn
