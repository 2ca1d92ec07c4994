"""How a loss falls with size: power laws, what an arm is worth, what sharing buys. Numbers in,
numbers out.

One law stands behind all three, L = E + A x^-alpha with noise of one spread, E and A at least zero.
It is fitted by least squares to every seed at every size. The exponent and what is asked beside it
are found by looking, E and A follow in closed form. An interval holds every value under which the
best fit misses by no more than

    (1 + F / free) times the least squares of all,

`free` being the observations less the parameters (profile likelihood; Bates and Watts 1988,
Nonlinear Regression Analysis, section 6.1). F is the quantile of Fisher's F(1, free) at 97.5 %
for an interval of 95 %, half of what is missing: few sizes and seeds see the law's curvature, and
at 95 % the interval of a gain or of phi holds the truth in only 92 to 95 of 100 simulated draws.
As it is, in 95 to 98 (`tests/experiments/test_scaling.py`). An interval covers what seeds do, not
that the law may be another one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from experiments.reporting.statistics import CONFIDENCE

EXPONENTS = (0.001, 10.0)
"""Between these an exponent is looked for; at an end it is not bounded."""
GAINS = (1e-3, 1e3)
PHIS = (-1.0, 2.0)
LEAST_SIZES = 3
"""Fewer tell nothing of E."""
_LOOKS, _ROUNDS = 12, 8
"""Values that are looked at in a round; the next round is between the neighbours of the best."""

Array = np.ndarray


class Estimate(NamedTuple):
    """A value and its interval: 0 or infinite where it is not bounded, NaN without one."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Law(NamedTuple):
    """L = floor + scale x^-exponent."""

    floor: float
    scale: float
    exponent: Estimate
    has_floor: bool
    """Was E fitted? Else it is zero: fewer than three sizes, or no more points than parameters."""

    def at(self, x: ArrayLike) -> Array:
        """The loss at x."""
        return self.floor + self.scale * np.asarray(x, float) ** -self.exponent.value


def law(x: ArrayLike, losses: ArrayLike, confidence: float = CONFIDENCE) -> Law:
    """The law of one arm: x [K] its sizes, losses [K, S] of every seed at each.

    >>> found = law([1, 10, 100, 1000], [[4.0], [3.0], [2.5], [2.25]])
    >>> round(found.floor, 4), round(found.exponent.value, 4)
    (2.0, 0.301)
    """
    x, y = _points(x, losses)
    floor = has_floor(x, len(y), 3)
    misfit = lambda alpha: _misfit(y, np.broadcast_to(x, (*alpha.shape, len(x))), alpha, floor)
    steps = np.log(EXPONENTS)
    free = len(y) - 2 - floor
    found = _profile(lambda t: misfit(np.exp(t)), steps[0], steps[1], free, confidence)
    exponent = _opened(np.exp(found), EXPONENTS)
    e, a, _ = _linear(y, x, np.array(exponent.value), floor)
    return Law(float(e), float(a), exponent, floor)


