"""The stages of the head-width study and its rules, in code; docs/results/head_width/plan.md."""

import dataclasses
import itertools
import math

from pandas import DataFrame

from experiments.studies.head_width.rates import PLANS, choose, fit_rates, minima, next_rate
from experiments.studies.head_width.rows import runs_of
from experiments.studies.head_width.spec import PARAMETRIZATIONS, StudyRun, Variant
from experiments.studies.head_width.texts import TEXTS

ALL_TEXTS = tuple(TEXTS)
ORDER = (0, 1, 3, 2, 6, 5, 4)
"""The order of the stages; 7 is the second look at P1, run only where the plan asks for it."""
TINY = -1
TITLES = {
    TINY: "tiny, for tests",
    0: "optimizer",
    1: "learning rates",
    2: "surface, D = 32",
    3: "surface, D = 64",
    4: "surface, D = 96",
    5: "sharing, D = 64",
    6: "training length and context",
    7: "P1, second look",
}

# (num_heads, head_dim); N h / D is 1, 1/2 and 3/2.
POINTS = {
    32: ((16, 2), (8, 4), (4, 8), (2, 16), (1, 32), (4, 4), (2, 8), (1, 16),
         (12, 4), (6, 8), (3, 16)),
    64: ((16, 4), (8, 8), (4, 16), (2, 32), (1, 64), (4, 8), (2, 16), (1, 32),
         (12, 8), (6, 16), (3, 32)),
    96: ((24, 4), (12, 8), (6, 16), (3, 32), (1, 96), (3, 16), (9, 16)),
}  # fmt: skip
NARROW = ((4, 16), (8, 8))

# Stage 0: grids with a factor of 2, extended by the same factor.
STAGE0_POINTS = ((4, 16), (1, 64), (3, 32))
STAGE0_RATES = {
    "one_rate": (0.0025, 0.005, 0.01, 0.02),
    "fan_in": (0.004, 0.008, 0.016, 0.032),
    "qk_norm": (0.0025, 0.005, 0.01, 0.02),
    "muon": (0.0025, 0.005, 0.01, 0.02),
}
STAGE0_TEXTS = ("python", "wikitext2")
STAGE0_FACTOR, MOST_EXTRA = 2.0, 2
TOLERANCE = 0.010
# Stage 1: five rates around the centre of stage 0.
STAGE1_TEXTS = {32: ("novels", "tatoeba_fr"), 64: ("wikitext2",)}
STAGE1_FACTOR = 3**0.5
JUDGED_FACTORS = (0.8, 1.25)
LENGTH_POINTS = ((8, 8), (4, 16), (2, 32), (1, 64))
LENGTH_TEXTS = ("python", "wikitext2", "novels", "movie_reviews")
REPEATED_TEXTS = ("multi30k_de", "web")
"""Read 4 to 5 times at D = 96."""
CONTEXT_POINTS, CONTEXT_TEXTS = ((16, 4), (4, 16), (1, 64)), ("python", "wikitext2")
SHARING_TEXTS = ("python", "wikitext2", "tatoeba_fr", "multi30k_de")


class NotReady(Exception):
    """A stage needs rows of an earlier one."""


def tuning_seed(stage: int, text: str, width: int) -> int:
    """Seeds of tuning: one per stage, width and text."""
    return (stage + 1) * 1000 + width * 10 + ALL_TEXTS.index(text)


def judged_run(
    stage: int, variant: Variant, text: str, replicate: int = 0, each: float = 20.0
) -> StudyRun:
    """A judged run before its parametrization and learning rate are known. Its seed is one per
    width, text and replicate, the same for every variant.

    >>> judged_run(3, Variant(4, 16), "python", 1).seed
    64001
    """
    seed = variant.width * 1000 + ALL_TEXTS.index(text) * 10 + replicate
    return StudyRun(stage, variant, "", text, seed, 0.0, each)


def planned(stage: int) -> list[StudyRun]:
    """The runs of a judged stage (2 to 7), as `judged_run` makes them."""
    if stage in (2, 3, 4):
        width = {2: 32, 3: 64, 4: 96}[stage]
        points = [Variant(n, h, width=width) for n, h in POINTS[width]]
        points += [Variant(n, h, "narrow") for n, h in NARROW if width == 64]
        replicates = (0,) if stage == 4 else (0, 1)
        runs = itertools.product(points, ALL_TEXTS, replicates)
    elif stage == 5:
        shared = [
            Variant(*point, plan=plan, budget=budget)
            for point in ((4, 16), (2, 32))
            for plan in PLANS
            for budget in ("parameters", "flops")
        ]
        runs = itertools.product(shared, SHARING_TEXTS, (0,))
    elif stage == 6:
        long = itertools.product([Variant(*p) for p in LENGTH_POINTS], LENGTH_TEXTS, (0,), (80.0,))
        other = [Variant(*point, length=t) for point in CONTEXT_POINTS for t in (64, 256)]
        return [judged_run(stage, *one) for one in long] + [
            judged_run(stage, *one) for one in itertools.product(other, CONTEXT_TEXTS)
        ]
    else:
        runs = itertools.product([Variant(4, 16), Variant(2, 32)], ALL_TEXTS, (2, 3))
    return [judged_run(stage, *one) for one in runs]


