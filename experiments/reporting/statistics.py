"""How sure a difference between two arms is. Numbers in, numbers out."""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """The mean of b - a over pairs, its interval and its two-sided p. NaN where pairs are few."""

    pairs: int
    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    spread: float = math.nan
    """Standard deviation over pairs."""

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
        return Difference(n, mean)
    if not np.ptp(differences):  # no spread, where SciPy divides by it
        return Difference(n, mean, mean, mean, 0.0 if mean else 1.0, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of hardly any spread
        test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(confidence)
    spread = float(np.std(differences, ddof=1))
    return Difference(n, mean, float(low), float(high), float(test.pvalue), spread)


def sequential_difference(a: ArrayLike, b: ArrayLike, confidence: float) -> Difference:
    """The same, valid however often one looks and whenever one stops: seeds may be added at will.

    With r = 1 / (n + 1) and Student's t of a mean m,

        E(m) = sqrt(r) ((1 + t^2 / (n - 1)) / (1 + r t^2 / (n - 1)))^(n / 2)

    is at least 1 / alpha at any time with probability at most alpha if m is the true mean: p is
    1 / E(0), the interval holds every m with E(m) < 1 / alpha. Before five pairs it holds all
    numbers at 95 % (Wang and Ramdas 2023, Anytime-valid t-tests and confidence sequences, arXiv
    2310.03722: mixture over effects of about one standard deviation).

    >>> sequential_difference([0.0] * 4, [1.0, 2.0, 1.0, 3.0], 0.95).high
    inf
    """
    differences = np.subtract(b, a)
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Difference(n, mean)
    spread, r = float(np.std(differences, ddof=1)), 1 / (n + 1)
    if not spread:
        return Difference(n, mean, mean, mean, 0.0 if mean else 1.0, 0.0)
    u = n * (mean / spread) ** 2 / (n - 1)
    log_e = 0.5 * math.log(r) + n / 2 * (math.log1p(u) - math.log1p(r * u))
    half = spread * half_width(n, confidence)
    return Difference(n, mean, mean - half, mean + half, math.exp(-max(log_e, 0.0)), spread)


def half_width(n: int, confidence: float) -> float:
    """Of the interval of `sequential_difference` after n pairs, in standard deviations.

    E(m) = 1 / alpha where (1 + u) / (1 + r u) = k, with u = t^2 / (n - 1) and
    k = (1 / (alpha sqrt(r)))^(2 / n); it never gets so far where r k >= 1.

    >>> half_width(4, 0.95), round(half_width(20, 0.95), 2)
    (inf, 0.77)
    """
    r = 1 / (n + 1)
    k = ((1 - confidence) * math.sqrt(r)) ** (-2 / n)
    return math.sqrt((k - 1) / (1 - r * k) * (n - 1) / n) if r * k < 1 else math.inf


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
