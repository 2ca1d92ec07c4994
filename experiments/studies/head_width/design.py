"""The stages of the head-width study and its rules, in code; docs/results/head_width/plan.md."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from experiments.studies.head_width.rates import (
    PLANS,
    cells_of,
    choose,
    fit_rates,
    minimum,
    next_rate,
)
from experiments.studies.head_width.rows import Row
from experiments.studies.head_width.spec import PARAMETRIZATIONS, StudyRun, Variant
from experiments.studies.head_width.texts import TEXTS

ALL_TEXTS = tuple(TEXTS)
ORDER = (0, 1, 3, 2, 6, 5, 4)
"""The order of the stages; 7 is the second look at P1, run only where the plan asks for it."""
TITLES = {
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


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run before its learning rate is known."""

    variant: Variant
    text: str
    replicate: int = 0
    bytes_per_parameter: float = 20.0


def tuning_seed(stage: int, text: str, width: int) -> int:
    """Seeds of tuning: one per stage, width and text."""
    return (stage + 1) * 1000 + width * 10 + ALL_TEXTS.index(text)


def judged_seed(run: Planned) -> int:
    """Seeds of judged runs: one per width, text and replicate, the same for every variant."""
    return run.variant.width * 1000 + ALL_TEXTS.index(run.text) * 10 + run.replicate


def planned(stage: int) -> list[Planned]:
    """The runs of a judged stage (2 to 7), in the order in which they start."""
    if stage in (2, 3):
        width = {2: 32, 3: 64}[stage]
        points = [Variant(n, h, width=width) for n, h in POINTS[width]]
        points += [Variant(n, h, "narrow") for n, h in NARROW if width == 64]
        runs = [Planned(*one) for one in itertools.product(points, ALL_TEXTS, (0, 1))]
    elif stage == 4:
        points = [Variant(n, h, width=96) for n, h in POINTS[96]]
        runs = [Planned(*one) for one in itertools.product(points, ALL_TEXTS)]
    elif stage == 5:
        shared = [
            Variant(*point, plan=plan, budget=budget)
            for point in ((4, 16), (2, 32))
            for plan in PLANS
            for budget in ("parameters", "flops")
        ]
        runs = [Planned(*one) for one in itertools.product(shared, SHARING_TEXTS)]
    elif stage == 6:
        long = [Variant(*point) for point in LENGTH_POINTS]
        runs = [Planned(v, t, 0, 80.0) for v, t in itertools.product(long, LENGTH_TEXTS)]
        other = [Variant(*point, length=t) for point in CONTEXT_POINTS for t in (64, 256)]
        runs += [Planned(*one) for one in itertools.product(other, CONTEXT_TEXTS)]
    else:
        second = [Variant(4, 16), Variant(2, 32)]
        runs = [Planned(*one) for one in itertools.product(second, ALL_TEXTS, (2, 3))]
    return sorted(runs, key=lambda run: (run.replicate, -run.bytes_per_parameter))


def rate_cells() -> list[Planned]:
    """The cells of stage 1, each of five rates."""
    cells = [
        Planned(Variant(n, h, width=width), text)
        for width in (64, 32)
        for text in STAGE1_TEXTS[width]
        for n, h in POINTS[width]
    ]
    text, base = STAGE1_TEXTS[32][0], Variant(4, 8, width=32)
    others = [dataclasses.replace(base, plan=plan) for plan in PLANS]
    others += [dataclasses.replace(base, layout="narrow")]
    others += [dataclasses.replace(base, length=length) for length in (64, 256)]
    cells.append(Planned(base, text, bytes_per_parameter=80.0))
    return cells + [Planned(variant, text) for variant in others]


def _extended(
    stage: int, specs: list[StudyRun], rows: Sequence[Row], factor: float
) -> list[StudyRun]:
    """`specs` with the rates that cells need beyond their grids, at most `MOST_EXTRA` a cell."""
    of_stage = [row for row in rows if row.spec.stage == stage]
    done = {row.spec.id for row in of_stage}
    if any(spec.id not in done for spec in specs):
        return specs
    extra = [row.spec for row in of_stage if row.spec not in specs]
    specs = [*specs, *extra]
    for cell in cells_of(of_stage).values():
        count = sum(row.spec in extra for row in cell)
        rate = next_rate(cell, factor) if count < MOST_EXTRA else None
        if rate is not None:
            specs.append(dataclasses.replace(cell[0].spec, learning_rate=rate))
    return specs


