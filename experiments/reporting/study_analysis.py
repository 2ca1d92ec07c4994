"""The page of the head-width study: registered results, tables and figures from rows alone."""

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.lab import analysis
from attnlab.lab.analysis import Pairs, Pooled
from attnlab.lab.mixed_model import Estimate, MixedModel
from attnlab.lab.rates import cells_of, fit_rates, minimum
from attnlab.lab.rows import Row, write_whole
from experiments.configs import head_width
from experiments.reporting import study_figures
from experiments.reporting.study_tables import table

NOT_YET = "not yet"
CHECK = Path(__file__).with_name("study_check.py")
PLANS = head_width.PLANS
START = "At 216,448 parameters and 3,932,160 bytes, at equal FLOPs, the best head is h\\* ="


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the table of results. `found` is None where the rows are not there yet."""

    name: str
    text: str
    found: Estimate | None = None
    pairs: Pairs | None = None
    corrected: float = math.nan
    conclusion: str = NOT_YET


@dataclasses.dataclass(frozen=True)
class Study:
    """What the page is made of: judged rows of complete stages, and the fits."""

    frame: dict[str, Any]
    left: dict[int, int]
    model: MixedModel | None
    slope: Estimate | None
    tuning_k: float

    def complete(self, *stages: int) -> bool:
        """Are all runs of these stages there?"""
        return all(self.left[stage] == 0 for stage in stages)

    def point(self, num_heads: int, head_dim: int, plan: str = "separate", budget: str = "flops",
              width: int = 64) -> Any:  # fmt: skip
        """The rows of a variant at T = 128 and 20 bytes per parameter."""
        return analysis.where(
            self.frame, num_heads=num_heads, head_dim=head_dim, plan=plan, budget=budget,
            width=width, layout="standard", length=128, bytes_per_parameter=20.0,
        )  # fmt: skip


def missing(stage: int, rows: Sequence[Row]) -> int:
    """How many runs of a stage are not in the rows."""
    if stage < 2:
        of_stage = {row.spec.id for row in rows if row.spec.stage == stage}
        try:
            return sum(spec.id not in of_stage for spec in head_width.stage_runs(stage, rows))
        except head_width.NotReady:
            return len(head_width.expected_runs(stage))
    there = {
        (r.spec.variant, r.spec.text, r.spec.seed, r.spec.bytes_per_parameter)
        for r in rows
        if r.spec.stage == stage
    }
    wanted = [(p.variant, p.text, head_width.judged_seed(p), p.bytes_per_parameter)
              for p in head_width.planned(stage)]  # fmt: skip
    return sum(one not in there for one in wanted)


def read_study(rows: Sequence[Row]) -> Study:
    """Fits what complete stages allow. Stages with missing runs are left out whole."""
    left = {stage: missing(stage, rows) for stage in (*head_width.ORDER, 7)}
    judged = [r for r in rows if r.spec.stage >= 2 and left[r.spec.stage] == 0]
    tuning = [row for row in rows if row.spec.stage == 1]
    if not judged or left[1]:
        return Study({}, {s: max(n, int(s > 1)) for s, n in left.items()}, None, None, math.nan)
    frame = analysis.columns(judged, fit_rates(tuning))
    k = analysis.curvature([minimum(cell) for cell in cells_of(tuning).values()]).value
    secondary = all(left[stage] == 0 for stage in (2, 3, 4, 5))
    model = analysis.surface_model(frame, k) if left[3] == 0 else None
    return Study(frame, left, model, analysis.loss_slope(frame) if secondary else None, k)


def _pairs(study: Study, a: Sequence[Any], b: Sequence[Any]) -> Pairs:
    return analysis.paired(study.frame, np.any(a, axis=0), np.any(b, axis=0))


def from_reference(study: Study, width: int = 64) -> dict[int, Pairs]:
    """head_dim -> differences from h = 16 on N h = D."""
    points = {
        h: study.point(n, h, width=width) for n, h in head_width.POINTS[width] if n * h == width
    }
    return {
        h: analysis.paired(study.frame, points[16], mask) for h, mask in points.items() if h != 16
    }


def sharing(study: Study, plan: str, budget: str = "flops") -> Pairs:
    """Differences of a sharing plan from separate layers, over 4x16 and 2x32."""
    points = ((4, 16), (2, 32))
    return _pairs(study, [study.point(*p) for p in points],
                  [study.point(*p, plan, budget) for p in points])  # fmt: skip


def across(study: Study, points: Sequence[tuple[int, int]]) -> Pairs:
    """Differences of three points with h = 8, 16, 32 from N h = D."""
    reference = ((8, 8), (4, 16), (2, 32))
    return _pairs(study, [study.point(*p) for p in reference], [study.point(*p) for p in points])


def primary(study: Study) -> list[Result]:
    """P1 from the model and as a paired t-test over texts."""
    text = "loss(2x32) - loss(4x16), D = 64"
    names = ("P1 (model)", "P1 (paired t)")
    if not study.complete(3) or study.model is None:
        return [Result(name, text) for name in names]
    look = int(study.complete(7))
    pairs = from_reference(study)
    paired = analysis.over_texts(pairs[32], analysis.pool(list(pairs.values())))
    found = (study.model.contrast(analysis.between(16, 32)), paired)
    return [Result(name, text, one, pairs[32], one.p, analysis.primary_conclusion(one, look))
            for name, one in zip(names, found, strict=True)]  # fmt: skip


def secondary(study: Study) -> list[Result]:
    """S1 to S5 with Holm's correction, judged once: when stages 2, 3, 4 and 5 are complete."""
    texts = {
        "S1": "u* = log2 of the best head_dim on N h = D, D = 64",
        "S2": "loss at N h = 3D/2 less loss at N h = D, h = 8, 16, 32",
        "S3": "slope of u* on log2 D",
        "S4": "albert less separate at equal FLOPs",
        "S5": "attention_only less separate at equal FLOPs",
    }
    if not study.complete(2, 3, 4, 5) or study.model is None:
        return [Result(name, text) for name, text in texts.items()]
    best = analysis.optimum(study.model)
    shared: Pooled | None = analysis.pool([sharing(study, plan) for plan in PLANS])
    wide, half = ((12, 8), (6, 16), (3, 32)), ((4, 8), (2, 16), (1, 32))
    pairs = {
        "S2": across(study, wide),
        "S4": sharing(study, "albert"),
        "S5": sharing(study, "attention_only"),
    }
    found = {
        "S1": best.best,
        "S2": analysis.over_texts(pairs["S2"], analysis.pool([pairs["S2"], across(study, half)])),
        "S3": best.slope,
        "S4": analysis.over_texts(pairs["S4"], shared),
        "S5": analysis.over_texts(pairs["S5"], shared),
    }
    same = analysis.equivalence(found["S5"], 0.01)
    p = {name: one.p for name, one in found.items()} | {"S1": best.p_interior, "S5": same.p}
    corrected = analysis.holm(p, 5)
    words = {"S1": ("interior", best.interior), "S5": ("equivalent within 0.01", same.equivalent)}
    conclusions = {}
    for name in texts:
        word, holds = words.get(name, ("significant", True))
        conclusions[name] = word if holds and corrected[name] < 0.05 else "inconclusive"
    return [
        Result(n, t, found[n], pairs.get(n), corrected[n], conclusions[n]) for n, t in texts.items()
    ]


