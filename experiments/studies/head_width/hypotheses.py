"""The hypotheses of the head-width study, from rows alone; see plan.md there."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas
from pandas import DataFrame

from attnlab.lab.stats import holm
from experiments.studies.head_width import analysis, design
from experiments.studies.head_width.analysis import Optimum, Pairs
from experiments.studies.head_width.mixed_model import Estimate, MixedModel
from experiments.studies.head_width.rates import PLANS, fit_rates, minima

STAGE_OF_WIDTH = {32: 2, 64: 3, 96: 4}
"""Model width -> the stage of its surface."""


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
    has_second_look: bool = False
    """Are the runs of stage 7 there?"""

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

    Raises ValueError unless stages 0 to 6 are complete: nothing is judged before.
    """
    design.check_complete(rows)
    has_second_look = not design.missing(7, rows)
    stage = rows["stage"]
    judged, tuning = rows[(stage >= 2) & (has_second_look | (stage < 7))], rows[stage == 1]
    formula = fit_rates(tuning)
    frame = analysis.columns(judged, formula)
    k = analysis.curvature(minima(tuning)).value
    model, slope = analysis.surface_model(frame, k), analysis.loss_slope(frame)
    return Study(frame, model, slope, k, formula.residual_sd, has_second_look)


def from_reference(study: Study, width: int = 64) -> dict[int, Pairs]:
    """head_dim -> differences from h = 16 on N h = D."""
    points = {h: study.point(n, h, width=width) for n, h in design.POINTS[width] if n * h == width}
    return {h: analysis.paired(points[16], rows) for h, rows in points.items() if h != 16}


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


class Look(NamedTuple):
    """P1 at one look: the mixed model and the paired t-test decide together."""

    name: str
    model: Estimate
    paired: Estimate
    pairs: Pairs
    conclusion: str


def looks(study: Study) -> list[Look]:
    """The looks at P1 there are rows for: the first reads stages 1 and 3 alone, the second stages
    1, 3 and 7 (amendment 1). No interval is narrower than that of the pooled variance."""
    found, every = [], (("first look", (3,)), ("second look", (3, 7)))
    for i, (name, stages) in enumerate(every[: 1 + study.has_second_look]):
        part = dataclasses.replace(study, frame=study.frame[study.frame["stage"].isin(stages)])
        pairs = from_reference(part)
        pooled = analysis.pool(list(pairs.values()))
        paired = analysis.over_texts(pairs[32], pooled)
        model = analysis.surface_model(part.frame, study.tuning_k)
        p1 = model.contrast(analysis.between(16, 32))
        said = analysis.primary_conclusion((p1, analysis.over_texts(pairs[32])), i)
        found.append(Look(name, analysis.widened(p1, pooled), paired, pairs[32], said))
    return found


def primary(study: Study) -> list[Result]:
    """P1 by both tests, at every look there are rows for."""
    text = "loss(2x32) - loss(4x16), D = 64"
    lines = []
    for look in looks(study):
        for test, found in (("mixed model", look.model), ("paired t-test", look.paired)):
            name = f"P1 ({test}, {look.name})"
            lines.append(Result(name, text, found, look.pairs, found.p, look.conclusion))
    return lines


def secondary(study: Study) -> list[Result]:
    """S1 to S5 with Holm's correction."""
    best, costs = analysis.optimum(study.model), sharing_costs(study)
    albert, attention_only = costs["albert"], costs["attention_only"]
    wide, half = (
        across(study, ((12, 8), (6, 16), (3, 32))),
        across(study, ((4, 8), (2, 16), (1, 32))),
    )
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


def against(study: Study, width: int, heads: int, head_dim: int, layout: str) -> Pairs:
    """Differences of a point from h = 16 on N h = D."""
    reference = study.point(width // 16, 16, width=width)
    point = study.point(heads, head_dim, width=width, layout=layout)
    return analysis.paired(reference, point)


def chords(study: Study) -> dict[tuple[int, int], float]:
    """Two widths -> dL / d ln C between them. The loss curves, so `Study.slope` is their mean."""
    return {
        pair: analysis.loss_slope(study.frame[study.frame["width"].isin(pair)]).value
        for pair in itertools.pairwise(STAGE_OF_WIDTH)
    }
