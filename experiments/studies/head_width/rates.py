"""Learning rates from rows: the minimum of a grid, grids that bracket it, a rate formula."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.studies.head_width.rows import Row
from experiments.studies.head_width.spec import Variant


@dataclasses.dataclass(frozen=True)
class Cell:
    """Runs that differ in their learning rate only."""

    variant: Variant
    parametrization: str
    text: str
    seed: int
    bytes_per_parameter: float


@dataclasses.dataclass(frozen=True)
class Minimum:
    """The best learning rate of a cell by validation bits per byte."""

    log_rate: float
    bits: float
    curvature: float
    """k of bits + k (ln r - ln r*)^2; 0 where it could not be found."""
    interior: bool
    """Is the best rate of the grid between two others?"""


def cells_of(rows: Sequence[Row]) -> dict[Cell, list[Row]]:
    """Rows by cell, each in the order of its rates."""
    found: dict[Cell, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.spec.learning_rate):
        s = row.spec
        cell = Cell(s.variant, s.parametrization, s.text, s.seed, s.bytes_per_parameter)
        found.setdefault(cell, []).append(row)
    return found


def minimum(rows: Sequence[Row]) -> Minimum:
    """The minimum of the rates of a cell by validation bits; the held-out part is not read."""
    return parabola_minimum({row.spec.learning_rate: row.scores.validation_bits for row in rows})


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
    if not interior or not np.all(np.isfinite(y[best - 1 : best + 2])):
        return Minimum(float(x[best]), float(y[best]), 0.0, interior)
    three = slice(best - 1, best + 2)
    k, slope, level = np.polyfit(x[three] - x[best], y[three], 2)
    at = -slope / (2 * k)
    return Minimum(float(x[best] + at), float(level - k * at**2), float(k), True)


def next_rate(rows: Sequence[Row], factor: float) -> float | None:
    """The rate that a cell needs beyond its grid: one `factor` outside the end that is best; None
    where the best rate is between two others."""
    rates = sorted(row.spec.learning_rate for row in rows)
    found = minimum(rows)
    if found.interior:
        return None
    lowest = math.isclose(math.exp(found.log_rate), rates[0])
    return float(f"{rates[0] / factor if lowest else rates[-1] * factor:.4g}")


@dataclasses.dataclass(frozen=True)
class RateFormula:
    """ln r* as a sum of coefficient x term, with the standard deviation of its residuals."""

    coefficients: dict[str, float]
    residual_sd: float
    residuals: dict[str, float]
    """Run of the best rate of a cell -> observed less fitted ln r*."""

    def rate(self, variant: Variant, bytes_per_parameter: float) -> float:
        """r* of a variant, 3 significant digits."""
        terms = rate_terms(variant, bytes_per_parameter)
        total = sum(self.coefficients[name] * value for name, value in terms.items())
        return float(f"{math.exp(total):.3g}")


PLANS = ("cycle:2", "albert", "attention_only", "ffn_only")


def rate_terms(variant: Variant, bytes_per_parameter: float) -> dict[str, float]:
    """The terms of the rate formula: ln h, ln N, ln D; ln of bytes per parameter over 20; ln T over
    128; 1 for narrow heads; 1 for each sharing plan."""
    return {
        "constant": 1.0,
        "ln_head_dim": math.log(variant.head_dim),
        "ln_num_heads": math.log(variant.num_heads),
        "ln_width": math.log(variant.width / 64),
        "ln_bytes": math.log(bytes_per_parameter / 20),
        "ln_length": math.log(variant.length / 128),
        "narrow": float(variant.layout == "narrow"),
        **{plan: float(variant.plan == plan) for plan in PLANS},
    }


def fit_rates(rows: Sequence[Row]) -> RateFormula:
    """Least squares of ln r* of every cell on `rate_terms`; a term that no cell has gets 0."""
    cells = cells_of(rows)
    terms = [rate_terms(cell.variant, cell.bytes_per_parameter) for cell in cells]
    design = np.array([list(one.values()) for one in terms])
    best = np.array([minimum(of_cell).log_rate for of_cell in cells.values()])
    solution = np.linalg.lstsq(design, best, rcond=1e-10)[0]
    left = best - design @ solution
    free = max(1, len(best) - int(np.linalg.matrix_rank(design)))
    names = [f"{c.variant.point}-D{c.variant.width}-{c.text}-{c.variant.plan}-T{c.variant.length}"
             f"-{c.bytes_per_parameter:g}" for c in cells]  # fmt: skip
    return RateFormula(
        dict(zip(terms[0], map(float, solution), strict=True)),
        float(np.sqrt(np.sum(left**2) / free)),
        dict(zip(names, map(float, left), strict=True)),
    )


def choose(
    rows: Sequence[Row], names: Sequence[str], tolerance: float
) -> tuple[str, dict[str, tuple[float, float]]]:
    """The parametrization that stage 0 chooses, and (mean bits, range of ln r*) of each.

    Mean bits: the mean over cells of the interpolated minimum of the validation part. Among those
    within `tolerance` bits of the lowest mean, the one whose ln r* (mean over texts) has the
    smallest range over the variants; equal ranges: the first of `names`.
    """
    found: dict[str, tuple[float, float]] = {}
    for name in names:
        cells = {c: minimum(r) for c, r in cells_of(rows).items() if c.parametrization == name}
        mean = float(np.mean([m.bits for m in cells.values()]))
        of_variant: Callable[[Variant], float] = lambda v, cells=cells: float(  # type: ignore[misc]
            np.mean([m.log_rate for c, m in cells.items() if c.variant == v])
        )
        rates = [of_variant(v) for v in dict.fromkeys(c.variant for c in cells)]
        found[name] = mean, max(rates) - min(rates)
    lowest = min(mean for mean, _ in found.values())
    close = [n for n in names if found[n][0] <= lowest + tolerance]
    return min(close, key=lambda n: found[n][1]), found