def _ends(found: Estimate, digits: int = 4, plus: str = "+") -> str:
    if not math.isfinite(found.value):
        return "no estimate"
    if not math.isfinite(found.low):
        return f"{found.value:{plus}.{digits}f} (interval unbounded)"
    ends = f"{found.low:{plus}.{digits}f} to {found.high:{plus}.{digits}f}"
    return f"{found.value:{plus}.{digits}f} ({ends})"


def _exp2(power: float) -> float:
    return 2.0**power if power < 1000 else math.inf


def result_rows(results: Sequence[Result]) -> list[list[str]]:
    """The table of results: estimate, checks, p-values, conclusion."""
    lines = []
    for r in results:
        if r.found is None:
            lines.append([r.name, r.text, *[NOT_YET] * 6])
            continue
        boot = units = "–"
        if r.pairs:
            low, high = analysis.bootstrap(r.pairs)
            boot = f"{low:+.4f} to {high:+.4f}"
            units = _ends(analysis.over_texts(analysis.merged(r.pairs)))
        counts = f"{r.found.count}"
        if r.pairs:
            counts += f" x {max(map(len, r.pairs.values()))}"
        p = f"{r.corrected:.4f}" if math.isfinite(r.corrected) else "–"
        lines.append([r.name, r.text, _ends(r.found), counts, boot, units, p, r.conclusion])
    return lines