def rate_cells() -> list[tuple[Variant, str, float]]:
    """(variant, text, bytes per parameter) of the cells of stage 1, each of five rates."""
    cells = [
        (Variant(n, h, width=width), text, 20.0)
        for width in (64, 32)
        for text in STAGE1_TEXTS[width]
        for n, h in POINTS[width]
    ]
    text, base = STAGE1_TEXTS[32][0], Variant(4, 8, width=32)
    others = [dataclasses.replace(base, plan=plan) for plan in PLANS]
    others += [dataclasses.replace(base, layout="narrow")]
    others += [dataclasses.replace(base, length=length) for length in (64, 256)]
    cells.append((base, text, 80.0))
    return cells + [(variant, text, 20.0) for variant in others]


def _extended(specs: list[StudyRun], rows: DataFrame, factor: float, count: int) -> list[StudyRun]:
    """`specs`, `count` to a cell, with the rates that cells need beyond their grids, at most
    `MOST_EXTRA` a cell."""
    stage = specs[0].stage
    of_stage = rows[rows["stage"] == stage]
    done = runs_of(of_stage)
    if not set(specs) <= set(done):
        return specs
    cells = minima(of_stage)
    cells["stage"] = stage
    cells["learning_rate"] = [
        next_rate(tried, factor) if len(tried) < count + MOST_EXTRA else math.nan
        for tried in cells["tried"]
    ]
    extra = [run for run in done if run not in specs]
    return [*specs, *extra, *runs_of(cells.dropna(subset="learning_rate"))]


def stage0(rows: DataFrame) -> list[StudyRun]:
    """{4x16, 1x64, 3x32} x parametrizations x 4 rates x 2 texts, and what the grids lack."""
    specs = [
        StudyRun(0, Variant(*point), name, text, tuning_seed(0, text, 64), rate)
        for text in STAGE0_TEXTS
        for name in PARAMETRIZATIONS
        for point in STAGE0_POINTS
        for rate in STAGE0_RATES[name]
    ]
    return _extended(specs, rows, STAGE0_FACTOR, 4)


def _complete(stage: int, rows: DataFrame) -> DataFrame:
    """The rows of stage 0 or 1. Raises NotReady where it is not complete."""
    if count := missing(stage, rows):
        raise NotReady(f"stage {stage} lacks {count} runs")
    return rows[rows["stage"] == stage]


def chosen_parametrization(rows: DataFrame) -> str:
    """What the rule of the plan chooses from stage 0. Raises NotReady."""
    return choose(_complete(0, rows), tuple(PARAMETRIZATIONS), TOLERANCE)[0]


def stage1(rows: DataFrame) -> list[StudyRun]:
    """Five rates in each cell, around the mean ln r* of stage 0, and what the grids lack."""
    name = chosen_parametrization(rows)
    best = minima(rows[(rows["stage"] == 0) & (rows["parametrization"] == name)])["log_rate"]
    centre = math.e ** (sum(best) / len(best))
    rates = [float(f"{centre * STAGE1_FACTOR**power:.3g}") for power in range(-2, 3)]
    specs = [
        StudyRun(1, variant, name, text, tuning_seed(1, text, variant.width), rate, each)
        for variant, text, each in rate_cells()
        for rate in rates
    ]
    return _extended(specs, rows, STAGE1_FACTOR, 5)


def judged(stage: int, rows: DataFrame) -> list[StudyRun]:
    """A judged stage at r* x 0.8 or x 1.25, in turn over texts and replicates."""
    name, formula = chosen_parametrization(rows), fit_rates(_complete(1, rows))
    runs = planned(stage)
    best = formula.rates(DataFrame([run.fields for run in runs]))
    found = []
    for run, rate in zip(runs, best, strict=True):
        side = JUDGED_FACTORS[(ALL_TEXTS.index(run.text) + run.seed % 10) % 2]
        rate = float(f"{side * rate:.4g}")
        found.append(dataclasses.replace(run, parametrization=name, learning_rate=rate))
    return found


def stage_runs(stage: int, rows: DataFrame) -> list[StudyRun]:
    """The runs of a stage, given the rows there are. Raises NotReady."""
    if stage == TINY:
        return tiny_runs()
    return stage0(rows) if stage == 0 else stage1(rows) if stage == 1 else judged(stage, rows)


def count_runs(stage: int) -> int:
    """Runs of a stage, without further rates beyond a grid."""
    counts = {TINY: len(tiny_runs()), 0: 96, 1: 5 * len(rate_cells())}
    return counts[stage] if stage in counts else len(planned(stage))


def missing(stage: int, rows: DataFrame) -> int:
    """How many runs of a stage are not in the rows; those of judged stages at any rate."""
    done = runs_of(rows[rows["stage"] == stage])
    if stage >= 2:
        blank = {dataclasses.replace(r, parametrization="", learning_rate=0.0) for r in done}
        return len(set(planned(stage)) - blank)
    try:
        return len(set(stage_runs(stage, rows)) - set(done))
    except NotReady:
        return count_runs(stage)


def check_complete(rows: DataFrame) -> None:
    """Raises ValueError unless all runs of stages 0 to 6 are there."""
    left = {stage: missing(stage, rows) for stage in sorted(ORDER)}
    if lacking := [f"{count} of stage {stage}" for stage, count in left.items() if count]:
        raise ValueError(
            f"the pages need all runs of stages 0 to 6; {', '.join(lacking)} are missing: run them "
            "first"
        )


def tiny_runs() -> list[StudyRun]:
    """Two parametrizations x 2 rates at D = 16, seconds a run."""
    return [
        StudyRun(TINY, Variant(n, h, width=16, length=16), name, "python", 5, rate, 2.0)
        for n, h in ((1, 16), (4, 4))
        for name in ("one_rate", "fan_in")
        for rate in (0.003, 0.01)
    ]