def stage0(rows: Sequence[Row]) -> list[StudyRun]:
    """{4x16, 1x64, 3x32} x parametrizations x 4 rates x 2 texts, and what the grids lack."""
    specs = [
        StudyRun(0, Variant(*point), name, text, tuning_seed(0, text, 64), rate)
        for number in range(4)
        for text in STAGE0_TEXTS
        for name in PARAMETRIZATIONS
        for point in STAGE0_POINTS
        for rate in STAGE0_RATES[name][number : number + 1]
    ]
    return _extended(0, specs, rows, STAGE0_FACTOR)


def _complete(stage: int, rows: Sequence[Row]) -> list[Row]:
    """The rows of stage 0 or 1. Raises NotReady where it is not complete."""
    of_stage = [row for row in rows if row.spec.stage == stage]
    done = {row.spec.id for row in of_stage}
    wanted = stage0(rows) if stage == 0 else stage1(rows)
    if left := [spec for spec in wanted if spec.id not in done]:
        raise NotReady(f"stage {stage} lacks {len(left)} runs")
    return of_stage


def chosen_parametrization(rows: Sequence[Row]) -> str:
    """What the rule of the plan chooses from stage 0. Raises NotReady."""
    return choose(_complete(0, rows), tuple(PARAMETRIZATIONS), TOLERANCE)[0]


def stage1(rows: Sequence[Row]) -> list[StudyRun]:
    """Five rates in each cell, around the mean ln r* of stage 0, and what the grids lack."""
    name = chosen_parametrization(rows)
    cells = cells_of([r for r in rows if r.spec.stage == 0 and r.spec.parametrization == name])
    best = [minimum(of_cell).log_rate for of_cell in cells.values()]
    centre = math.e ** (sum(best) / len(best))
    rates = [float(f"{centre * STAGE1_FACTOR**power:.3g}") for power in range(-2, 3)]
    specs = [
        StudyRun(
            1, c.variant, name, c.text, tuning_seed(1, c.text, c.variant.width), rate,
            c.bytes_per_parameter,
        )
        for c in rate_cells()
        for rate in rates
    ]  # fmt: skip
    return _extended(1, specs, rows, STAGE1_FACTOR)


def judged(stage: int, rows: Sequence[Row]) -> list[StudyRun]:
    """A judged stage at r* x 0.8 or x 1.25, in turn over texts and replicates."""
    name, formula = chosen_parametrization(rows), fit_rates(_complete(1, rows))
    specs = []
    for run in planned(stage):
        side = JUDGED_FACTORS[(ALL_TEXTS.index(run.text) + run.replicate) % 2]
        rate = float(f"{side * formula.rate(run.variant, run.bytes_per_parameter):.4g}")
        seed, each = judged_seed(run), run.bytes_per_parameter
        specs.append(StudyRun(stage, run.variant, name, run.text, seed, rate, each))
    return specs


def stage_runs(stage: int, rows: Sequence[Row]) -> list[StudyRun]:
    """The runs of a stage, given the rows there are. Raises NotReady."""
    if stage == -1:
        return tiny_runs()
    return stage0(rows) if stage == 0 else stage1(rows) if stage == 1 else judged(stage, rows)


def expected_runs(stage: int) -> list[Planned]:
    """The runs of a stage whatever the rates, for counts and times."""
    if stage == -1:
        return [Planned(s.variant, s.text, 0, s.bytes_per_parameter) for s in tiny_runs()]
    if stage == 0:
        return [Planned(spec.variant, spec.text) for spec in stage0([])]
    if stage == 1:
        return [cell for cell in rate_cells() for _ in range(5)]
    return planned(stage)


def missing(stage: int, rows: Sequence[Row]) -> int:
    """How many runs of a stage are not in the rows."""
    if stage < 2:
        of_stage = {row.spec.id for row in rows if row.spec.stage == stage}
        try:
            return sum(spec.id not in of_stage for spec in stage_runs(stage, rows))
        except NotReady:
            return len(expected_runs(stage))
    there = {
        (r.spec.variant, r.spec.text, r.spec.seed, r.spec.bytes_per_parameter)
        for r in rows
        if r.spec.stage == stage
    }
    wanted = [(p.variant, p.text, judged_seed(p), p.bytes_per_parameter)
              for p in planned(stage)]  # fmt: skip
    return sum(one not in there for one in wanted)


def check_complete(rows: Sequence[Row]) -> None:
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
        StudyRun(-1, Variant(n, h, width=16, length=16), name, "python", 5, rate, 2.0)
        for n, h in ((1, 16), (4, 4))
        for name in ("one_rate", "fan_in")
        for rate in (0.003, 0.01)
    ]
