"""The pages of the head-width study: tables, figures and text from rows alone, in seconds."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from attnlab.atomic import write_atomic
from attnlab.report.style import themed_svg
from experiments.studies.head_width import analysis, design, gpu, gpu_page, hypotheses
from experiments.studies.head_width import figures as charts
from experiments.studies.head_width.analysis import Pairs
from experiments.studies.head_width.design import STAGE_OF_WIDTH
from experiments.studies.head_width.hypotheses import Result, Study
from experiments.studies.head_width.mixed_model import Estimate, MixedModel
from experiments.studies.head_width.rates import choose, fit_rates, minima
from experiments.studies.head_width.rows import read_rows
from experiments.studies.head_width.spec import PARAMETRIZATIONS
from experiments.studies.head_width.tables import (
    Line,
    ends,
    judged_table,
    power,
    render,
    table,
)

CHECK = Path(__file__).with_name("_recompute.py")


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


def multiple(difference: Estimate, study: Study) -> str:
    """A compute multiple with its interval."""
    return ends(analysis.compute_multiple(difference, study.slope), 2, "")


def counts(pairs: Pairs) -> str:
    """Texts x seeds."""
    return f"{len(pairs)} x {max(map(len, pairs.values()))}"


def points_of(width: int) -> list[tuple[int, int, str]]:
    """(num_heads, head_dim, layout) of the points of a model size."""
    points = [(n, h, "standard") for n, h in design.POINTS[width]]
    return points + [(n, h, "narrow") for n, h in design.NARROW if width == 64]


def point_name(num_heads: int, head_dim: int, layout: str) -> str:
    """As in the tables."""
    return f"{num_heads}x{head_dim}" + (" narrow" if layout == "narrow" else "")


def whole_width(width: int) -> dict[int, int]:
    """head_dim -> num_heads of the points with N h = D."""
    return {h: n for n, h in design.POINTS[width] if n * h == width}


def base_of(study: Study, width: int) -> DataFrame:
    """The rows of h = 16 on N h = D."""
    return study.point(width // 16, 16, width=width)


def mean_of_texts(rows: DataFrame, column: str = "bits") -> float:
    """Mean over texts of the mean of a column on each."""
    return float(rows.groupby("text")[column].mean().mean())


# Stages 0 and 1, cost -----------------------------------------------------------------------------


def stage0_page(rows: DataFrame) -> str:
    """Stage 0: the choice by the rule of the plan, and every cell."""
    rows = rows[rows["stage"] == 0]
    names = list(PARAMETRIZATIONS)
    chosen, found = choose(rows, names, design.TOLERANCE)
    order = lambda cell: (names.index(cell.parametrization), cell.head_dim, cell.text)
    return render(
        "stage0",
        done=len(rows),
        tolerance=design.TOLERANCE,
        titles=PARAMETRIZATIONS,
        chosen=chosen,
        found=found,
        lowest=min(mean for mean, _ in found.values()),
        cells=sorted(minima(rows).itertuples(), key=order),
        texts=rows.groupby("text", sort=False),
        baselines=charts.BASELINES,
    )


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
    fitted = {fit.name: fit for fit in hypotheses.fits(study)}
    registered = hypotheses.primary(study) + hypotheses.secondary(study)
    return render(
        "analysis",
        study=study,
        fitted=list(fitted.values()),
        alone=[fitted["D = 32 alone, without h = 2"], fitted["D = 64 alone"],
               fitted["D = 96 alone"]],
        against=functools.partial(hypotheses.difference, study, 64),
        sharing_costs=hypotheses.sharing_costs(study),
        at_equal_seconds={w: at_equal_seconds(study, w, w // 32, 32, "standard") for w in (64, 96)},
        p1=registered[1].found,
        results=table(list(map(result_line, registered))),
        points=_point_table(study),
        repeated=_repeated_table(study),
        baselines=_baselines(study),
        baseline_titles=charts.BASELINES.values(),
        sharing=_sharing_table(study),
        lengths=_length_table(study),
        optimizers=_optimizer_gaps(rows),
        stage0_texts=design.STAGE0_TEXTS,
        rate_errors=_rate_errors(study),
        check=CHECK.read_text().rstrip(),
        tuning=-study.model.contrast({"tuning": 1}).value / (2 * study.tuning_k),
        lengths_of_training=_training_lengths(study),
        margin=analysis.MARGIN,
        ends=ends,
        power=power,
        multiple=functools.partial(multiple, study=study),
    )  # fmt: skip


def at_equal_seconds(study: Study, width: int, heads: int, head_dim: int, layout: str) -> str:
    """The difference of a point from h = 16 on N h = D at equal CPU seconds, by the slope of the
    loss over all sizes; behind it by the slopes between this size and those beside it.

    Seconds are the least of the runs of a point.
    """
    base, own = base_of(study, width), study.point(heads, head_dim, width=width, layout=layout)
    saved = math.log(own["cpu_seconds"].min() / base["cpu_seconds"].min())
    difference = analysis.over_texts(analysis.paired(base, own)).value
    beside = [slope for pair, slope in hypotheses.chords(study).items() if width in pair]
    found, *others = (difference - slope * saved for slope in (study.slope.value, *beside))
    return f"{found:+.4f} ({' and '.join(f'{one:+.4f}' for one in others)})"


def result_line(r: Result) -> Line:
    """A line of the registered results: estimate, checks, p-value, conclusion."""
    boot = units = p = "–"
    number = f"{r.found.count}"
    if r.pairs:
        low, high = analysis.bootstrap(r.pairs)
        boot = f"{low:+.4f} to {high:+.4f}"
        units = ends(analysis.over_texts(analysis.merged(r.pairs)))
        number = counts(r.pairs)
    if math.isfinite(r.corrected):
        p = f"{r.corrected:.4f}" if r.corrected >= 1e-4 else "< 0.0001"
    return {"name": r.name, "what": r.text, "estimate (95 % interval)": ends(r.found),
            "texts x seeds": number, "bootstrap interval": boot, "Tatoeba texts as one": units,
            "p (Holm for S1 to S5)": p, "conclusion": r.conclusion}  # fmt: skip


def _point_table(study: Study) -> str:
    lines: list[tuple[Line, Estimate | None]] = []
    for width in STAGE_OF_WIDTH:
        for point in points_of(width):
            n, h, layout = point
            rows = study.point(n, h, width=width, layout=layout)
            line = {
                "D": width,
                "point": point_name(*point),
                "N h / D": f"{n * h / width:g}",
                "FFN width": f"{rows['ffn_width'].iloc[0]:,}",
                "parameters": f"{rows['parameters'].iloc[0]:,}",
                "bits": f"{mean_of_texts(rows):.4f}",
                "difference (95 %)": "reference",
            }
            if point == (width // 16, 16, "standard"):
                lines.append((line, None))
                continue
            pairs = hypotheses.against(study, width, *point)
            found = hypotheses.difference(study, width, *point)
            lines.append((line | {
                "difference (95 %)": ends(found),
                "Tatoeba texts as one": ends(analysis.over_texts(analysis.merged(pairs))),
                "at equal seconds (this CPU)": at_equal_seconds(study, width, *point),
                "texts x seeds": counts(pairs),
            }, found))  # fmt: skip
    return judged_table(lines)


Compared = Sequence[tuple[Line, Pairs]]
"""What a line says first, and its differences."""


def _differences(
    compared: Compared, heading: str, pooled: analysis.Pooled | None
) -> list[tuple[Line, Estimate]]:
    """Lines of differences, their intervals in a column of this heading."""
    found = [(line, pairs, analysis.over_texts(pairs, pooled)) for line, pairs in compared]
    return [({**line, heading: ends(one), "texts x seeds": counts(pairs)}, one)
            for line, pairs, one in found]  # fmt: skip


def _repeated_table(study: Study) -> str:
    """Differences from 6x16 at D = 96 over the texts that are read less than four times."""
    compared = []
    for n, h in design.POINTS[96]:
        pairs = hypotheses.against(study, 96, n, h)
        once = {text: d for text, d in pairs.items() if text not in design.REPEATED_TEXTS}
        if (n, h) != (6, 16):
            compared.append(({"point": f"{n}x{h}"}, once))
    whole = {f"{n}x{h}" for h, n in whole_width(96).items()}
    pooled = analysis.pool([pairs for line, pairs in compared if line["point"] in whole])
    return judged_table(_differences(compared, "difference (95 %)", pooled))


def _baselines(study: Study) -> list[tuple[int, str, list[float]]]:
    """(D, text, baselines and bits of the model with h = 16 on N h = D)."""
    names = [*charts.BASELINES, "bits"]
    means = {w: base_of(study, w).groupby("text")[names].mean() for w in STAGE_OF_WIDTH}
    return [(w, text, one.loc[text].tolist())
            for w, one in means.items() for text in design.ALL_TEXTS]  # fmt: skip


def _length_table(study: Study) -> str:
    """Differences from 4x16 at 80 bytes per parameter and at T = 64 and 256, beside those of
    stage 3 on the same texts."""
    settings: list[tuple[int, float, Sequence[str]]] = [
        *((128, each, design.LENGTH_TEXTS) for each in (20.0, 80.0)),
        *((length, 20.0, design.CONTEXT_TEXTS) for length in (64, 128, 256)),
    ]
    lines = []
    for length, each, texts in settings:
        first = {"T": length, "bytes per parameter": f"{each:g}", "texts": ", ".join(texts)}
        at = {f"{n}x{h}": study.point(n, h, length=length, bytes_per_parameter=each)
              for n, h in ((4, 16), (16, 4), (8, 8), (2, 32), (1, 64))}  # fmt: skip
        base, *others = ((name, rows[rows["text"].isin(texts)]) for name, rows in at.items())
        compared = [({**first, "point": name}, pairs) for name, rows in others
                    if (pairs := analysis.paired(base[1], rows))]  # fmt: skip
        pooled = analysis.pool([pairs for _, pairs in compared])
        lines += _differences(compared, "bits worse than 4x16 (95 %)", pooled)
    return judged_table(lines)


def _sharing_table(study: Study) -> str:
    slopes = hypotheses.chords(study)
    beside = f"by the slope of D = {' and '.join(f'{a} to {b}' for a, b in slopes)}"
    lines = []
    for budget in ("flops", "parameters"):
        for plan, found in hypotheses.sharing_costs(study, budget).items():
            times, by_chords = "–", "–"
            if budget == "flops":
                times = multiple(found, study)
                each = (math.exp(found.value / abs(slope)) for slope in slopes.values())
                by_chords = " and ".join(f"{one:.2f}" for one in each)
            lines.append(({
                "plan": plan, "equal": budget, "bits worse than separate (95 %)": ends(found),
                "compute multiple": times, beside: by_chords,
                "texts x seeds": counts(hypotheses.sharing(study, plan, budget)),
            }, found))  # fmt: skip
    return judged_table(lines)


def _optimizer_gaps(rows: DataFrame) -> dict[str, list[float]]:
    """Stage 0: minimum of 1x64 less minimum of 4x16, by parametrization, for each text."""
    cells = minima(rows[rows["stage"] == 0])
    bits = cells.set_index(["parametrization", "text", "head_dim"])["bits"]
    return {
        name: [bits[name, text, 64] - bits[name, text, 16] for text in design.STAGE0_TEXTS]
        for name in dict.fromkeys(cells["parametrization"])
    }


def _rate_errors(study: Study) -> list[tuple[int, str, float]]:
    """How far the learning rate of each point was off, by the two rates of its texts."""
    return [
        (w, point_name(n, h, layout), rate_error(study, study.point(n, h, width=w, layout=layout)))
        for w in (32, 64)
        for n, h, layout in points_of(w)
    ]


def rate_error(study: Study, rows: DataFrame) -> float:
    """ln r* less the best ln r of a variant that has two rates x on each text: the minimum of the
    parabola k x^2 + l x whose slope l is the mean over texts of that between the two rates."""
    ordered = rows.sort_values("tuning").groupby("text")[["tuning", "bits"]]
    first, last = ordered.first(), ordered.last()
    slopes = (last["bits"] - first["bits"]) / (last["tuning"] - first["tuning"])
    middle = (first["tuning"] + last["tuning"]) / 2
    return float(slopes.mean() / (2 * study.tuning_k) - middle.mean())


def _training_lengths(study: Study) -> list[str]:
    """What 1x64 costs against 4x16 at 20 and 80 bytes per parameter, on the same texts."""
    found = []
    for each in (20.0, 80.0):
        points = [study.point(*p, bytes_per_parameter=each) for p in ((4, 16), (1, 64))]
        pairs = analysis.paired(*(p[p["text"].isin(design.LENGTH_TEXTS)] for p in points))
        found.append(ends(analysis.over_texts(pairs)))
    return found


def _csv(results: Sequence[Result]) -> str:
    names = ("name", "what", "value", "error", "low", "high", "texts", "p", "conclusion")
    lines = []
    for r in results:
        f = r.found
        numbers = (f.value, f.error, f.low, f.high, f.count, r.corrected)
        lines.append((r.name, r.text, *numbers, r.conclusion))
    return DataFrame(lines, columns=names).to_csv(index=False)


# Figures ------------------------------------------------------------------------------------------


def figures(study: Study, rows: DataFrame) -> dict[str, Figure]:
    """Figure name -> figure."""
    alone = study.frame[study.frame["stage"] == STAGE_OF_WIDTH[64]]
    model = analysis.surface_model(alone, study.tuning_k)
    costs = hypotheses.sharing_costs(study).items()
    return {
        "figure1": charts.loss_figure([_panel(study, width) for width in STAGE_OF_WIDTH]),
        "figure2": _surface(model),
        "figure3": charts.sharing_figure(
            {plan: analysis.compute_multiple(cost, study.slope) for plan, cost in costs}
        ),
        "figure4": charts.rate_figure(_rates(rows)),
    }


def _panel(study: Study, width: int) -> charts.SizePanel:
    base = base_of(study, width)
    differences = {h: hypotheses.difference(study, width, n, h)
                   for h, n in whole_width(width).items() if h != 16}  # fmt: skip
    series = charts.around(mean_of_texts(base), 16, differences)
    grams = {name: mean_of_texts(base, name) for name in charts.BASELINES}
    return charts.SizePanel(width, int(base["parameters"].iloc[0]), series, grams)


def _surface(model: MixedModel) -> Figure:
    u, v = np.meshgrid(np.linspace(2, 6, 60), np.linspace(-1, math.log2(1.5), 40))
    b = dict(zip(model.names, model.coefficients, strict=True))
    x = u - 4
    level = np.mean([b[name] for name in b if name.startswith("a[") and name.endswith("-64]")])
    bits = level + b["u"] * x + b["u2"] * x**2 + b["v"] * v + b["v2"] * v**2 + b["uv"] * x * v
    points = [(float(h), n * h / 64) for n, h in design.POINTS[64]]
    return charts.surface_figure(u, v, bits, points)


def _rates(rows: DataFrame) -> dict[str, dict[int, float]]:
    """The best learning rates on N h = D: model size and text -> head_dim -> rate."""
    cells = minima(rows[rows["stage"] == 1]).query(
        "plan == 'separate' and layout == 'standard' and length == 128 and interior"
        " and bytes_per_parameter == 20 and num_heads * head_dim == width"
    )
    found: dict[str, dict[int, float]] = {}
    for cell in cells.itertuples():
        of_size = found.setdefault(f"D = {cell.width}, {cell.text}", {})
        of_size[cell.head_dim] = math.exp(cell.log_rate)
    return found
