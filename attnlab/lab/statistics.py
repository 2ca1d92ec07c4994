"""Statistics of comparisons: paired differences over seeds and texts, corrections, equivalence,
tests that may be looked at after every seed, the best learning rate, laws over sizes.

Numbers in, numbers out. scipy does what it has; the test for added seeds is by its formula.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnlab.extras import extra

with extra("lab"):
    from scipy import optimize, special, stats

    from attnlab.lab.mixed_model import LEVEL, fieller, fit_reml

Array: TypeAlias = NDArray[np.float64]
Method: TypeAlias = Literal["paired t", "mixed model", "anytime", "none"]
ALPHA = 1 - LEVEL


@dataclasses.dataclass(frozen=True)
class Difference:
    """A mean difference, its 95 % interval and its two-sided p-value against 0.

    NaN where there are too few seeds.

    Attributes:
      mean: of variant - baseline.
      low, high: of the interval.
      p: of a true difference of 0.
      p_outside: of a true difference that is not within the equivalence margin: the two-sided
        p-value at the nearer end of it; 1 where the mean is outside or the margin is 0.
      count: pairs.
      error: standard error.
      df: degrees of freedom.
      method: which test.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_outside: float = math.nan
    count: int = 0
    error: float = math.nan
    df: float = 0.0
    method: Method = "none"

    @property
    def includes_zero(self) -> bool:
        """Does the interval include zero? True also without one."""
        return not (self.low > 0 or self.high < 0)


def t_difference(
    mean: float,
    error: float,
    df: float,
    count: int,
    *,
    margin: float = 0.0,
    method: Method,
    looks: int = 1,
) -> Difference:
    """The interval and p-values of Student's t, with Bonferroni's correction for `looks`.

    >>> round(t_difference(1.0, 0.5, 7, 8, method="paired t").low, 3)
    -0.182
    """

    def p_at(value: float) -> float:
        if not error:  # no spread at all
            return float(mean == value)
        return min(1.0, looks * float(2 * special.stdtr(df, -abs(mean - value) / error)))

    half = float(special.stdtrit(df, 1 - ALPHA / looks / 2)) * error
    outside = _p_outside(mean, margin, p_at)
    return Difference(mean, mean - half, mean + half, p_at(0.0), outside, count, error, df, method)


def _p_outside(mean: float, margin: float, p_at: Callable[[float], float]) -> float:
    return max(p_at(-margin), p_at(margin)) if abs(mean) < margin else 1.0


def paired_difference(differences: ArrayLike, margin: float = 0.0) -> Difference:
    """Student's paired t of differences, one for each seed. One pair gives no interval.

    >>> paired_difference([1.0, 2.0, 3.0]).mean
    2.0
    """
    d = np.asarray(differences, float)
    if len(d) < 2:
        return Difference(float(d.mean()) if len(d) else math.nan, count=len(d))
    error = float(d.std(ddof=1)) / math.sqrt(len(d)) if np.ptp(d) else 0.0
    return t_difference(
        float(d.mean()), error, len(d) - 1, len(d), margin=margin, method="paired t"
    )


def mixed_difference(
    differences: ArrayLike, texts: Sequence[str], margin: float = 0.0, looks: int = 1
) -> Difference:
    """Differences, one for each text and seed, of several texts: both are random.

    A mixed model with an effect of the text, by restricted maximum likelihood; the interval has
    (texts - 1) degrees of freedom, so it is one for texts of this kind, not for these texts. What a
    seed does on one text is taken as independent of what it does on another.

    Args:
      differences: one for each text and seed.
      texts: the text of each.
      margin: of equivalence.
      looks: p-values are multiplied by it, and the interval is as much wider.
    """
    d, names = np.asarray(differences, np.float64), list(dict.fromkeys(texts))
    if len(names) < 2 or len(d) < 2:
        return paired_difference(d, margin)
    df = len(names) - 1
    if not np.ptp(d):  # no spread at all, so no variances to estimate
        return t_difference(float(d[0]), 0.0, df, len(d), margin=margin, method="mixed model",
                            looks=looks)  # fmt: skip
    groups = [d[[one == text for one in texts]] for text in names]
    if len({len(group) for group in groups}) == 1:  # balanced: in closed form
        size = len(groups[0])
        between = size * float(np.var([group.mean() for group in groups], ddof=1))
        within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        left = len(d) - len(names)
        variance = between
        if left and between < within / left:  # no variance of texts is left
            variance = (between * df + within) / (len(d) - 1)
        error, mean = math.sqrt(variance / len(d)), float(d.mean())
    else:
        z = np.array([[float(text == one) for one in names] for text in texts])
        found = fit_reml(d, {"mean": np.ones(len(d))}, [z], len(names)).contrast({"mean": 1.0})
        error, mean = found.error, found.value
    return t_difference(mean, error, df, len(d), margin=margin, method="mixed model", looks=looks)


