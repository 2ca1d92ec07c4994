"""The learning rate of an arm: a parabola through what was tried, and what to try next."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.reporting.statistics import CONFIDENCE

FACTOR = 2.0
"""Between neighbouring rates."""
AROUND = 2
"""Rates on each side of the best that the parabola goes through."""
ADDED = 4
"""Rates that are added at most where the best is at an end."""


class Minimum(NamedTuple):
    """Where the parabola through the scores over the logarithm of the rate is lowest."""

    rate: float
    score: float
    low: float
    high: float
    """Interval of the rate; 0 and infinity where the points do not bound it."""
    coefficients: tuple[float, float, float]
    """Of 1, ln rate and its square."""


def first_rates(middle: float, count: int) -> list[float]:
    """So many rates around the middle one, each `FACTOR` times the one before.

    >>> first_rates(0.01, 3)
    [0.005, 0.01, 0.02]
    """
    return [middle * FACTOR**k for k in range(-(count // 2), count - count // 2)]


def next_rate(tried: Mapping[float, float]) -> float | None:
    """The rate to try next so that the best lies between two others; None where it does.

    `tried`: rate -> score, the less the better, infinite where the run diverged. Beyond the end
    where the best is; half-way to a neighbour that diverged.

    >>> next_rate({0.5: 3.0, 1.0: 2.0}), next_rate({0.5: 3.0, 1.0: 2.0, 2.0: 2.5})
    (2.0, None)
    """
    rates = sorted(tried)
    best = min(rates, key=tried.__getitem__)
    at = rates.index(best)
    if math.isinf(tried[best]) or at == 0:
        return rates[0] / FACTOR
    if at == len(rates) - 1:
        return rates[-1] * FACTOR
    if math.isinf(tried[rates[at + 1]]):
        return math.sqrt(best * rates[at + 1])
    return None


def minimum(tried: Mapping[float, float]) -> Minimum | None:
    """Of the least-squares parabola in ln rate through the best rate and up to two on each side.

    None where the best is at an end or the parabola opens downwards. The interval is Fieller's
    (1954): all x where the slope b + 2 c x is not told apart from zero, with Student's t of as many
    degrees of freedom as there are points more than three.

    >>> found = minimum({0.5: 2.0, 1.0: 1.0, 2.0: 2.0})
    >>> round(found.rate, 6), round(found.score, 6), found.low
    (1.0, 1.0, 0.0)
    """
    if next_rate(tried) is not None:
        return None
    rates = [rate for rate in sorted(tried) if math.isfinite(tried[rate])]
    at = rates.index(min(rates, key=tried.__getitem__))
    near = rates[max(at - AROUND, 0) : at + AROUND + 1]
    middle = math.log(rates[at])
    x, y = np.log(near) - middle, np.array([tried[rate] for rate in near])
    powers = np.stack([x**0, x, x**2], axis=1)
    (a, b, c), *_ = np.linalg.lstsq(powers, y, rcond=None)
    if c <= 0:
        return None
    top = -b / (2 * c)
    low, high = _fieller(powers, y, np.array([a, b, c]))
    rate = lambda x: float(np.exp(x + middle))  # also of infinities
    moved = (a - b * middle + c * middle**2, b - 2 * c * middle, c)
    found = tuple(float(v) for v in moved)
    return Minimum(rate(top), float(a + b * top / 2), rate(low), rate(high), found)


def _fieller(powers: np.ndarray, y: np.ndarray, fit: np.ndarray) -> tuple[float, float]:
    """The x where (b + 2 c x)^2 is at most t^2 times its variance."""
    from scipy import stats

    free = len(y) - 3
    if free < 1:
        return -math.inf, math.inf
    variance = float(np.sum((y - powers @ fit) ** 2)) / free
    of = variance * np.linalg.inv(powers.T @ powers)
    t2 = float(stats.t.ppf(0.5 + CONFIDENCE / 2, free)) ** 2
    _, b, c = fit
    # (b + 2 c x)^2 - t^2 (v_bb + 4 x v_bc + 4 x^2 v_cc) = square x^2 + 2 half x + rest
    square = 4 * (c**2 - t2 * of[2, 2])
    half = 2 * (b * c - t2 * of[1, 2])
    rest = b**2 - t2 * of[1, 1]
    if square <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(half**2 - square * rest, 0.0))
    return (-half - root) / square, (-half + root) / square
