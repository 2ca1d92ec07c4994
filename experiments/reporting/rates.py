"""The learning rate of an arm: a parabola through what was tried, and what to try next."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab import plotting
from experiments.reporting import results
from experiments.reporting.document import Block, Figure, Figures, Heading, Paragraph, Table
from experiments.reporting.figures import styles
from experiments.reporting.results import Panel
from experiments.reporting.statistics import CONFIDENCE
from experiments.reporting.wording import percent
from experiments.running import workdir

FACTOR = 2.0
"""Between neighbouring rates."""
AROUND = 2
"""Rates on each side of the best that the parabola goes through."""
MOST = 12
"""Rates that are tried at most."""
SEED = 1000
"""Of the runs that choose."""
FOLDER = "rates"
"""Of those runs, below that of a sweep."""


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


def trial(arm: str, rate: float) -> str:
    """The folder of the run that tries this rate for an arm; `arm_of` finds the arm again.

    >>> trial("wide-albert", 0.003), arm_of("wide-albert-lr0.003")
    ('wide-albert-lr0.003', 'wide-albert')
    """
    return f"{arm}-lr{rate:.4g}"


def arm_of(trial: str) -> str:
    """The arm that a `trial` is of."""
    return trial.rpartition("-lr")[0]


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
    shape = (float(a - b * middle + c * middle**2), float(b - 2 * c * middle), float(c))
    return Minimum(rate(top), float(a + b * top / 2), rate(low), rate(high), shape)


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


class Tuned(NamedTuple):
    """What was tried for one arm."""

    name: str
    """The arm's, as the report calls it."""
    tried: dict[float, float]
    """Rate -> score on the validation part, times `sign`: the less the better."""
    seconds: float
    """Wall time of all of them."""
    sign: int

    @property
    def best(self) -> Minimum | None:
        """Of the parabola; None where there is none between rates that were tried."""
        found = minimum(self.tried)
        return found if found and min(self.tried) <= found.rate <= max(self.tried) else None

    @property
    def chosen(self) -> float:
        """The rate of the parabola's minimum, else the best that was tried."""
        return self.best.rate if self.best else min(self.tried, key=self.tried.__getitem__)

    @property
    def wanted(self) -> float | None:
        """`next_rate`, up to the limit."""
        return next_rate(self.tried) if len(self.tried) < MOST else None


def read(folder: Path) -> dict[str, Tuned]:
    """Folder of an arm -> what was tried for it below `folder`; empty where nothing was.

    A run that diverged has an infinite score.
    """
    titles = results.sweep_of(folder).get("titles", {})
    found: dict[str, Tuned] = {}
    for path in sorted(folder.glob(f"{FOLDER}/*/{workdir.RESULT}")):
        arm = arm_of(path.parent.name)
        run = results.Run(path.parent, workdir.read_json(path), {}, titles.get(arm, ""))
        old = found.get(arm, Tuned(run.name, {}, 0.0, run.sign))
        score = run.sign * _validation_score(run) if run.complete else math.inf
        tried = old.tried | {run.result["learning_rate"]: score}
        seconds = old.seconds + run.result.get("wall_seconds", 0.0)
        found[arm] = old._replace(tried=tried, seconds=seconds)
    return found


def _validation_score(run: results.Run) -> float:
    """The main metric on the whole validation part, a mean over seeds: the last point of the curve
    in a run of an earlier version."""
    name = run.metrics[0]["name"]
    kept = run.result.get(f"validation_{name}")
    return float(np.mean(run.curve()[1][:, -1] if kept is None else kept))


