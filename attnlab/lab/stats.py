"""Statistics of comparisons: paired differences over seeds and texts, corrections, equivalence,
tests that may be looked at after every seed, the best learning rate.

Numbers in, numbers out. scipy does what it has, and is imported where it is called: workers do
not need it. The test for added seeds is by its formula.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnlab.extras import extra
from attnlab.lab.spec import Tag

Array: TypeAlias = NDArray[np.float64]
Method: TypeAlias = Literal["paired t", "t over texts", "anytime", "none"]
LEVEL = 0.95
"""Of intervals."""
ALPHA = 1 - LEVEL
LOOKS = 4
"""Looks at scores of several texts that the p-values of added seeds count."""


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
      df: degrees of freedom.
      method: which test.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    p_outside: float = math.nan
    count: int = 0
    df: int = 0
    method: Method = "none"


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
    return _t_of(d, len(d), "paired t", margin)


def text_difference(
    differences: ArrayLike, texts: Sequence[str], margin: float = 0.0, looks: int = 1
) -> Difference:
    """Differences, one for each text and seed, of several texts: Student's t of the means of texts.

    The interval has (texts - 1) degrees of freedom, so it is one for texts of this kind, not for
    these texts, whatever seeds do on each. Every text counts the same, however many seeds it has.

    Args:
      differences: one for each text and seed.
      texts: the text of each; one text: as `paired_difference`.
      margin: of equivalence.
      looks: p-values are multiplied by it, and the interval is as much wider.

    >>> text_difference([1.0, 3.0, 4.0], ["a", "a", "b"]).mean
    3.0
    """
    d, names = np.asarray(differences, np.float64), list(dict.fromkeys(texts))
    if len(names) < 2:
        return paired_difference(d, margin)
    means = np.array([d[[one == name for one in texts]].mean() for name in names])
    return _t_of(means, len(d), "t over texts", margin, looks)


def _t_of(values: Array, count: int, method: Method, margin: float, looks: int = 1) -> Difference:
    """The interval and p-values of Student's t, with Bonferroni's correction for `looks`."""
    with extra("lab"):
        from scipy import special
    mean, df = float(values.mean()), len(values) - 1
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if np.ptp(values) else 0.0

    def p_at(value: float) -> float:
        if not error:  # no spread at all
            return float(mean == value)
        return min(1.0, looks * float(2 * special.stdtr(df, -abs(mean - value) / error)))

    half = float(special.stdtrit(df, 1 - ALPHA / looks / 2)) * error
    outside = _p_outside(mean, margin, p_at)
    return Difference(mean, mean - half, mean + half, p_at(0.0), outside, count, df, method)


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
    return Difference(mean, mean - half, mean + half, p_at(0.0), outside, n, n - 1, "anytime")


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
    half = spread * anytime_half_width(limit, 1 - ALPHA / comparisons)
    return bool(mean + about > half or max(mean - about, 0.0) < margin - half)


def fieller(
    x: float, y: float, covariance: tuple[float, float, float], q: float
) -> tuple[float, float]:
    """The interval of x / y: every m with (x - m y)^2 <= q (xx - 2 m xy + m^2 yy).

    Fieller 1954, J. R. Stat. Soc. B 16:175. From -inf to inf where y is not different from 0.

    Args:
        x, y: estimates.
        covariance: xx, xy, yy.
        q: the square of a quantile of Student's t.
    """
    xx, xy, yy = covariance
    square, linear, constant = y**2 - q * yy, -2 * (x * y - q * xy), x**2 - q * xx
    if square <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(linear**2 - 4 * square * constant, 0.0))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)


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
    """The learning rate that scores best.

    Attributes:
      rate: where the parabola through scores over the logarithm of the rate is lowest, or the best
        that was tried.
      low, high: its 95 % interval, 0 and infinity where points do not bound it.
      fitted: is it the lowest point of the parabola?
    """

    rate: float
    low: float = 0.0
    high: float = math.inf
    fitted: bool = False


def best_rate(tried: Mapping[float, float]) -> BestRate | None:
    """The lowest point of the least-squares parabola in ln rate through the best rate that was
    tried and up to two on each side.

    It is the best that was tried where that is at an end or beside a rate that diverged (not
    finite), or where the parabola opens downwards or is lowest outside of the rates that were
    tried. The interval of the parabola is Fieller's (1954): all x where the slope b + 2 c x is not
    different from zero, with as many degrees of freedom as there are points more than three.

    Args:
      tried: rate -> score, lower is better.

    Returns:
      The best rate; None where every rate diverged.

    >>> found = best_rate({0.5: 2.0, 1.0: 1.0, 2.0: 2.0})
    >>> round(found.rate, 6), found.low, found.fitted
    (1.0, 0.0, True)
    """
    every = sorted(tried)
    rates = [rate for rate in every if math.isfinite(tried[rate])]
    if not rates:
        return None
    best = min(rates, key=tried.__getitem__)
    place = every.index(best)
    inside = 0 < place < len(every) - 1
    if not inside or not all(math.isfinite(tried[every[place + i]]) for i in (-1, 1)):
        return BestRate(best)
    at = rates.index(best)
    near = rates[max(at - 2, 0) : at + 3]
    middle = math.log(best)
    x, y = np.log(near) - middle, np.array([tried[rate] for rate in near])
    powers = np.stack([x**0, x, x**2], axis=1)
    coefficients, *_ = np.linalg.lstsq(powers, y, rcond=None)
    _, b, c = coefficients
    if c <= 0 or not math.log(every[0]) <= middle - b / (2 * c) <= math.log(every[-1]):
        return BestRate(best)
    low, high, free = -math.inf, math.inf, len(y) - 3
    if free > 0:
        with extra("lab"):
            from scipy import stats
        variance = float(np.sum((y - powers @ coefficients) ** 2)) / free
        of = variance * np.linalg.inv(powers.T @ powers)
        t2 = float(stats.t.ppf((1 + LEVEL) / 2, free)) ** 2
        covariance = float(of[1, 1]), float(-2 * of[1, 2]), float(4 * of[2, 2])
        low, high = fieller(float(-b), float(2 * c), covariance, t2)
    rate, low, high = (float(np.exp(v + middle)) for v in (-b / (2 * c), low, high))
    return BestRate(rate, low, high, fitted=True)


VariantKey: TypeAlias = tuple[tuple[str, Tag], ...]
"""The tags of runs that differ in their seed (and text) only."""
SeedScores: TypeAlias = Mapping[tuple[str, int], float]
"""(text, seed) -> the score of a run."""
Conclusion: TypeAlias = Literal["better", "worse", "equivalent", "inconclusive"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A variant against a baseline.

    Attributes:
      variant, baseline: which; of an average over other tags, the one tag that differs.
      difference: variant - baseline.
      p_holm: of no difference, after Holm's correction over the family.
      p_equivalent: of a difference outside of the margin, after the same correction.
      texts: with scores of both.
      conclusion: "better" or "worse" if p_holm < 0.05; else "equivalent" if p_equivalent < 0.05, so
        an uncorrected equivalence never outranks a corrected difference; else "inconclusive".
      over: the tags that are averaged over; (): none.
      single: then the same difference for each combination of them.
    """

    variant: VariantKey
    baseline: VariantKey
    difference: Difference
    p_holm: float
    p_equivalent: float
    texts: int
    conclusion: Conclusion
    over: tuple[str, ...] = ()
    single: tuple[float, ...] = ()