def anytime_difference(differences: ArrayLike, margin: float = 0.0) -> Difference:
    """A test that holds however often one looks and whenever one stops: seeds may be added at will.

    With r = 1 / (n + 1) and Student's t of a mean m,

        E(m) = sqrt(r) ((1 + t^2 / (n - 1)) / (1 + r t^2 / (n - 1)))^(n / 2)

    is at least 1 / alpha at any time with probability at most alpha if m is the true mean: p is
    1 / E(0), the interval holds every m with E(m) < 1 / alpha. Before five pairs it holds all
    numbers at 95 % (Wang and Ramdas 2023, Anytime-valid t-tests and confidence sequences, arXiv
    2310.03722: mixture over effects of about one standard deviation).

    >>> anytime_difference([1.0, 2.0, 1.0, 3.0]).high
    inf
    """
    d = np.asarray(differences, float)
    n = len(d)
    if n < 2:
        return Difference(float(d.mean()) if n else math.nan, count=n)
    mean, spread, r = float(d.mean()), float(d.std(ddof=1)) if np.ptp(d) else 0.0, 1 / (n + 1)

    def p_at(value: float) -> float:
        if not spread:
            return float(mean == value)
        u = n * ((mean - value) / spread) ** 2 / (n - 1)
        return math.exp(-max(0.5 * math.log(r) + n / 2 * (math.log1p(u) - math.log1p(r * u)), 0.0))

    half = spread * anytime_half_width(n) if spread else 0.0
    outside = _p_outside(mean, margin, p_at)
    error = spread / math.sqrt(n)
    return Difference(
        mean, mean - half, mean + half, p_at(0.0), outside, n, error, n - 1, "anytime"
    )


def anytime_half_width(n: int, level: float = LEVEL) -> float:
    """Half of the interval of `anytime_difference` after n pairs, in standard deviations.

    E(m) = 1 / alpha where (1 + u) / (1 + r u) = k, with u = t^2 / (n - 1) and
    k = (1 / (alpha sqrt(r)))^(2 / n); it never gets so far where r k >= 1.

    >>> anytime_half_width(4), round(anytime_half_width(20), 2)
    (inf, 0.77)
    """
    r = 1 / (n + 1)
    k = ((1 - level) * math.sqrt(r)) ** (-2 / n)
    return math.sqrt((k - 1) / (1 - r * k) * (n - 1) / n) if r * k < 1 else math.inf


def more_seeds_may_decide(
    differences: ArrayLike, limit: int, margin: float = 0.0, comparisons: int = 1
) -> bool:
    """Could seeds up to `limit` make an open comparison significant, or equivalent?

    True if that is so for a true mean within two standard errors of the mean so far and the spread
    so far, by the test that holds at any time.
    """
    d = np.asarray(differences, float)
    if len(d) >= limit:
        return False
    if len(d) < 3:
        return True
    spread, mean = float(d.std(ddof=1)), abs(float(d.mean()))
    about = 2 * spread / math.sqrt(len(d))
    apart = spread * anytime_half_width(limit, 1 - ALPHA / comparisons)
    within = margin - spread * anytime_half_width(limit, 1 - ALPHA / comparisons)
    return bool(mean + about > apart or max(mean - about, 0.0) < within)


