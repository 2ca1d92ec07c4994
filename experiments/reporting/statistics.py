"""How sure a difference between two arms is. Numbers in, numbers out."""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Difference(NamedTuple):
    """The mean of b - a over pairs, its interval and its two-sided p. NaN where pairs are few."""

    pairs: int
    mean: float
    low: float
    high: float
    p: float

    @property
    def holds_zero(self) -> bool:
        """Cannot the sign be told? True also without an interval."""
        return not (self.low > 0 or self.high < 0)


def paired_difference(a: ArrayLike, b: ArrayLike, confidence: float) -> Difference:
    """Student's paired t: mean of b - a, with n - 1 degrees of freedom.

    One pair gives a mean and no interval.

    >>> paired_difference([1.0, 2.0], [2.0, 4.0], 0.95).mean
    1.5
    """
    from scipy import stats  # half a second, and `sweep --help` imports this file

    differences = np.subtract(b, a)
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Difference(n, mean, math.nan, math.nan, math.nan)
    if not np.ptp(differences):  # no spread, where SciPy divides by it
        return Difference(n, mean, mean, mean, 0.0 if mean else 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of hardly any spread
        test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(confidence)
    return Difference(n, mean, float(low), float(high), float(test.pvalue))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p of every test in one family: compare them with alpha itself.

    The smallest of m is multiplied by m, the next by m - 1, ...; none is below the one before it.

    >>> holm([0.5, 0.25])
    [0.5, 0.5]
    """
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing their mean rank.

    NaN where all values of one side are equal.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    from scipy import stats

    if not np.ptp(a) or not np.ptp(b):
        return math.nan
    return float(stats.spearmanr(a, b).statistic)
