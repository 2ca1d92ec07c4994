"""The hypotheses of the head-width study, from rows alone; see plan.md there."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

from pandas import DataFrame, Series

from attnlab.lab.stats import holm
from experiments.studies.head_width import analysis
from experiments.studies.head_width.analysis import Optimum
from experiments.studies.head_width.design import FULL, STAGE_OF_WIDTH
from experiments.studies.head_width.mixed_model import Estimate, MixedModel
from experiments.studies.head_width.rates import PLANS, curvature, fit_rates, minima
from experiments.studies.head_width.rows import check_complete


class Result(NamedTuple):
    """A row of the table of results."""

    name: str
    text: str
    found: Estimate
    pairs: Series | None
    corrected: float
    conclusion: str


@dataclasses.dataclass(frozen=True)
class Study:
    """What the page is made of: the judged rows, and k of the learning rates."""

    frame: DataFrame
    tuning_k: float
    rate_sd: float = math.nan
    """Standard deviation that the formula of the learning rates leaves in ln r."""

    @functools.cached_property
    def model(self) -> MixedModel:
        """The registered model."""
        return analysis.surface_model(self.frame, self.tuning_k)

    @functools.cached_property
    def slope(self) -> Estimate:
        """Of the loss on ln compute."""
        return analysis.loss_slope(self.frame)

    def only(self, frame: DataFrame) -> "Study":
        """The same of fewer rows."""
        return dataclasses.replace(self, frame=frame)

    def points(
        self, *points: str, plan: str = "separate", budget: str = "flops", **other: float
    ) -> DataFrame:
        """The rows of variants, as "4x16" and "4x16 narrow"; D = 64, T = 128, 20 bytes per
        parameter unless `other` says otherwise."""
        values = {"width": 64, "length": 128, "bytes_per_parameter": 20.0} | other
        rows = analysis.where(self.frame, **values, plan=plan, budget=budget)
        return rows[rows["point"].isin(points)]


def read_study(rows: DataFrame) -> Study:
    """The judged rows and what is fitted to them.

    Raises ValueError unless all runs are there: nothing is judged before.
    """
    check_complete(rows)
    tuning = rows[rows["stage"] == 1]
    formula = fit_rates(tuning)
    frame = analysis.columns(rows[rows["stage"] >= 2], formula)
    return Study(frame, curvature(minima(tuning)), formula.residual_sd)


def against(study: Study, width: int, point: str) -> Series:
    """Differences of a point from h = 16 on N h = D."""
    return analysis.paired(*(study.points(one, width=width) for one in (FULL[width][16], point)))


def from_reference(study: Study, width: int = 64) -> dict[int, Series]:
    """head_dim -> differences from h = 16 on N h = D."""
    return {h: against(study, width, point) for h, point in FULL[width].items() if h != 16}


def difference(study: Study, width: int, point: str) -> Estimate:
    """Bits by which a point is worse than h = 16 on N h = D. No interval is narrower than that of
    the variance pooled over the points with N h = D."""
    pooled = analysis.pool(from_reference(study, width).values())
    return analysis.over_texts(against(study, width, point), pooled)


def sharing(study: Study, plan: str, budget: str = "flops") -> Series:
    """Differences of a sharing plan from separate layers, over 4x16 and 2x32."""
    points = ("4x16", "2x32")
    shared = study.points(*points, plan=plan, budget=budget)
    return analysis.paired(study.points(*points), shared)


def sharing_costs(study: Study, budget: str = "flops") -> dict[str, Estimate]:
    """Sharing plan -> bits worse than separate layers. No interval is narrower than that of the
    variance pooled over the plans."""
    pairs = {plan: sharing(study, plan, budget) for plan in PLANS}
    pooled = analysis.pool(pairs.values())
    return {plan: analysis.over_texts(one, pooled) for plan, one in pairs.items()}


def across(study: Study, *points: str) -> Series:
    """Differences of three points with h = 8, 16, 32 from N h = D."""
    return analysis.paired(study.points("8x8", "4x16", "2x32"), study.points(*points))


def primary(study: Study) -> list[Result]:
    """P1 by both tests, which decide together, from stages 1 and 3 alone (amendment 1). No interval
    is narrower than that of the pooled variance."""
    part = study.only(study.frame[study.frame["stage"] == 3])
    pairs = from_reference(part)
    pooled = analysis.pool(pairs.values())
    tests = {
        "mixed model": part.model.contrast({"u": 1, "u2": 1}),  # u is 0 at h = 16, 1 at h = 32
        "paired t-test": analysis.over_texts(pairs[32]),
    }
    conclusion = analysis.primary_conclusion(list(tests.values()))
    text = "loss(2x32) - loss(4x16), D = 64"
    return [
        Result(f"P1 ({name}, first look)", text, analysis.widened(found, pooled), pairs[32],
               found.p, conclusion)
        for name, found in tests.items()
    ]  # fmt: skip


def secondary(study: Study) -> list[Result]:
    """S1 to S5 with Holm's correction."""
    best, costs = analysis.optimum(study.model), sharing_costs(study)
    albert, attention_only = costs["albert"], costs["attention_only"]
    wide, half = across(study, "12x8", "6x16", "3x32"), across(study, "4x8", "2x16", "1x32")
    more = analysis.over_texts(wide, analysis.pool([wide, half]))
    same = analysis.equivalence(attention_only, 0.01)
    lines = [  # name, what, estimate, differences, p, the conclusion and whether its interval holds
        ("S1", "u* = log2 of the best head_dim on N h = D, D = 64", best.best, None,
         best.p_interior, "interior", best.interior),
        ("S2", "loss at N h = 3D/2 less loss at N h = D, h = 8, 16, 32", more, wide,
         more.p, "significant", more.leaves_out_0),
        ("S3", "slope of u* on log2 D", best.slope, None,
         best.slope.p, "significant", best.slope.leaves_out_0),
        ("S4", "albert less separate at equal FLOPs", albert, sharing(study, "albert"),
         albert.p, "significant", albert.leaves_out_0),
        ("S5", "attention_only less separate at equal FLOPs", attention_only,
         sharing(study, "attention_only"), same, "equivalent within 0.01", same < 0.05),
    ]  # fmt: skip
    found = []
    corrected = holm([line[4] for line in lines], 5).tolist()
    for (name, text, one, pairs, _, word, holds), p in zip(lines, corrected, strict=True):
        conclusion = word if holds and p < 0.05 else "inconclusive"
        if name == "S5" and not holds and one.leaves_out_0:
            conclusion = "worse" if one.value > 0 else "better"
        found.append(Result(name, text, one, pairs, p, conclusion))
    return found


def fits(study: Study) -> dict[str, Optimum]:
    """The registered model, and the same model on fewer rows (exploratory).

    The parabola in log2 h has the same curvature at every D, which h = 2 at D = 32 does not obey.
    """
    frame = study.frame
    parts = {f"D = {w} alone": frame[frame["stage"] == s] for w, s in STAGE_OF_WIDTH.items()}
    parts["D = 32 alone, without h = 2"] = parts["D = 32 alone"].query("head_dim > 2")
    parts["all complete stages, without h = 2"] = frame.query("head_dim > 2")
    models = {"all complete stages (the registered model)": study.model}
    models |= {name: study.only(part).model for name, part in parts.items()}
    return {name: analysis.optimum(model) for name, model in models.items()}


def chords(study: Study) -> dict[tuple[int, int], float]:
    """Two widths -> dL / d ln C between them. The loss curves, so `Study.slope` is their mean."""
    return {
        pair: study.only(study.frame[study.frame["width"].isin(pair)]).slope.value
        for pair in itertools.pairwise(STAGE_OF_WIDTH)
    }
