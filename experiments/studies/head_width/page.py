"""The pages of the head-width study: tables, figures and text from rows alone, in seconds."""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from attnlab.atomic import write_atomic
from attnlab.report.style import themed_svg
from experiments.studies.head_width import analysis, design, gpu, gpu_page, hypotheses
from experiments.studies.head_width import figures as charts
from experiments.studies.head_width.design import FULL, STAGE_OF_WIDTH
from experiments.studies.head_width.hypotheses import Result, Study
from experiments.studies.head_width.mixed_model import Estimate
from experiments.studies.head_width.rates import choose, fit_rates, minima
from experiments.studies.head_width.rows import read_rows
from experiments.studies.head_width.spec import PARAMETRIZATIONS
from experiments.studies.head_width.tables import Line, ends, judged_table, render, table
from experiments.studies.head_width.texts import TEXTS

CHECK = Path(__file__).with_name("_recompute.py")
DIFFERENCE = "difference (95 %)"
COUNT = "texts x seeds"


def write_pages(folder: Path) -> list[Path]:
    """Writes every page and figure of the rows in this folder.

    Raises ValueError, before it writes, where a run is missing.
    """
    rows, scores = read_rows(folder / "runs.csv"), gpu.read_scores(folder)
    study = hypotheses.read_study(rows)
    texts = {
        "stage0.md": stage0_page(rows),
        "stage1.md": stage1_page(rows),
        "cost.md": cost_page(rows),
        "analysis.md": analysis_page(rows, study),
        "analysis.csv": _csv(hypotheses.primary(study) + hypotheses.secondary(study)),
    }
    drawn = figures(study, rows)
    if len(scores):
        texts["gpu.md"] = gpu_page.page(scores)
        drawn["gpu"] = charts.loss_figure([gpu_page.panel(scores)])
    texts |= {f"{name}.svg": themed_svg(figure, name) for name, figure in drawn.items()}
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in texts]


def counts(pairs: Series) -> str:
    """Texts x seeds."""
    seeds = pairs.groupby(level="text").size()
    return f"{len(seeds)} x {seeds.max()}"


def base_of(study: Study, width: int) -> DataFrame:
    """The rows of h = 16 on N h = D."""
    return study.points(FULL[width][16], width=width)


# Stages 0 and 1, cost -----------------------------------------------------------------------------


def stage0_page(rows: DataFrame) -> str:
    """Stage 0: the choice by the rule of the plan, and every cell."""
    rows, names = rows[rows["stage"] == 0], list(PARAMETRIZATIONS)
    chosen, found = choose(rows, names, design.TOLERANCE)
    order = lambda cell: (names.index(cell.parametrization), cell.head_dim, cell.text)
    cells = sorted(minima(rows).itertuples(), key=order)
    return render(
        "stage0", rows=rows, cells=cells, chosen=chosen, found=found, titles=PARAMETRIZATIONS,
        tolerance=design.TOLERANCE, baselines=charts.BASELINES,
    )  # fmt: skip


def stage1_page(rows: DataFrame) -> str:
    """Stage 1: the rate formula with its residuals, and every cell."""
    of_stage = rows[rows["stage"] == 1]
    formula = fit_rates(of_stage)
    cells = minima(of_stage).assign(residual=formula.residuals)
    cells = cells.sort_values(["width", "text"], kind="stable")
    return render("stage1", done=len(of_stage), formula=formula, cells=cells)


def cost_page(rows: DataFrame) -> str:
    """Seconds and core-hours per stage, beside what was estimated before the first run."""
    rows = rows.assign(cpu=rows["cpu_seconds"].fillna(rows["seconds"]))
    return render("cost", stages=design.STAGES, rows=dict(list(rows.groupby("stage"))))


# The analysis -------------------------------------------------------------------------------------


def analysis_page(rows: DataFrame, study: Study) -> str:
    """The registered results and all that is exploratory. Its words are of the published rows."""
    registered = hypotheses.primary(study) + hypotheses.secondary(study)
    names = [*charts.BASELINES, "bits"]
    return render(
        "analysis",
        page=sys.modules[__name__],
        study=study,
        p1=registered[1].found,
        results=table(list(map(result_line, registered))),
        baselines={w: base_of(study, w).groupby("text")[names].mean().loc[list(TEXTS)]
                   for w in STAGE_OF_WIDTH},
        optimizers=optimizer_gaps(rows),
        tuning=-study.model.contrast({"tuning": 1}).value / (2 * study.tuning_k),
        against=functools.partial(hypotheses.difference, study, 64),
        multiple=functools.partial(multiple, study),
    )  # fmt: skip


def multiple(study: Study, difference: Estimate) -> str:
    """A compute multiple with its interval."""
    return ends(analysis.compute_multiple(difference, study.slope), 2, "")