def compare_pairs(
    scores: Mapping[VariantKey, SeedScores],
    pairs: Sequence[tuple[VariantKey, VariantKey]],
    *,
    margin: float = 0.0,
    seeds_added: bool = False,
    sign: int = 1,
) -> list[Comparison]:
    """Compares (variant, baseline) pairs over the seeds and texts that both have.

    Seed n starts from the same random key and reads the same batches in every variant, so
    differences are paired. Which test judges:

    - several texts: Student's t of the means of texts; where seeds were added after looking at
      scores, its p-values count `LOOKS` times;
    - one text, and seeds were added: the test that holds at any time;
    - else Student's paired t of this pair alone, which assumes nothing about the spread of other
      variants.

    Args:
      scores: of each variant.
      pairs: one family for Holm's correction.
      margin: a difference below it is of no interest; 0: no test of equivalence.
      seeds_added: could seeds be added after looking?
      sign: 1 where lower scores are better, -1 where higher are.
    """
    found, counts = [], []
    for variant, baseline in pairs:
        a, b = scores[variant], scores[baseline]
        keys = sorted(set(a) & set(b))
        gaps, texts = [a[key] - b[key] for key in keys], [text for text, _ in keys]
        counts.append(len(set(texts)))
        if counts[-1] > 1:
            found.append(text_difference(gaps, texts, margin, LOOKS if seeds_added else 1))
        else:
            found.append((anytime_difference if seeds_added else paired_difference)(gaps, margin))
    p_holm = holm([d.p for d in found])
    p_equivalent = holm([d.p_outside for d in found])
    return [
        Comparison(*pair, d, float(p), float(q), texts, _conclusion(sign * d.mean, p, q))
        for pair, d, p, q, texts in zip(pairs, found, p_holm, p_equivalent, counts, strict=True)
    ]