HEADER = ("name", "what", "estimate (95 % interval)", "texts x seeds", "bootstrap interval",
          "Tatoeba texts as one", "p (Holm for S1 to S5)", "conclusion")  # fmt: skip


def sentence(study: Study) -> str:
    """The sentence of the plan with its blanks filled, or "not yet" in each."""
    if not study.complete(2, 3, 4, 5) or study.model is None or study.slope is None:
        gap = f"[{NOT_YET}]"
        return (
            f"{START} {gap} wide with N h = {gap} D; 4 times narrower costs {gap}, 4 times "
            f"wider {gap}; sharing all layers costs x {gap}, "
            f"attention alone x {gap}; per doubling of D h\\* grows by {gap}."
        )
    top, slope = analysis.optimum(study.model), study.slope
    if study.model.contrast({"u2": 1}).value <= 0 or not 2 <= top.best.value <= 6:
        return "No best head_dim lies within the points measured: the sentence has no answer."
    power: Callable[[Estimate], str] = lambda e: _ends(
        dataclasses.replace(e, value=_exp2(e.value), low=_exp2(e.low), high=_exp2(e.high)), 1, ""
    )
    shared = analysis.pool([sharing(study, plan) for plan in PLANS])
    multiple = [
        _multiple(analysis.over_texts(sharing(study, p), shared), slope)
        for p in ("albert", "attention_only")
    ]
    near = min(
        (h for n, h in head_width.POINTS[64] if n * h == 64),
        key=lambda h: abs(math.log2(h) - top.best.value),
    )
    width = study.model.ratio({"v": -1, "uv": 4 - top.best.value}, {"v2": 2})
    return (
        f"{START} {power(top.best)} wide with N h = {_width(study.model, width)} D; "
        f"4 times narrower costs {_step(study, near, near // 4)}, "
        f"4 times wider {_step(study, near, near * 4)}; sharing all layers costs x {multiple[0]}, "
        f"attention alone x {multiple[1]}; per doubling of D h\\* grows by a factor of "
        f"{power(top.slope)}."
    )


def _multiple(difference: Estimate, slope: Estimate) -> str:
    found = analysis.compute_multiple(difference, slope)
    return f"{_ends(found, 2, '')} [{found.count} texts]"


def _width(model: MixedModel, found: Estimate) -> str:
    if model.contrast({"v2": 1}).value <= 0 or not -1 < found.value < math.log2(1.5):
        return "at an end of 1/2 to 3/2, not determined,"
    bounds = [2**e if math.isfinite(e) else e for e in (found.low, found.high)]
    return _ends(
        dataclasses.replace(found, value=2**found.value, low=bounds[0], high=bounds[1]), 2, ""
    )


def _step(study: Study, near: int, other: int) -> str:
    points = {h: n for n, h in head_width.POINTS[64] if n * h == 64}
    if other not in points or study.slope is None:
        return f"(h = {other}: not measured)"
    pairs = _pairs(study, [study.point(points[near], near)], [study.point(points[other], other)])
    found = analysis.over_texts(pairs, analysis.pool(list(from_reference(study).values())))
    multiple = _multiple(found, study.slope)
    return f"{_ends(found)} bits, h = {other} against {near} (x {multiple} compute)"