def holm(p: ArrayLike, family: int | None = None) -> Array:
    """Holm's correction (Holm 1979) of p-values in a family of so many; nan stays nan.

    Without `family` those that are nan do not count; with it they count as 1.

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, np.float64)
    corrected = np.full(len(values), np.nan)
    order = [i for i in np.argsort(values) if not np.isnan(values[i])]
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, ((family or len(order)) - rank) * values[i]))
        corrected[i] = highest
    return corrected


@dataclasses.dataclass(frozen=True)
class BestRate:
    """Where the parabola through scores over the logarithm of the learning rate is lowest.

    Attributes:
      rate: there; `low`, `high`: its 95 % interval, 0 and infinity where points do not bound it.
      score: there.
      coefficients: of 1, ln rate and its square.
    """

    rate: float
    low: float
    high: float
    score: float
    coefficients: tuple[float, float, float]


def best_rate(tried: Mapping[float, float], around: int = 2) -> BestRate | None:
    """The lowest point of the least-squares parabola in ln rate through the best rate that was
    tried and up to `around` on each side.

    None where the best is at an end, beside a rate that diverged (not finite), or the parabola
    opens downwards. The interval is Fieller's (1954): all x where the slope b + 2 c x is not
    different from zero, with as many degrees of freedom as there are points more than three.

    >>> found = best_rate({0.5: 2.0, 1.0: 1.0, 2.0: 2.0})
    >>> round(found.rate, 6), round(found.score, 6), found.low
    (1.0, 1.0, 0.0)
    """
    every = sorted(tried)
    best = min(every, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
    place = every.index(best)
    inside = 0 < place < len(every) - 1
    if not inside or not all(math.isfinite(tried[every[place + i]]) for i in (-1, 1)):
        return None
    rates = [rate for rate in every if math.isfinite(tried[rate])]
    at = rates.index(best)
    near = rates[max(at - around, 0) : at + around + 1]
    middle = math.log(best)
    x, y = np.log(near) - middle, np.array([tried[rate] for rate in near])
    powers = np.stack([x**0, x, x**2], axis=1)
    (a, b, c), *_ = np.linalg.lstsq(powers, y, rcond=None)
    if c <= 0:
        return None
    low, high, free = -math.inf, math.inf, len(y) - 3
    if free > 0:
        variance = float(np.sum((y - powers @ np.array([a, b, c])) ** 2)) / free
        of = variance * np.linalg.inv(powers.T @ powers)
        t2 = float(stats.t.ppf((1 + LEVEL) / 2, free)) ** 2
        covariance = float(of[1, 1]), float(-2 * of[1, 2]), float(4 * of[2, 2])
        low, high = fieller(float(-b), float(2 * c), covariance, t2)
    top = -b / (2 * c)
    shape = float(a - b * middle + c * middle**2), float(b - 2 * c * middle), float(c)
    low, high, rate = (float(np.exp(v + middle)) for v in (low, high, top))
    return BestRate(rate, low, high, float(a + b * top / 2), shape)


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """L = floor + scale x^-exponent, by least squares over all seeds at all sizes.

    Attributes:
      low, high: 95 % interval of the exponent by profile likelihood; 0 and infinity where it is
        not bounded, NaN without degrees of freedom.
      has_floor: was the floor fitted? Else it is 0: fewer than three sizes, or no observation left.
    """

    floor: float
    scale: float
    exponent: float
    low: float
    high: float
    has_floor: bool

    def at(self, x: ArrayLike) -> Array:
        """The loss at x."""
        found: Array = self.floor + self.scale * np.asarray(x, np.float64) ** -self.exponent
        return found


EXPONENTS = 1e-3, 10.0
"""Between these an exponent is searched; at an end it is not bounded."""


def power_law(x: ArrayLike, losses: ArrayLike) -> PowerLaw:
    """The law of one variant: x [K] its sizes, losses [K, S] of every seed at each.

    The interval of the exponent holds every value whose best fit misses by no more than
    1 + F / df times the least squares of all (profile likelihood; Bates and Watts 1988, Nonlinear
    Regression Analysis, section 6.1). F is the quantile of F(1, df) at 97.5 %, for few sizes and
    seeds see the curvature of the law.

    >>> found = power_law([1, 10, 100, 1000], [[4.0], [3.0], [2.5], [2.25]])
    >>> round(found.floor, 3), round(found.exponent, 3)
    (2.0, 0.301)
    """
    sizes, y = _every_seed(x, losses)
    floor = len(np.unique(sizes)) >= 3 and len(y) > 3
    best, grid = _best_exponent(sizes, y, floor)
    (offset, scale), least = _fit_law(sizes, y, best, floor)
    df = len(y) - 2 - floor
    low = high = math.nan
    if df >= 1:
        limit = least * _profile_ratio(df)
        low, high = map(
            math.exp,  # 0 and infinity where not bounded
            _where_below(lambda t: _fit_law(sizes, y, t, floor)[1] - limit, best, grid),
        )
    return PowerLaw(offset, scale, math.exp(best), low, high, floor)


@dataclasses.dataclass(frozen=True)
class Gain:
    """How many times its own compute a variant is worth to another one, with its interval."""

    value: float
    low: float = math.nan
    high: float = math.nan


GAINS = 1e-3, 1e3
"""Between these a gain is searched."""


def compute_gain(base_x: ArrayLike, base: ArrayLike, x: float, losses: ArrayLike) -> Gain:
    """How many times x the baseline needs to be as good as a variant at x, by its power law.

    The losses of the variant [S] are put at gain * x on the law of the baseline (losses [K, S] at
    base_x [K]); above 1 the variant is better at equal x. Interval by profile likelihood, as of
    `power_law`; an end that is not bounded is 0 or infinite.

    >>> x = np.array([1.0, 10.0, 100.0])
    >>> base = np.stack([2 + 3 * x**-0.5] * 2, axis=1)
    >>> round(compute_gain(x, base, 5.0, [2 + 3 * 20**-0.5]).value, 3)
    4.0
    """
    base_sizes, base_y = _every_seed(base_x, base)
    own = np.asarray(losses, np.float64).ravel()
    y = np.concatenate([base_y, own])
    floor = len(np.unique(base_sizes)) >= 3 and len(y) > 4

    def missed(log_gain: float) -> float:
        sizes = np.concatenate([base_sizes, np.full(len(own), x * math.exp(log_gain))])
        return _fit_law(sizes, y, _best_exponent(sizes, y, floor)[0], floor)[1]

    low, high = map(math.log, GAINS)
    grid = np.linspace(low, high, 60)
    best, least = _lowest(missed, grid)
    df = len(y) - 3 - floor
    if df < 1:
        return Gain(math.exp(best))
    limit = least * _profile_ratio(df)
    ends = _where_below(lambda t: missed(t) - limit, best, grid)
    return Gain(math.exp(best), math.exp(ends[0]), math.exp(ends[1]))


def _every_seed(x: ArrayLike, losses: ArrayLike) -> tuple[Array, Array]:
    """Sizes [K] and losses [K, S] as [K S] each."""
    y = np.asarray(losses, np.float64)
    return np.repeat(np.asarray(x, np.float64), y.shape[1]), y.ravel()


def _profile_ratio(df: int) -> float:
    """How much more than the least squares the fits in an interval may miss."""
    return 1 + float(stats.f.ppf((1 + LEVEL) / 2, 1, df)) / df


def _fit_law(
    sizes: Array, y: Array, log_exponent: float, floor: bool
) -> tuple[tuple[float, float], float]:
    """((floor, scale), squares that are missed) for one exponent; floor and scale are not
    negative."""
    exponent, middle = math.exp(log_exponent), math.exp(float(np.log(sizes).mean()))
    z = (sizes / middle) ** -exponent
    columns = np.stack([np.ones_like(z), z], 1) if floor else z[:, None]
    found, missed = optimize.nnls(columns, y)
    return (float(found[0]) if floor else 0.0, float(found[-1]) * middle**exponent), missed**2


def _best_exponent(sizes: Array, y: Array, floor: bool) -> tuple[float, Array]:
    """The logarithm of the best exponent, and the grid it was searched on."""
    low, high = map(math.log, EXPONENTS)
    grid = np.linspace(low, high, 60)
    return _lowest(lambda t: _fit_law(sizes, y, t, floor)[1], grid)[0], grid


def _lowest(of: Callable[[float], float], grid: Array) -> tuple[float, float]:
    """Where `of` is lowest between the neighbours of the best point of the grid, and how low."""
    at = int(np.argmin([of(t) for t in grid]))
    ends = grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(of, bounds=ends, method="bounded", options={"xatol": 1e-7})
    return float(found.x), float(found.fun)


def _where_below(excess: Callable[[float], float], best: float, grid: Array) -> tuple[float, float]:
    """The ends of the range around `best` where excess <= 0; infinite if not on the grid."""
    ends = []
    for side, open_end in ((grid[grid < best][::-1], -math.inf), (grid[grid > best], math.inf)):
        inside, end = best, open_end
        for t in side:
            if excess(t) > 0:
                end = float(optimize.brentq(excess, inside, t)) if excess(inside) < 0 else inside
                break
            inside = t
        ends.append(end)
    return ends[0], ends[1]
