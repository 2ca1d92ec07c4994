"""Learning rates from rows: the minimum of a grid, the choice of stage 0, a rate formula."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pandas import DataFrame, Series

CELL = ["num_heads", "head_dim", "layout", "width", "length", "plan", "budget", "parametrization",
        "text", "seed", "bytes_per_parameter"]  # fmt: skip
"""Columns in which the runs of a cell agree: they differ in their learning rate alone."""
PLANS = ("cycle:2", "albert", "attention_only", "ffn_only")


class Minimum(NamedTuple):
    """The best learning rate of a cell by validation bits per byte."""

    log_rate: float
    bits: float
    curvature: float
    """k of bits + k (ln r - ln r*)^2; 0 where it could not be found."""
    interior: bool
    """Is the best rate of the grid between two others?"""


def minima(rows: DataFrame) -> DataFrame:
    """`parabola_minimum` of the validation bits of each cell; `tried` is rate -> bits. The held-out
    part is not read."""
    found = []
    for key, cell in rows.sort_values("learning_rate", kind="stable").groupby(CELL, sort=False):
        tried = dict(zip(cell["learning_rate"], cell["validation_bits"], strict=True))
        best = parabola_minimum(tried)
        found.append(dict(zip(CELL, key, strict=True)) | best._asdict() | {"tried": tried})
    return DataFrame(found, columns=[*CELL, *Minimum._fields, "tried"])


def curvature(cells: DataFrame) -> float:
    """k of bits + k (ln r - ln r*)^2: the mean over the cells with an interior minimum."""
    return float(cells["curvature"][cells["interior"] & (cells["curvature"] > 0)].mean())


def parabola_minimum(bits: Mapping[float, float]) -> Minimum:
    """The minimum of the parabola in ln r through the best rate and the two beside it.

    Where the best rate is at an end, or a rate beside it diverged, it is the best rate itself.

    Args:
      bits: of each learning rate.
    """
    rates = sorted(bits)
    x = np.log(rates)
    y = np.array([bits[rate] for rate in rates])
    best = int(np.argmin(y))
    interior = 0 < best < len(y) - 1
    if not (interior and np.all(np.isfinite(y[best - 1 : best + 2]))):
        return Minimum(float(x[best]), float(y[best]), 0.0, interior)
    three = slice(best - 1, best + 2)
    k, slope, level = np.polyfit(x[three] - x[best], y[three], 2)
    at = -slope / (2 * k)
    return Minimum(float(x[best] + at), float(level - k * at**2), float(k), True)


class RateFormula(NamedTuple):
    """ln r* as a sum of coefficient x term, with the standard deviation of its residuals."""

    coefficients: Series
    residual_sd: float
    residuals: np.ndarray
    """Observed less fitted ln r* of each cell."""

    def rates(self, runs: DataFrame) -> list[float]:
        """r* of runs by their columns, 3 significant digits."""
        return [float(f"{rate:.3g}") for rate in np.exp(rate_terms(runs) @ self.coefficients)]


def rate_terms(runs: DataFrame) -> DataFrame:
    """The terms of the rate formula: ln h, ln N, ln D; ln of bytes per parameter over 20; ln T over
    128; 1 for narrow heads; 1 for each sharing plan."""
    terms = {
        "constant": 1.0,
        "ln_head_dim": np.log(runs["head_dim"]),
        "ln_num_heads": np.log(runs["num_heads"]),
        "ln_width": np.log(runs["width"] / 64),
        "ln_bytes": np.log(runs["bytes_per_parameter"] / 20),
        "ln_length": np.log(runs["length"] / 128),
        "narrow": runs["layout"] == "narrow",
        **{plan: runs["plan"] == plan for plan in PLANS},
    }
    return DataFrame(terms, runs.index).astype(float)


def fit_rates(rows: DataFrame) -> RateFormula:
    """Least squares of ln r* of every cell on `rate_terms`; a term that no cell has gets 0."""
    cells = minima(rows)
    terms, best = rate_terms(cells), cells["log_rate"].to_numpy()
    solution, _, rank, _ = np.linalg.lstsq(terms.to_numpy(), best, rcond=1e-10)
    left = best - terms.to_numpy() @ solution
    sd = float(np.sqrt(np.sum(left**2) / max(1, len(best) - rank)))
    return RateFormula(Series(solution, terms.columns), sd, left)


def choose(
    rows: DataFrame, names: Sequence[str], tolerance: float
) -> tuple[str, dict[str, tuple[float, float]]]:
    """The parametrization that stage 0 chooses, and (mean bits, range of ln r*) of each.

    Mean bits: the mean over cells of the interpolated minimum of the validation part. Among those
    within `tolerance` bits of the lowest mean, the one whose ln r* (mean over texts) has the
    smallest range over the variants; equal ranges: the first of `names`.
    """
    found: dict[str, tuple[float, float]] = {}
    every = minima(rows)
    for name in names:
        cells = every[every["parametrization"] == name]
        rates = cells.groupby(["num_heads", "head_dim"])["log_rate"].mean()
        found[name] = float(cells["bits"].mean()), float(rates.max() - rates.min())
    lowest = min(mean for mean, _ in found.values())
    close = [n for n in names if found[n][0] <= lowest + tolerance]
    return min(close, key=lambda n: found[n][1]), found
