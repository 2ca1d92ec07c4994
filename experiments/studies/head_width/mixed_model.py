"""A linear mixed model with independent variance components, fitted by REML with SciPy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series
from scipy import optimize, stats

from attnlab.lab.stats import LEVEL, fieller

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its standard error, interval and two-sided p-value against 0."""

    value: float
    error: float
    low: float
    high: float
    p: float
    count: int
    """Units that the degrees of freedom come from (texts)."""

    @property
    def leaves_out_0(self) -> bool:
        """Does the interval?"""
        return self.low * self.high > 0


def t_estimate(value: float, error: float, count: int) -> Estimate:
    """The 95 % interval of Student's t with count - 1 degrees of freedom.

    >>> round(t_estimate(1.0, 0.5, 8).low, 3)
    -0.182
    """
    if count < 2 or not math.isfinite(error):
        return Estimate(value, math.nan, math.nan, math.nan, math.nan, count)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(value) / error, count - 1)) if error else float(value == 0)
    return Estimate(value, error, value - half, value + half, p, count)


@dataclasses.dataclass(frozen=True)
class MixedModel:
    """A fitted model: y = X beta + sum_i Z_i b_i + e, b_i ~ N(0, sd_i^2 I), e ~ N(0, sd^2 I)."""

    coefficients: Series
    """By name."""
    covariance: DataFrame
    component_sd: tuple[float, ...]
    residual_sd: float
    criterion: float
    """-2 log restricted likelihood."""
    texts: int

    def contrast(self, weights: Mapping[str, float]) -> Estimate:
        """A sum of weight x coefficient. The t distribution has texts - 1 degrees of freedom, for
        the normal distribution of a Wald test is too narrow for a few texts."""
        value, variance = self._sum(weights), self._covariance(weights, weights)
        return t_estimate(value, math.sqrt(max(0.0, variance)), self.texts)

    def ratio(self, top: Mapping[str, float], bottom: Mapping[str, float]) -> Estimate:
        """top / bottom with the interval of `fieller`; `p` is that of top = 0."""
        x, y = self._sum(top), self._sum(bottom)
        xx, xy, yy = (self._covariance(*two) for two in ((top, top), (top, bottom), (bottom,) * 2))
        q = float(stats.t.ppf((1 + LEVEL) / 2, self.texts - 1)) ** 2
        low, high = fieller(x, y, (xx, xy, yy), q)
        m = x / y
        error = math.sqrt(max(0.0, xx - 2 * m * xy + m**2 * yy)) / abs(y)
        return Estimate(m, error, low, high, self.contrast(top).p, self.texts)

    def _sum(self, weights: Mapping[str, float]) -> float:
        return float(sum(weight * self.coefficients[name] for name, weight in weights.items()))

    def _covariance(self, a: Mapping[str, float], b: Mapping[str, float]) -> float:
        return float(Series(a) @ self.covariance.loc[list(a), list(b)] @ Series(b))


def fit_reml(y: Series, fixed: DataFrame, random: Sequence[DataFrame], texts: int) -> MixedModel:
    """Restricted maximum likelihood (Patterson and Thompson 1971, doi:10.1093/biomet/58.3.545).

    With V = I + sum_i theta_i^2 Z_i Z_i' and the residual variance profiled out, minimizes

        (n - p) (1 + log(2 pi s2)) + log|V| + log|X' V^-1 X|,   s2 = r' V^-1 r / (n - p)

    over theta_i >= 0 (Bates et al. 2015, doi:10.18637/jss.v067.i01), along one theta_i at a time: a
    gradient is 0 at theta_i = 0, where a search by it would stay.

    Args:
        y: [n].
        fixed: [n, p]; a column that those before it determine is dropped.
        random: a matrix Z_i [n, q_i] per variance component.
        texts: independent units, for the degrees of freedom of intervals.
    """
    fixed = _independent(fixed)
    n, p = fixed.shape
    z = np.hstack([one.to_numpy(float) for one in random])
    component = np.repeat(np.arange(len(random)), [one.shape[1] for one in random])
    xy = np.column_stack([fixed.to_numpy(float), y])
    zz, zxy, xyxy = z.T @ z, z.T @ xy, xy.T @ xy

    def solved(theta: Array) -> tuple[float, Array, Array, float]:
        scale = theta[component]
        m = np.linalg.cholesky(np.eye(len(scale)) + scale[:, None] * zz * scale)
        w = np.linalg.solve(m, scale[:, None] * zxy)
        inner = xyxy - w.T @ w  # [x y]' V^-1 [x y]
        beta: Array = np.linalg.solve(inner[:p, :p], inner[:p, p])
        s2 = float(inner[p, p] - inner[:p, p] @ beta) / (n - p)
        log_v = 2 * float(np.log(np.diag(m)).sum())
        log_x = float(np.linalg.slogdet(inner[:p, :p])[1])
        value = (n - p) * (1 + math.log(2 * math.pi * s2)) + log_v + log_x
        return value, beta, inner[:p, :p], s2

    found = optimize.minimize(
        lambda theta: solved(theta)[0], np.ones(len(random)), method="Powell",
        bounds=[(0.0, None)] * len(random), options={"xtol": 1e-10, "ftol": 1e-14},
    )  # fmt: skip
    value, beta, information, s2 = solved(found.x)
    sd, names = math.sqrt(s2), fixed.columns
    covariance = DataFrame(s2 * np.linalg.inv(information), names, names)
    spread = tuple(float(theta * sd) for theta in found.x)
    return MixedModel(Series(beta, names), covariance, spread, sd, value, texts)


def _independent(fixed: DataFrame) -> DataFrame:
    """The columns that those before them do not determine."""
    names: list[str] = []
    for name in fixed:
        if np.linalg.matrix_rank(fixed[[*names, name]].to_numpy(float)) > len(names):
            names.append(name)
    return fixed[names]