def at_equal_seconds(study: Study, width: int, point: str) -> str:
    """The difference of a point from h = 16 on N h = D at equal CPU seconds, by the slope of the
    loss over all sizes; behind it by the slopes between this size and those beside it.

    Seconds are the least of the runs of a point.
    """
    base, own = base_of(study, width), study.points(point, width=width)
    saved = math.log(own["cpu_seconds"].min() / base["cpu_seconds"].min())
    difference = analysis.over_texts(analysis.paired(base, own)).value
    beside = [slope for pair, slope in hypotheses.chords(study).items() if width in pair]
    found, *others = (difference - slope * saved for slope in (study.slope.value, *beside))
    return f"{found:+.4f} ({' and '.join(f'{one:+.4f}' for one in others)})"


def result_line(r: Result) -> Line:
    """A line of the registered results: estimate, checks, p-value, conclusion."""
    line: dict[str, object] = {"name": r.name, "what": r.text, "estimate (95 % interval)": r.found}
    checks = dict.fromkeys(("bootstrap interval", "Tatoeba texts as one"), "–")
    if r.pairs is None:
        line |= {COUNT: r.found.count, **checks}
    else:
        low, high = analysis.bootstrap(r.pairs)
        line |= {COUNT: counts(r.pairs), "bootstrap interval": f"{low:+.4f} to {high:+.4f}",
                 "Tatoeba texts as one": _with_tatoeba_as_one(r.pairs)}  # fmt: skip
    known = "< 0.0001" if r.corrected < 1e-4 else f"{r.corrected:.4f}"
    p = "–" if math.isnan(r.corrected) else known
    return line | {"p (Holm for S1 to S5)": p, "conclusion": r.conclusion}


def _with_tatoeba_as_one(pairs: Series) -> Estimate:
    return analysis.over_texts(pairs.rename(analysis.TATOEBA, level="text"))


def point_table(study: Study) -> str:
    """Every point with its sizes and its difference from h = 16 on N h = D."""
    lines: list[Line] = []
    for width, points in design.POINTS.items():
        for point in points:
            rows = study.points(point, width=width)
            line = {
                "D": width,
                "point": point,
                "N h / D": f"{2 ** rows['v'].iloc[0]:g}",
                "FFN width": f"{rows['ffn_width'].iloc[0]:,}",
                "parameters": f"{rows['parameters'].iloc[0]:,}",
                "bits": f"{mean_of_texts(rows):.4f}",
                DIFFERENCE: "reference",
            }
            if point != FULL[width][16]:
                pairs = hypotheses.against(study, width, point)
                line |= {
                    DIFFERENCE: hypotheses.difference(study, width, point),
                    "Tatoeba texts as one": _with_tatoeba_as_one(pairs),
                    "at equal seconds (this CPU)": at_equal_seconds(study, width, point),
                    COUNT: counts(pairs),
                }
            lines.append(line)
    return judged_table(lines, DIFFERENCE)


def mean_of_texts(rows: DataFrame, column: str = "bits") -> float:
    """Mean over texts of the mean of a column on each."""
    return float(rows.groupby("text")[column].mean().mean())


def repeated_table(study: Study) -> str:
    """Differences from 6x16 at D = 96 over the texts that are read less than four times."""
    once = study.only(study.frame[~study.frame["text"].isin(design.REPEATED_TEXTS)])
    return judged_table([
        {"point": point, DIFFERENCE: hypotheses.difference(once, 96, point),
         COUNT: counts(hypotheses.against(once, 96, point))}
        for point in design.POINTS[96] if point != FULL[96][16]
    ], DIFFERENCE)  # fmt: skip


def length_table(study: Study) -> str:
    """Differences from 4x16 at 80 bytes per parameter and at T = 64 and 256, beside those of
    stage 3 on the same texts."""
    settings: list[tuple[int, float, Sequence[str]]] = [
        *((128, each, design.LENGTH_TEXTS) for each in (20.0, 80.0)),
        *((length, 20.0, design.CONTEXT_TEXTS) for length in (64, 128, 256)),
    ]
    lines, heading = [], "bits worse than 4x16 (95 %)"
    for length, each, texts in settings:
        first = {"T": length, "bytes per parameter": f"{each:g}", "texts": ", ".join(texts)}
        of_texts = study.only(study.frame[study.frame["text"].isin(texts)])
        base, *others = (of_texts.points(point, length=length, bytes_per_parameter=each)
                         for point in ("4x16", "16x4", "8x8", "2x32", "1x64"))  # fmt: skip
        pairs = {rows["point"].iloc[0]: analysis.paired(base, rows) for rows in others if len(rows)}
        pooled = analysis.pool(pairs.values())
        lines += [
            {**first, "point": point, heading: analysis.over_texts(one, pooled), COUNT: counts(one)}
            for point, one in pairs.items()
        ]
    return judged_table(lines, heading)


