"""The registered analysis of the head-width study: rows -> estimates, with texts random.

A frame has the judged rows with the columns of `columns`. Scores are held-out bits per byte of
complete runs. Differences are a Series by (text, seed). Plan: docs/results/head_width/plan.md.
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
TATOEBA = dict.fromkeys(("tatoeba_fr", "tatoeba_en"), "tatoeba")
"""Translations of each other, as one text."""


def columns(rows: DataFrame, formula: RateFormula) -> DataFrame:
    """Rows with `bits` (held out), `point` as "4x16" or "4x16 narrow", u = log2 h,
    v = log2(N h / D), and `tuning` = ln r - ln r*. Those without CPU seconds have their seconds
    there."""
    narrow = np.where(rows["layout"] == "narrow", " narrow", "")
    return rows.assign(
        cpu_seconds=rows["cpu_seconds"].fillna(rows["seconds"]),
        bits=rows["heldout_bits"],
        point=rows["num_heads"].astype(str) + "x" + rows["head_dim"].astype(str) + narrow,
        u=np.log2(rows["head_dim"]),
        v=np.log2(rows["num_heads"] * rows["head_dim"] / rows["width"]),
        tuning=np.log(rows["learning_rate"] / formula.rates(rows)),
    )


def where(frame: DataFrame, **values: str | float) -> DataFrame:
    """The rows whose columns have these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


def paired(a: DataFrame, b: DataFrame) -> Series:
    """bits(b) - bits(a) of the runs that have the same text and seed, by both.

    A text on which a run of `a` or `b` diverged has no estimate and is left out.
    """
    first, second = (one.groupby(["text", "seed"], sort=False)["bits"].mean() for one in (a, b))
    gaps = (second - first.reindex(second.index)).dropna()
    both = pandas.concat([a, b])
    diverged = both.loc[~np.isfinite(both["bits"]), "text"]
    return gaps[~gaps.index.isin(diverged, level="text")]


def means_of_texts(values: Series) -> Series:
    """Of differences, or scores, by text."""
    return values.groupby(level="text", sort=False).mean()


class Pooled(NamedTuple):
    """Standard deviation over texts of a difference, and its degrees of freedom."""

    sd: float
    freedom: int


def over_texts(pairs: Series, pooled: Pooled | None = None) -> Estimate:
    """Student's t over the means of texts: mean, standard error sd / sqrt(texts), texts - 1
    degrees of freedom. With `pooled` the interval is not narrower than that of the pooled
    variance; the p-value stays."""
    means = means_of_texts(pairs)
    error = float(means.std(ddof=1)) / math.sqrt(max(len(means), 1))
    return widened(t_estimate(float(means.mean()), error, len(means)), pooled)


def widened(found: Estimate, pooled: Pooled | None) -> Estimate:
    """`found` with an interval not narrower than that of the pooled variance; its p-value stays."""
    if pooled is None or found.count < 2:
        return found
    half = float(stats.t.ppf((1 + LEVEL) / 2, pooled.freedom)) * pooled.sd / math.sqrt(found.count)
    half = max(half, found.high - found.value)
    return dataclasses.replace(found, low=found.value - half, high=found.value + half)


def pool(many: Collection[Series]) -> Pooled:
    """Standard deviation over texts of a difference, its variance pooled over pairs of variants."""
    spread = [means.to_numpy() - means.mean() for means in map(means_of_texts, many)]
    freedom = sum(len(one) - 1 for one in spread)
    return Pooled(math.sqrt(sum(float(one @ one) for one in spread) / freedom), freedom)


def bootstrap(pairs: Series, draws: int = 2000) -> tuple[float, float]:
    """The percentile interval of the mean: texts are drawn with replacement, then seeds of each
    drawn text (Davison and Hinkley 1997, section 3.8). NaN for fewer than two texts."""
    random = np.random.default_rng(0)
    values = [one.to_numpy() for _, one in pairs.groupby(level="text", sort=False)]
    if len(values) < 2:
        return math.nan, math.nan
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


def primary_conclusion(tests: Sequence[Estimate]) -> str:
    """The registered decision for P1 after stage 3.

    "significant" or "equivalent" only where every one of `tests` (the mixed model and the paired
    t-test) says so, "inconclusive" elsewhere (amendment 1). A difference may be significant and
    smaller than the margin; then both are returned.

    >>> same = t_estimate(0.012, 0.002, 8)
    >>> primary_conclusion((same, same))
    'significant, and equivalent within 0.02'
    """
    same_sign = len({one.value > 0 for one in tests}) == 1
    found = {
        "significant": same_sign and all(one.p < FIRST_LOOK for one in tests),
        f"equivalent within {MARGIN:g}": all(equivalence(one, MARGIN) < 0.05 for one in tests),
    }
    return ", and ".join(word for word, holds in found.items() if holds) or "inconclusive"


def loss_slope(frame: DataFrame) -> Estimate:
    """dL / d ln C of the points h = 16, N h = D over model sizes, C = FLOPs per token x bytes:
    least squares within each text, then the mean over texts."""
    part = where(frame, head_dim=16, v=0, plan="separate", layout="standard", length=128,
                 bytes_per_parameter=20.0)  # fmt: skip
    part = part[np.isfinite(part["bits"])]
    part = part.assign(
        compute=np.log(part["flops_per_token"].astype(float) * part["bytes_trained"])
    )
    slopes = {}
    for text, rows in part.groupby("text", sort=False):
        means = rows.groupby("compute")["bits"].mean()
        if len(means) > 1:
            slopes[text] = np.polyfit(means.index, means, 1)[0]
    return over_texts(Series(slopes).rename_axis("text"))


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
    texts, seeds = (pandas.get_dummies(part[name]).astype(float) for name in ("text", "seed"))
    random = [texts.mul(u, axis=0), texts.mul(v, axis=0), seeds]
    y = part["bits"] - k * part["tuning"] ** 2
    return fit_reml(y, DataFrame(fixed).astype(float), random, texts.shape[1])


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best head_dim and N h / D of a `surface_model`."""

    best: Estimate
    """u* = log2 of the best head_dim on N h = D at D = 64."""
    p_interior: float
    """Largest p-value of: the slope at h = 4 is negative, the slope at h = 64 is positive."""
    interior: bool
    slope: Estimate
    """Of u* on log2 D."""
    total: Estimate
    """log2 of the best N h / D at the best head_dim."""
    residual_sd: float


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
    slope = t_estimate(math.nan, math.nan, 0)
    if "size_u" in model.coefficients:
        slope = model.ratio({"size_u": -1}, {"u2": 2})
    top = {"v": -1.0}
    if "uv" in model.coefficients:  # not of D = 96 alone, with N h / D != 1 at u = 0 alone
        top["uv"] = -found.value
    total = model.ratio(top, {"v2": 2})
    return Optimum(best, min(1.0, max(ends)), inside, slope, total, model.residual_sd)
