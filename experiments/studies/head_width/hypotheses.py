"""The hypotheses of the head-width study, from rows alone; see plan.md there."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas
from pandas import DataFrame

from attnlab.lab.stats import holm
from experiments.studies.head_width import analysis
from experiments.studies.head_width.analysis import Optimum, Pairs
from experiments.studies.head_width.design import POINTS, STAGE_OF_WIDTH
from experiments.studies.head_width.mixed_model import Estimate, MixedModel
from experiments.studies.head_width.rates import PLANS, fit_rates, minima
from experiments.studies.head_width.rows import check_complete


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the table of results."""

    name: str
    text: str
    found: Estimate
    pairs: Pairs | None
    corrected: float
    conclusion: str


@dataclasses.dataclass(frozen=True)
class Study:
    """What the page is made of: the judged rows and the fits."""

    frame: DataFrame
    model: MixedModel
    slope: Estimate
    tuning_k: float
    rate_sd: float = math.nan
    """Standard deviation that the formula of the learning rates leaves in ln r."""

    def point(
        self, num_heads: int, head_dim: int, plan: str = "separate", budget: str = "flops",
        **other: str | float,
    ) -> DataFrame:  # fmt: skip
        """The rows of a variant; D = 64, T = 128, 20 bytes per parameter, standard heads unless
        `other` says otherwise."""
        values: dict[str, str | float] = {
            "width": 64, "layout": "standard", "length": 128, "bytes_per_parameter": 20.0,
            "num_heads": num_heads, "head_dim": head_dim, "plan": plan, "budget": budget,
        }  # fmt: skip
        return analysis.where(self.frame, **(values | other))


def read_study(rows: DataFrame) -> Study:
    """The judged rows and what is fitted to them.

    Raises ValueError unless all runs are there: nothing is judged before.
    """
    check_complete(rows)
    judged, tuning = rows[rows["stage"] >= 2], rows[rows["stage"] == 1]
    formula = fit_rates(tuning)
    frame = analysis.columns(judged, formula)
    k = analysis.curvature(minima(tuning)).value
    model, slope = analysis.surface_model(frame, k), analysis.loss_slope(frame)
    return Study(frame, model, slope, k, formula.residual_sd)


def from_reference(study: Study, width: int = 64) -> dict[int, Pairs]:
    """head_dim -> differences from h = 16 on N h = D."""
    return {h: against(study, width, n, h) for n, h in POINTS[width] if n * h == width and h != 16}


def against(study: Study, width: int, heads: int, head_dim: int, layout: str = "standard") -> Pairs:
    """Differences of a point from h = 16 on N h = D."""
    reference = study.point(width // 16, 16, width=width)
    point = study.point(heads, head_dim, width=width, layout=layout)
    return analysis.paired(reference, point)


def difference(
    study: Study, width: int, heads: int, head_dim: int, layout: str = "standard"
) -> Estimate:
    """Bits by which a point is worse than h = 16 on N h = D. No interval is narrower than that of
    the variance pooled over the points with N h = D."""
    pooled = analysis.pool(list(from_reference(study, width).values()))
    return analysis.over_texts(against(study, width, heads, head_dim, layout), pooled)


def sharing(study: Study, plan: str, budget: str = "flops") -> Pairs:
    """Differences of a sharing plan from separate layers, over 4x16 and 2x32."""
    points = ((4, 16), (2, 32))
    separate = pandas.concat([study.point(*p) for p in points])
    return analysis.paired(separate, pandas.concat([study.point(*p, plan, budget) for p in points]))


def sharing_costs(study: Study, budget: str = "flops") -> dict[str, Estimate]:
    """Sharing plan -> bits worse than separate layers. No interval is narrower than that of the
    variance pooled over the plans."""
    pairs = {plan: sharing(study, plan, budget) for plan in PLANS}
    pooled = analysis.pool(list(pairs.values()))
    return {plan: analysis.over_texts(one, pooled) for plan, one in pairs.items()}


def across(study: Study, points: Sequence[tuple[int, int]]) -> Pairs:
    """Differences of three points with h = 8, 16, 32 from N h = D."""
    sets = (((8, 8), (4, 16), (2, 32)), points)
    return analysis.paired(*(pandas.concat([study.point(*p) for p in some]) for some in sets))


def primary(study: Study) -> list[Result]:
    """P1 by both tests, which decide together, from stages 1 and 3 alone (amendment 1). No interval
    is narrower than that of the pooled variance."""
    part = dataclasses.replace(study, frame=study.frame[study.frame["stage"] == 3])
    pairs = from_reference(part)
    pooled = analysis.pool(list(pairs.values()))
    model = analysis.surface_model(part.frame, study.tuning_k)
    tests = {
        "mixed model": model.contrast(analysis.between(16, 32)),
        "paired t-test": analysis.over_texts(pairs[32]),
    }
    conclusion = analysis.primary_conclusion(tests.values())
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
    wide = across(study, ((12, 8), (6, 16), (3, 32)))
    half = across(study, ((4, 8), (2, 16), (1, 32)))
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


class Fit(NamedTuple):
    """The best head_dim and N h / D by `analysis.surface_model` on some of the rows."""

    name: str
    optimum: Optimum
    total: Estimate
    """log2 of the best N h / D at the best head_dim."""
    residual_sd: float


def fits(study: Study) -> list[Fit]:
    """The registered model, and the same model on fewer rows (exploratory).

    The parabola in log2 h has the same curvature at every D, which h = 2 at D = 32 does not obey.
    """
    frame = study.frame
    parts = {f"D = {w} alone": frame[frame["stage"] == s] for w, s in STAGE_OF_WIDTH.items()}
    parts["D = 32 alone, without h = 2"] = parts["D = 32 alone"].query("head_dim > 2")
    parts["all complete stages, without h = 2"] = frame[frame["head_dim"] > 2]
    models = {"all complete stages (the registered model)": study.model} | {
        name: analysis.surface_model(part, study.tuning_k) for name, part in parts.items()
    }
    found = []
    for name, model in models.items():
        best = analysis.optimum(model)
        found.append(Fit(name, best, best_total(model, best), model.residual_sd))
    return found


def best_total(model: MixedModel, best: Optimum) -> Estimate:
    top = {"v": -1.0, "uv": 4 - best.best.value}  # D = 96 alone has N h / D != 1 at u = 0 alone
    return model.ratio({n: w for n, w in top.items() if n in model.names}, {"v2": 2})


def chords(study: Study) -> dict[tuple[int, int], float]:
    """Two widths -> dL / d ln C between them. The loss curves, so `Study.slope` is their mean."""
    return {
        pair: analysis.loss_slope(study.frame[study.frame["width"].isin(pair)]).value
        for pair in itertools.pairwise(STAGE_OF_WIDTH)
    }