def elsewhere(source: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Arm -> the rate that it got before, and what a report tells of that: data and match.

    source: the folder of a sweep that chose rates, or a table of one, as `results.csv` is.
    Raises ValueError where that is neither, and where a table has two rates for one arm.
    """
    if source.is_dir():
        chosen = {name: tuned.chosen for name, tuned in read(source).items()}
        if not chosen:
            raise ValueError(f"no learning rate was chosen in {source}; a sweep with --tune does")
        [first, *_] = results.read([source])
        data = first.runs[0].record["source"]["name"]
        return chosen, {"data": f"on {data}", "match": first.match}
    if not source.is_file():
        raise ValueError(f"{source} is neither the folder of a sweep nor a results.csv")
    with source.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not {"arm", "learning_rate"} <= rows[0].keys():
        raise ValueError(f"{source} has no rows with the columns arm and learning_rate")
    known: dict[str, set[str]] = {}
    for row in rows:
        known.setdefault(results.SEEDS.sub("", row["arm"]), set()).add(row["learning_rate"])
    for name, some in known.items():
        if len(some) > 1:
            raise ValueError(
                f"{source} has several learning rates for {name}: {', '.join(sorted(some))}; "
                "keep the rows of one"
            )
    matches = {row.get("match", "") for row in rows}
    told = {"data": f"as in {source.name}", "match": matches.pop() if len(matches) == 1 else None}
    return {name: float(*some) for name, some in known.items()}, told


def section(panel: Panel, name: str) -> list[Block]:
    """What was tried for every arm, and what the choice cost; `name` begins that of the figure."""
    here = {run.folder.name for run in panel.runs}
    found = {name: tuned for name, tuned in read(panel.folder).items() if name in here}
    if not found:
        return []
    rows, spent = [], sum(tuned.seconds for tuned in found.values())
    trained = sum(run.result.get("wall_seconds", 0.0) for run in panel.runs)
    for tuned in found.values():
        best, scores = tuned.best, sorted(tuned.tried.items())
        bound = best and best.low > 0 and math.isfinite(best.high)
        span = f"{best.low:.2g} to {best.high:.2g}" if best and bound else "not bounded"
        how = "parabola" if best else "best tried"
        how += ", at an end" if next_rate(tuned.tried) is not None else ""
        tried = ", ".join(f"{rate:.2g}: {tuned.sign * score:.3f}" for rate, score in scores)
        rows.append([tuned.name, f"{tuned.chosen:.3g}", span, how, tried])
    table = Table(
        f"Learning rate of every arm, chosen on the validation part with seed {SEED} alone, judged "
        f"on what is held out with other seeds. The parabola goes through the best rate and up to "
        f"{AROUND} on each side, in ln rate; {percent(CONFIDENCE)} interval after Fieller.",
        ["arm", "rate", f"{percent(CONFIDENCE)} interval", "chosen by", "rate: validation score"],
        rows,
        [""] * len(rows),
        words=1,
    )
    text = (
        f"Choosing took {spent:,.0f} seconds of training, beside the {trained:,.0f} of the arms "
        "themselves."
    )
    drawn = Figures([_figure(panel, found, name)])
    return [Heading(3, "Learning rates"), Paragraph(text), table, drawn]


def _figure(panel: Panel, found: Mapping[str, Tuned], name: str) -> Figure:
    looks, tried, fitted = styles(panel), [], []
    for tuned in found.values():
        look = looks[tuned.name]
        rates = np.array([rate for rate in sorted(tuned.tried) if math.isfinite(tuned.tried[rate])])
        scores = tuned.sign * np.array([tuned.tried[rate] for rate in rates])
        tried.append(plotting.Curve(tuned.name, look, rates, scores[None], False))
        if tuned.best:
            near = np.geomspace(1 / FACTOR, FACTOR, 50) ** AROUND * tuned.best.rate
            a, b, c = tuned.best.coefficients
            scores = tuned.sign * (a + b * np.log(near) + c * np.log(near) ** 2)
            fitted.append(plotting.Curve(tuned.name, look, near, scores[None], False))
    drawn = plotting.fitted_curves(tried, fitted, "learning rate", f"validation {panel.unit}")
    return Figure(
        f"{name}-rates",
        plotting.to_svg(drawn, f"{name}-rates"),
        "Validation score over the learning rate",
        "**Validation score over the learning rate.** One run a point; the parabolas through the "
        "best and its neighbours.",
    )