def _conclusion(worse_by: float, p_holm: float, p_equivalent: float) -> Conclusion:
    if p_holm < ALPHA:
        return "better" if worse_by < 0 else "worse"
    return "equivalent" if p_equivalent < ALPHA else "inconclusive"


def average_effects(
    scores: Mapping[VariantKey, SeedScores],
    *,
    reference: Mapping[str, Tag] | None = None,
    tags: Sequence[str] | None = None,
    margin: float = 0.0,
    seeds_added: bool = False,
    sign: int = 1,
) -> list[Comparison]:
    """Each value of a tag against the reference value, averaged over the values of other tags.

    For variants that are all combinations of two or more tags; else empty. A seed is one
    observation: the mean of its scores, so an interval has (seeds - 1) degrees of freedom, whatever
    the spread of the variants. All effects are one family.

    Args:
      scores: of each variant.
      reference: tag -> value to compare with; where left out, the first one.
      tags: those to average over others; None: all.
      margin, seeds_added, sign: as of `compare_pairs`.
    """
    values = _crossed(list(scores))
    means: dict[VariantKey, SeedScores] = {}
    pairs, about = [], []
    for tag in (tag for tag in values if tags is None or tag in tags):
        base = (reference or {}).get(tag)
        base = base if base in values[tag] else values[tag][0]
        over = tuple(other for other in values if other != tag)
        for value in values[tag]:
            side = [variant for variant in scores if dict(variant)[tag] == value]
            means[((tag, value),)] = _mean([scores[variant] for variant in side])
            if value != base:
                pairs.append((((tag, value),), ((tag, base),)))
                others = [tuple((n, base if n == tag else x) for n, x in v) for v in side]
                single = [
                    _mean_gap(scores[v], scores[w]) for v, w in zip(side, others, strict=True)
                ]
                about.append((over, tuple(single)))
    found = compare_pairs(means, pairs, margin=margin, seeds_added=seeds_added, sign=sign)
    return [
        dataclasses.replace(one, over=over, single=single)
        for one, (over, single) in zip(found, about, strict=True)
    ]


def _crossed(variants: Sequence[VariantKey]) -> dict[str, list[Tag]]:
    """Tag -> values, of tags that vary, if there are two or more and all combinations; else {}."""
    names = list(dict.fromkeys(name for variant in variants for name, _ in variant))
    if any([name for name, _ in variant] != names for variant in variants):
        return {}
    values = {name: list(dict.fromkeys(dict(v)[name] for v in variants)) for name in names}
    values = {name: some for name, some in values.items() if len(some) > 1}
    whole = math.prod(map(len, values.values())) == len(variants)
    return values if len(values) > 1 and whole else {}


def _mean(many: Sequence[SeedScores]) -> dict[tuple[str, int], float]:
    keys = set.intersection(*(set(scores) for scores in many))
    return {key: float(np.mean([scores[key] for scores in many])) for key in sorted(keys)}


def _mean_gap(a: SeedScores, b: SeedScores) -> float:
    keys = set(a) & set(b)
    return float(np.mean([a[key] - b[key] for key in keys])) if keys else math.nan