def sharing_table(study: Study) -> str:
    """Every plan and budget with its difference from separate layers."""
    slopes, heading = hypotheses.chords(study), "bits worse than separate (95 %)"
    beside = f"by the slope of D = {' and '.join(f'{a} to {b}' for a, b in slopes)}"
    lines = []
    for budget in ("flops", "parameters"):
        for plan, found in hypotheses.sharing_costs(study, budget).items():
            times = by_chords = "–"
            if budget == "flops":
                times = multiple(study, found)
                each = (math.exp(found.value / abs(slope)) for slope in slopes.values())
                by_chords = " and ".join(f"{one:.2f}" for one in each)
            lines.append({
                "plan": plan, "equal": budget, heading: found, "compute multiple": times,
                beside: by_chords, COUNT: counts(hypotheses.sharing(study, plan, budget)),
            })  # fmt: skip
    return judged_table(lines, heading)


def optimizer_gaps(rows: DataFrame) -> DataFrame:
    """Stage 0: minimum of 1x64 less minimum of 4x16, by parametrization and text."""
    cells = minima(rows[rows["stage"] == 0])
    bits = cells.set_index(["parametrization", "text", "head_dim"])["bits"].unstack()
    return (bits[64] - bits[16]).unstack().loc[cells["parametrization"].unique()]


def rate_error(study: Study, rows: DataFrame) -> float:
    """ln r* less the best ln r of a variant that has two rates x on each text: the minimum of the
    parabola k x^2 + l x whose slope l is the mean over texts of that between the two rates."""
    ordered = rows.sort_values("tuning").groupby("text")[["tuning", "bits"]]
    first, last = ordered.first(), ordered.last()
    slopes = (last["bits"] - first["bits"]) / (last["tuning"] - first["tuning"])
    middle = (first["tuning"] + last["tuning"]) / 2
    return float(slopes.mean() / (2 * study.tuning_k) - middle.mean())


def of_one_head(study: Study, each: float) -> Estimate:
    """What 1x64 costs against 4x16 at so many bytes per parameter, on the texts of stage 6."""
    frame = study.frame[study.frame["text"].isin(design.LENGTH_TEXTS)]
    points = (study.only(frame).points(p, bytes_per_parameter=each) for p in ("4x16", "1x64"))
    return analysis.over_texts(analysis.paired(*points))


def _csv(results: Sequence[Result]) -> str:
    names = ("name", "what", "value", "error", "low", "high", "texts", "p", "conclusion")
    lines = [(r.name, r.text, r.found.value, r.found.error, r.found.low, r.found.high,
              r.found.count, r.corrected, r.conclusion) for r in results]  # fmt: skip
    return DataFrame(lines, columns=names).to_csv(index=False)


# Figures ------------------------------------------------------------------------------------------


def figures(study: Study, rows: DataFrame) -> dict[str, Figure]:
    """Figure name -> figure."""
    alone = study.only(study.frame[study.frame["stage"] == STAGE_OF_WIDTH[64]])
    costs = hypotheses.sharing_costs(study).items()
    return {
        "figure1": charts.loss_figure([_panel(study, width) for width in STAGE_OF_WIDTH]),
        "figure2": _surface(alone),
        "figure3": charts.sharing_figure(
            {plan: analysis.compute_multiple(cost, study.slope) for plan, cost in costs}
        ),
        "figure4": charts.rate_figure(_rates(rows)),
    }


def _panel(study: Study, width: int) -> charts.SizePanel:
    base = base_of(study, width)
    differences = {h: hypotheses.difference(study, width, point)
                   for h, point in FULL[width].items() if h != 16}  # fmt: skip
    grams = {name: mean_of_texts(base, name) for name in charts.BASELINES}
    parameters = int(base["parameters"].iloc[0])
    return charts.SizePanel(width, parameters, 16, mean_of_texts(base), differences, grams)


def _surface(study: Study) -> Figure:
    u, v = np.meshgrid(np.linspace(2, 6, 60), np.linspace(-1, math.log2(1.5), 40))
    b, x = study.model.coefficients, u - 4
    level = np.mean([b[name] for name in b.index if name.startswith("a[")])
    bits = level + b["u"] * x + b["u2"] * x**2 + b["v"] * v + b["v2"] * v**2 + b["uv"] * x * v
    dims = [map(int, point.split("x")) for point in design.POINTS[64] if "narrow" not in point]
    return charts.surface_figure(u, v, bits, [(h, n * h / 64) for n, h in dims])


def _rates(rows: DataFrame) -> DataFrame:
    """The cells with the best learning rates on N h = D."""
    return minima(rows[rows["stage"] == 1]).query(
        "plan == 'separate' and layout == 'standard' and length == 128 and interior"
        " and bytes_per_parameter == 20 and num_heads * head_dim == width"
    )