def figures(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """Figure name -> figure, of what there is."""
    drawn: dict[str, Any] = {}
    panels = [_panel(study, w, rows) for w, s in ((32, 2), (64, 3), (96, 4)) if study.complete(s)]
    if panels:
        drawn["figure1"] = study_figures.loss_figure(panels)
    if study.model is not None:
        drawn["figure2"] = _surface(study.model)
    if study.slope is not None:
        shared = analysis.pool([sharing(study, plan) for plan in PLANS])
        drawn["figure3"] = study_figures.sharing_figure(
            {
                plan: analysis.compute_multiple(
                    analysis.over_texts(sharing(study, plan), shared), study.slope
                )
                for plan in PLANS
            }
        )
    rates = _rates(rows)
    if rates:
        drawn["figure4"] = study_figures.rate_figure(rates)
    return drawn


def _panel(study: Study, width: int, rows: Sequence[Row]) -> study_figures.SizePanel:
    base = study.point(width // 16, 16, width=width)
    bits, text = study.frame["bits"][base], study.frame["text"][base]
    level = float(np.mean([bits[text == t].mean() for t in np.unique(text)]))
    pairs = from_reference(study, width)
    pooled = analysis.pool(list(pairs.values()))
    series = {16: Estimate(level, math.nan, math.nan, math.nan, math.nan, len(np.unique(text)))}
    for h, one in pairs.items():
        d = analysis.over_texts(one, pooled)
        series[h] = dataclasses.replace(
            d, value=level + d.value, low=level + d.low, high=level + d.high
        )
    grams = {}
    for name in study_figures.NGRAMS:
        values = study.frame[name][base]
        grams[name] = float(np.mean([values[text == t].mean() for t in np.unique(text)]))
    return study_figures.SizePanel(width, series, grams)


def _surface(model: MixedModel) -> Any:
    u, v = np.meshgrid(np.linspace(2, 6, 60), np.linspace(-1, math.log2(1.5), 40))
    b = dict(zip(model.names, model.coefficients, strict=True))
    x = u - 4
    levels = [value for name, value in b.items() if name.startswith("a[") and name.endswith("-64]")]
    bits = (
        np.mean(levels)
        + b["u"] * x
        + b["u2"] * x**2
        + b["v"] * v
        + b["v2"] * v**2
        + b["uv"] * x * v
    )
    points = [(float(h), n * h / 64) for n, h in head_width.POINTS[64]]
    return study_figures.surface_figure(u, v, bits, points)


def _rates(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for cell, of_cell in cells_of([r for r in rows if r.spec.stage == 1]).items():
        v, best = cell.variant, minimum(of_cell)
        plain = v.plan == "separate" and v.layout == "standard" and v.length == 128
        if (
            plain
            and cell.bytes_per_parameter == 20
            and v.num_heads * v.head_dim == v.width
            and best.interior
        ):
            found.setdefault(f"D = {v.width}, {cell.text}", {})[v.head_dim] = math.exp(
                best.log_rate
            )
    return found


CAPTIONS = {
    "figure1": "**Figure 1. Held-out loss over head_dim at N h = D and equal FLOPs.** Mean over "
    "texts. Interval: 95 %, of the difference from h = 16 (which has none of its own), texts "
    "random, not narrower than the pooled one. Grey: n-grams.",
    "figure2": "**Figure 2. Fitted loss at D = 64 over head_dim and N h / D.** Lines of equal bits "
    "per byte; points: measured.",
    "figure3": "**Figure 3. Cost of sharing at equal FLOPs by sublayer,** as the multiple of "
    "compute for the loss of separate layers. 95 % interval over texts, with the error of the "
    "slope.",
    "figure4": "**Figure 4. Best learning rate over head_dim at N h = D** (stage 1, validation "
    "part; cells with an interior minimum).",
}
INTRO = """# Head-width study: analysis

Written by `experiments.study --analysis` from `runs.csv` alone; [plan.md](plan.md) is the
registered plan."""
RULES = """## Registered results

Held-out bits per byte, texts random; S1 and S3 in units of log2. S1 to S5 are judged once, when
stages 2 to 5 are complete. P1: significant at p < 0.005 after stage 3, p < 0.048 after stage 7;
equivalent when the 90 % interval lies within 0.02. The plan names the model and "also" the paired
t-test for P1 without saying which decides, so both are given, each with its conclusion.

Intervals are of Student's t with texts - 1 degrees of freedom; the plan names none for the model,
and in simulations of its design a normal interval covers 90 % instead of 95 %.
"""
AGAIN = """## The main numbers again, with numpy alone

Run it in this folder: mean, standard error and number of texts of P1, S2, S4, S5.
"""


def page(rows: Sequence[Row], study: Study, drawn: Sequence[str]) -> str:
    """The Markdown page."""
    results = primary(study) + secondary(study)
    lines = [INTRO, "", f"> {sentence(study)}", "", "## What is missing", ""]
    left = [
        f"stage {s} ({head_width.TITLES[s]}) lacks {n} runs" for s, n in study.left.items() if n
    ]
    lines += [("; ".join(left) + '. Its results say "not yet".' if left else "Nothing."), ""]
    lines += [RULES]
    lines += table(HEADER, result_rows(results))
    for name, caption in CAPTIONS.items():
        shown = (
            f"![{caption.split('**')[1]}]({name}.svg)" if name in drawn else f"({name}: {NOT_YET})"
        )
        lines += [shown, "", caption, ""]
    lines += ["## Every plan of sharing", "", *_sharing_table(study)]
    if study.model is not None:
        lines += ["## Coefficients of the model", "", *_model_table(study)]
    lines += [AGAIN, "```python", CHECK.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _sharing_table(study: Study) -> list[str]:
    lines = []
    for budget in ("flops", "parameters"):
        ready = study.complete(3, 5)
        pooled = analysis.pool([sharing(study, p, budget) for p in PLANS]) if ready else None
        for plan in PLANS:
            name = [plan, budget]
            if not ready:
                lines.append([*name, NOT_YET, NOT_YET])
                continue
            found = analysis.over_texts(sharing(study, plan, budget), pooled)
            lines.append(
                [*name, _ends(found), _multiple(found, study.slope) if study.slope else NOT_YET]
            )
    return table(("plan", "equal", "bits worse than separate", "compute multiple"), lines)


def _model_table(study: Study) -> list[str]:
    assert study.model is not None
    names = [name for name in study.model.names if not name.startswith("a[")]
    lines = [[name, _ends(study.model.contrast({name: 1}))] for name in names]
    sds = zip(("B1 (u by text)", "C1 (v by text)", "seed"), study.model.component_sd, strict=True)
    lines += [[f"standard deviation of {n}", f"{sd:.4f}"] for n, sd in sds]
    lines += [
        ["standard deviation of e", f"{study.model.residual_sd:.4f}"],
        ["k (stage 1)", f"{study.tuning_k:.4f}"],
    ]
    return table(("term", "estimate (95 % interval)"), lines)


def write_analysis(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes analysis.md, analysis.csv and the figures there are; removes figures that are not."""
    study = read_study(rows)
    drawn = figures(study, rows)
    paths = []
    for name in CAPTIONS:
        path = folder / f"{name}.svg"
        path.unlink(missing_ok=True)
        if name in drawn:
            write_whole(path, study_figures.svg(drawn[name], name))
            paths.append(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "what", "value", "error", "low", "high", "texts", "p", "conclusion"))
    for r in primary(study) + secondary(study):
        f = r.found
        numbers = (f.value, f.error, f.low, f.high, f.count, r.corrected) if f else ("",) * 6
        writer.writerow((r.name, r.text, *numbers, r.conclusion))
    write_whole(folder / "analysis.csv", text.getvalue())
    write_whole(folder / "analysis.md", page(rows, study, list(drawn)))
    return [folder / "analysis.md", folder / "analysis.csv", *paths]