def gain(
    base_x: ArrayLike,
    base: ArrayLike,
    x: float,
    losses: ArrayLike,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The compute-equivalent gain: how many times its own x an arm is worth to the base.

    The arm with losses [S] at x is as good as the base (losses [K, S] at base_x [K]) at gain x:

        L(arm) = E + A (gain x)^-alpha,    gain = (x_ref / x) ((L_ref - E) / (L - E))^(1 / alpha)

    for any point (x_ref, L_ref) on the law of the base. Above 1 the arm is the better one at equal
    x. Infinite where the base is never as good by its law, zero where it always is. Seeds of both
    count as independent; those that pair make the interval wider than it needs to be.

    >>> x = np.array([1.0, 10.0, 100.0])
    >>> base = np.stack([2 + 3 * x**-0.5] * 2, axis=1)
    >>> round(gain(x, base, 5.0, [2 + 3 * 20**-0.5]).value, 4)
    4.0
    """
    x0, y0 = _points(base_x, base)
    y1 = np.ravel(np.asarray(losses, float))
    y, floor = np.concatenate([y0, y1]), has_floor(x0, len(y0) + len(y1), 4)

    def sizes(t: Array) -> Array:
        mine = np.broadcast_to((x * np.exp(t))[..., None], (*t.shape, len(y1)))
        return np.concatenate([np.broadcast_to(x0, (*t.shape, len(x0))), mine], axis=-1)

    low, high = np.log(GAINS)
    free = len(y) - 3 - floor
    found = _profile(lambda t: _best(y, sizes(t), floor), low, high, free, confidence)
    gained = _opened(np.exp(found), GAINS)
    if GAINS[0] < gained.value * (1 - 1e-9) and gained.value * (1 + 1e-9) < GAINS[1]:
        return gained
    return gained._replace(value=math.inf if gained.value > 1 else 0.0)


def phi(
    arms: Sequence[tuple[Mapping[int, float], ArrayLike]], confidence: float = CONFIDENCE
) -> Estimate:
    """What one more use of shared weights is worth, between nothing (0) and new weights (1).

    `arms`: of each arm and size its parameters by how often they are used, and its losses [S].
    All lie on one law, whose size counts parameters used r times r^phi times,

        L = E + A (sum over r of r^phi N_r)^-alpha,

    the N_once + r^phi N_rec of Schwethelm, Rueckert and Kaissis 2026 (arXiv 2604.21106, read in
    its abstract; the numbers there, 0.46 for looped language models, are theirs). Their law has a
    term for the number of tokens, which all arms here have in common: it is in E, which is fitted
    from two arms at three sizes on. Arms without sharing have to be among them.

    >>> n = (1.0, 4.0, 16.0)
    >>> alone = [({1: 4 * x}, [1 + (4 * x) ** -0.5] * 2) for x in n]
    >>> shared = [({4: x}, [1 + (4**0.7 * x) ** -0.5] * 2) for x in n]
    >>> round(phi([*alone, *shared]).value, 4)
    0.7
    """
    counts = [len(np.ravel(np.asarray(losses, float))) for _, losses in arms]
    y = np.concatenate([np.ravel(np.asarray(losses, float)) for _, losses in arms])
    floor = len(arms) >= 2 * LEAST_SIZES and len(y) > 4

    def sizes(t: Array) -> Array:
        each = [sum(n * float(r) ** t for r, n in uses.items()) for uses, _ in arms]
        return np.repeat(np.stack(each, axis=-1), counts, axis=-1)

    free = len(y) - 3 - floor
    found = _profile(lambda t: _best(y, sizes(t), floor), *PHIS, free, confidence)
    low = -math.inf if found[1] <= PHIS[0] else float(found[1])
    return Estimate(float(found[0]), low, math.inf if found[2] >= PHIS[1] else float(found[2]))


def has_floor(x: ArrayLike, observations: int, parameters: int) -> bool:
    """Is E fitted? From three sizes on, where one observation is left to judge by."""
    return len(np.unique(x)) >= LEAST_SIZES and observations > parameters


def _points(x: ArrayLike, losses: ArrayLike) -> tuple[Array, Array]:
    """Every seed at every size: [K S] each."""
    losses = np.asarray(losses, float)
    return np.repeat(np.asarray(x, float), losses.shape[1]), losses.ravel()


def _linear(y: Array, x: Array, alpha: Array, floor: bool) -> tuple[Array, Array, Array]:
    """E, A and the squares that are missed, of the best fit for sizes x [..., n] and exponents
    alpha [...]; A would be negative: a constant, E would be: none."""
    middle = np.exp(np.log(x).mean(-1, keepdims=True))
    z = (x / middle) ** -alpha[..., None]
    through = (z @ y) / (z * z).sum(-1)
    e, a = np.zeros_like(through), through
    if floor:
        apart = z - z.mean(-1, keepdims=True)
        square = np.maximum((apart * apart).sum(-1), 1e-300)
        slope = np.maximum((apart @ (y - y.mean())) / square, 0.0)
        start = y.mean() - slope * z.mean(-1)
        e, a = np.where(start > 0, start, 0.0), np.where(start > 0, slope, through)
    missed = ((y - e[..., None] - a[..., None] * z) ** 2).sum(-1)
    return e, a * middle[..., 0] ** alpha, missed


def _misfit(y: Array, x: Array, alpha: Array, floor: bool) -> Array:
    return _linear(y, x, alpha, floor)[2]


def _best(y: Array, x: Array, floor: bool) -> Array:
    """The squares missed by the best exponent for sizes x [..., n]."""
    shape = x.shape[:-1]
    low, high = (np.full(shape, t) for t in np.log(EXPONENTS))
    of = lambda t: _misfit(y, x[..., None, :].repeat(t.shape[-1], -2), np.exp(t), floor)
    return _search(of, low, high)[1]


def _search(of: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """Where `of` is lowest between low and high, each [...], and how low: by looking at several
    values [..., looks], then at as many between the neighbours of the best."""
    for _ in range(_ROUNDS):
        t = np.linspace(low, high, _LOOKS, axis=-1)
        values = of(t)
        at = values.argmin(-1)
        pick = lambda i, t=t: np.take_along_axis(t, i[..., None], -1)[..., 0]
        low, high = pick(np.maximum(at - 1, 0)), pick(np.minimum(at + 1, _LOOKS - 1))
    best = np.take_along_axis(values, at[..., None], -1)[..., 0]
    return pick(at), best


def _profile(
    of: Callable[[Array], Array], low: float, high: float, free: int, confidence: float
) -> Array:
    """Where `of` is lowest between low and high, and the ends of the interval around it; an end
    that is not bounded is `low` or `high`, without degrees of freedom they are NaN."""
    from scipy import stats

    at, least = _search(of, np.array(low), np.array(high))
    if free < 1:
        return np.array([at, math.nan, math.nan])
    limit = float(least) * (1 + float(stats.f.ppf((1 + confidence) / 2, 1, free)) / free)
    grid = np.sort(np.append(np.linspace(low, high, 4 * _LOOKS), at))
    inside = np.flatnonzero((of(grid) <= limit) | (grid == at))
    first, last = inside[0], inside[-1]
    held = grid[[first, last]]
    out = grid[[max(first - 1, 0), min(last + 1, len(grid) - 1)]]
    for _ in range(15):
        middle = (held + out) / 2
        holds = of(middle) <= limit
        held, out = np.where(holds, middle, held), np.where(holds, out, middle)
    return np.array([at, *held])


def _opened(found: Array, bounds: tuple[float, float]) -> Estimate:
    """What reaches the end of what was looked at is not bounded there."""
    value, low, high = (float(v) for v in found)
    near = 1e-9
    low = 0.0 if low <= bounds[0] * (1 + near) else low
    return Estimate(value, low, math.inf if high >= bounds[1] * (1 - near) else high)
