"""The registered analysis of the head-width study: rows -> estimates, with texts random.

A frame has the judged rows with the columns of `columns`. Scores are held-out bits per byte of
complete runs. Plan: docs/results/head_width/plan.md.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pandas
from pandas import DataFrame, Series
from scipy import stats

from experiments.studies.head_width.mixed_model import (
    LEVEL,
    Array,
    Estimate,
    MixedModel,
    fit_reml,
    t_estimate,
)
from experiments.studies.head_width.rates import RateFormula

MARGIN = 0.02
FIRST_LOOK = 0.005
"""Largest p-value that is significant at the first of two looks at P1 (O'Brien-Fleming)."""

ROUNDING = 0.01
"""Differences of ln r up to this are rounding: rates have 4 digits, the formula's 3."""


def columns(rows: DataFrame, formula: RateFormula) -> DataFrame:
    """Rows with `bits` (held out), u = log2 h, v = log2(N h / D), and `tuning` = ln r - ln r*.
    Those without CPU seconds have their seconds there."""
    return rows.assign(
        cpu_seconds=rows["cpu_seconds"].fillna(rows["seconds"]),
        bits=rows["heldout_bits"],
        u=np.log2(rows["head_dim"]),
        v=np.log2(rows["num_heads"] * rows["head_dim"] / rows["width"]),
        tuning=np.log(rows["learning_rate"] / formula.rates(rows)),
    )


def where(frame: DataFrame, **values: str | float) -> DataFrame:
    """The rows whose columns have these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


Pairs = dict[str, list[float]]
"""Text -> one difference per seed."""


def paired(a: DataFrame, b: DataFrame) -> Pairs:
    """bits(b) - bits(a) of the runs that have the same text and seed.

    A text on which a run of `a` or `b` diverged has no estimate and is left out.
    """
    first, second = (one.groupby(["text", "seed"])["bits"].mean() for one in (a, b))
    gaps = (second - first).dropna()
    both = pandas.concat([a, b]).sort_index().groupby("text", sort=False)["bits"]
    finite = [text for text, bits in both if np.isfinite(bits).all()]
    return {text: gaps[text].tolist() for text in finite if text in gaps.index}


def merged(pairs: Pairs) -> Pairs:
    """`pairs` with both Tatoeba texts as one: they are translations of each other."""
    there = [name for name in ("tatoeba_fr", "tatoeba_en") if name in pairs]
    if len(there) < 2:
        return pairs
    rest = {name: values for name, values in pairs.items() if name not in there}
    return rest | {"+".join(there): [float(np.mean([np.mean(pairs[name]) for name in there]))]}


class Pooled(NamedTuple):
    """Standard deviation over texts of a difference, and its degrees of freedom."""

    sd: float
    freedom: int


def over_texts(pairs: Pairs, pooled: Pooled | None = None) -> Estimate:
    """Student's t over the means of texts: mean, standard error sd / sqrt(texts), texts - 1
    degrees of freedom. With `pooled` the interval is not narrower than that of the pooled
    variance; the p-value stays."""
    means = np.array([np.mean(values) for values in pairs.values()])
    if not len(means):
        return t_estimate(math.nan, math.nan, 0)
    sd = float(np.std(means, ddof=1)) if len(means) > 1 else math.nan
    own = t_estimate(float(means.mean()), sd / math.sqrt(len(means)), len(means))
    return widened(own, pooled)


def widened(found: Estimate, pooled: Pooled | None) -> Estimate:
    """`found` with an interval not narrower than that of the pooled variance; its p-value stays."""
    if pooled is None or found.count < 2:
        return found
    half = float(stats.t.ppf((1 + LEVEL) / 2, pooled.freedom)) * pooled.sd / math.sqrt(found.count)
    half = max(half, found.high - found.value)
    return dataclasses.replace(found, low=found.value - half, high=found.value + half)


def pool(many: Sequence[Pairs]) -> Pooled | None:
    """Standard deviation over texts of a difference, its variance pooled over pairs of variants;
    None where no pair has two texts."""
    spread = [np.array([np.mean(v) for v in pairs.values()]) for pairs in many if len(pairs) > 1]
    if not spread:
        return None
    total = sum(float(((one - one.mean()) ** 2).sum()) for one in spread)
    freedom = sum(len(one) - 1 for one in spread)
    return Pooled(math.sqrt(total / freedom), freedom)


def bootstrap(pairs: Pairs, draws: int = 2000) -> tuple[float, float]:
    """The percentile interval of the mean: texts are drawn with replacement, then seeds of each
    drawn text (Davison and Hinkley 1997, section 3.8). NaN for fewer than two texts."""
    if len(pairs) < 2:
        return math.nan, math.nan
    random, values = np.random.default_rng(0), list(map(np.array, pairs.values()))
    means = np.empty(draws)
    for i in range(draws):
        texts = random.integers(len(values), size=len(values))
        means[i] = np.mean([random.choice(values[t], len(values[t])).mean() for t in texts])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def equivalence(found: Estimate, margin: float) -> float:
    """p of two one-sided tests (Schuirmann 1987, doi:10.1007/BF01068419) that a difference lies
    within +-margin: below 0.05 where the 90 % interval does."""
    return float(stats.t.sf((margin - abs(found.value)) / found.error, found.count - 1))


def primary_conclusion(tests: Collection[Estimate]) -> str:
    """The registered decision for P1 after stage 3.

    "significant" or "equivalent" only where every one of `tests` (the mixed model and the paired
    t-test) says so, "inconclusive" elsewhere (amendment 1). A difference may be significant and
    smaller than the margin; then both are returned.

    >>> same = t_estimate(0.012, 0.002, 8)
    >>> primary_conclusion((same, same))
    'significant, and equivalent within 0.02'
    """
    significant = all(one.p < FIRST_LOOK for one in tests)
    significant &= len({one.value > 0 for one in tests}) == 1
    equivalent = f"equivalent within {MARGIN:g}"
    within = all(equivalence(one, MARGIN) < 0.05 for one in tests)
    if significant:
        return f"significant, and {equivalent}" if within else "significant"
    return equivalent if within else "inconclusive"


def loss_slope(frame: DataFrame) -> Estimate:
    """dL / d ln C of the points h = 16, N h = D over model sizes, C = FLOPs per token x bytes:
    least squares within each text, then the mean over texts."""
    part = where(frame, head_dim=16, v=0, plan="separate", layout="standard", length=128,
                 bytes_per_parameter=20.0)  # fmt: skip
    part = part[np.isfinite(part["bits"])]
    compute = np.log(part["flops_per_token"].astype(float) * part["bytes_trained"])
    slopes: Pairs = {}
    for text, bits in part["bits"].groupby(part["text"], sort=False):
        mean = bits.groupby(compute).mean()
        if len(mean) > 1:
            slopes[text] = [float(np.polyfit(mean.index, mean, 1)[0])]
    return over_texts(slopes)


def compute_multiple(difference: Estimate, slope: Estimate) -> Estimate:
    """exp(difference / |slope|): how many times the compute gives the worse variant the loss of the
    other, with the errors of both in its interval (delta method in the logarithm). p is that of the
    difference."""
    s = abs(slope.value)
    log = difference.value / s
    error = math.hypot(difference.error / s, log * slope.error / s)
    count = min(difference.count, slope.count)
    found = t_estimate(log, error, count)
    bounds = (math.exp(min(found.low, 700)), math.exp(min(found.high, 700)))
    return Estimate(math.exp(log), math.exp(log) * error, *bounds, difference.p, count)


def curvature(minima: DataFrame) -> Estimate:
    """k of bits + k (ln r - ln r*)^2: mean and error over the cells with an interior minimum."""
    found = minima["curvature"][minima["interior"] & (minima["curvature"] > 0)]
    return over_texts({str(i): [k] for i, k in enumerate(found)})


def surface_model(frame: DataFrame, k: float) -> MixedModel:
    """The registered model, by REML, of the runs at T = 128 and 20 bytes per parameter:

        y - k (ln r - ln r*)^2 = a[text, D] + (b1 + B1[text]) u + b2 u^2 + (c1 + C1[text]) v
            + c2 v^2 + d u v + (s_u u + s_v v) log2(D / 64) + plan + l (ln r - ln r*)
            + seed[text, D] + e

    B1, C1, seed and e are random; u and v are as in `columns`, u from h = 16. Plans have one
    coefficient per budget, narrow heads one. l is left out where ln r - ln r* varies within every
    text by `ROUNDING` at most.
    """
    part = where(frame[frame["stage"] >= 2], length=128, bytes_per_parameter=20.0)
    part = part[np.isfinite(part["bits"])]
    u, v, size = part["u"] - 4, part["v"], np.log2(part["width"] / 64)
    levels = part["text"] + "-" + part["width"].astype(str)
    plans = (part["plan"] + "-" + part["budget"]).where(part["plan"] != "separate", "")
    fixed = {f"a[{name}]": levels == name for name in levels.unique()} | {
        "u": u, "u2": u**2, "v": v, "v2": v**2, "uv": u * v, "size_u": size * u,
        "size_v": size * v, "tuning": part["tuning"], "narrow": part["layout"] == "narrow",
        **{name: plans == name for name in plans.unique() if name},
    }  # fmt: skip
    if part["tuning"].groupby(levels).agg(np.ptp).max() <= ROUNDING:
        del fixed["tuning"]
    texts = _indicators(part["text"])
    random = [texts * u.to_numpy()[:, None], texts * v.to_numpy()[:, None],
              _indicators(part["seed"])]  # fmt: skip
    y = (part["bits"] - k * part["tuning"] ** 2).to_numpy()
    columns_of = {name: column.to_numpy(np.float64) for name, column in fixed.items()}
    return fit_reml(y, columns_of, random, texts.shape[1])


def _indicators(values: Series) -> Array:
    return pandas.get_dummies(values).to_numpy(np.float64)


def between(h_a: float, h_b: float) -> dict[str, float]:
    """Weights of loss(h_b) - loss(h_a) at D = 64 on N h = D in `surface_model`."""
    a, b = math.log2(h_a / 16), math.log2(h_b / 16)
    return {"u": b - a, "u2": b**2 - a**2}


@dataclasses.dataclass(frozen=True)
class Optimum:
    """u* = log2 of the best head_dim on N h = D at D = 64, and its slope on log2 D."""

    best: Estimate
    p_interior: float
    """Largest p-value of: the slope at h = 4 is negative, the slope at h = 64 is positive."""
    interior: bool
    slope: Estimate


def optimum(model: MixedModel) -> Optimum:
    """S1 and S3 from the coefficients of u: u* = 4 - b1 / (2 b2), slope -s_u / (2 b2).

    The interval of u* lies within the points where the slopes b1 + 2 b2 u at both ends are
    significantly negative and positive.
    """
    found = model.ratio({"u": -1}, {"u2": 2})
    best = dataclasses.replace(found, value=found.value + 4, low=found.low + 4, high=found.high + 4)
    left = model.contrast({"u": -1, "u2": 4})
    right = model.contrast({"u": 1, "u2": 4})
    ends = [e.p if e.value > 0 else 2 - e.p for e in (left, right)]
    inside = best.low > 2 and best.high < 6 and model.contrast({"u2": 1}).value > 0
    slope = model.contrast({"size_u": 1}) if "size_u" in model.names else None
    nothing = t_estimate(math.nan, math.nan, 0)
    trend = model.ratio({"size_u": -1}, {"u2": 2}) if slope else nothing
    return Optimum(best, min(1.0, max(ends)), inside, trend)
