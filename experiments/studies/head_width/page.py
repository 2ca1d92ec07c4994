"""The page of the head-width study: tables, figures and text from rows alone, in seconds."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.lab.stats import ALPHA, holm
from attnlab.report.page import p_value, render, table
from attnlab.report.style import themed_svg
from experiments.studies.head_width import analysis, design
from experiments.studies.head_width import figures as charts
from experiments.studies.head_width.analysis import Mask, Pairs
from experiments.studies.head_width.hypotheses import (
    BLANKS,
    STAGE_OF_WIDTH,
    Fit,
    Result,
    Study,
    blanks,
    chords,
    ends,
    fits,
    from_reference,
    looks,
    multiple,
    power,
    primary,
    read_study,
    secondary,
    sentence,
    sharing,
    sharing_costs,
)
from experiments.studies.head_width.mixed_model import Estimate, MixedModel
from experiments.studies.head_width.rates import cells_of, minimum
from experiments.studies.head_width.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECK = Path(__file__).with_name("_recompute.py")


def result_rows(results: Sequence[Result]) -> list[list[str]]:
    """The table of results: estimate, checks, p-values, conclusion."""
    lines = []
    for r in results:
        boot = units = "–"
        if r.pairs:
            low, high = analysis.bootstrap(r.pairs)
            boot = f"{low:+.4f} to {high:+.4f}"
            units = ends(analysis.over_texts(analysis.merged(r.pairs)))
        counts = _counts(r.pairs) if r.pairs else f"{r.found.count}"
        p = "–"
        if math.isfinite(r.corrected):
            p = f"{r.corrected:.4f}" if r.corrected >= 1e-4 else "< 0.0001"
        lines.append([r.name, r.text, ends(r.found), counts, boot, units, p, r.conclusion])
    return lines


def _counts(pairs: Pairs) -> str:
    """Texts x seeds."""
    return f"{len(pairs)} x {max(map(len, pairs.values()))}"


HEADER = ("name", "what", "estimate (95 % interval)", "texts x seeds", "bootstrap interval",
          "Tatoeba texts as one", "p (Holm for S1 to S5)", "conclusion")  # fmt: skip


def figures(study: Study, rows: Sequence[Row]) -> "dict[str, Figure]":
    """Figure name -> figure."""
    alone = study.frame["stage"] == STAGE_OF_WIDTH[64]
    model = analysis.surface_model(analysis.select(study.frame, alone), study.tuning_k)
    costs = sharing_costs(study).items()
    return {
        "figure1": charts.loss_figure([_panel(study, width) for width in STAGE_OF_WIDTH]),
        "figure2": _surface(model),
        "figure3": charts.sharing_figure(
            {plan: analysis.compute_multiple(cost, study.slope) for plan, cost in costs}
        ),
        "figure4": charts.rate_figure(_rates(rows)),
    }


def _panel(study: Study, width: int) -> charts.SizePanel:
    base = study.point(width // 16, 16, width=width)
    pairs = from_reference(study, width)
    pooled = analysis.pool(list(pairs.values()))
    differences = {h: analysis.over_texts(one, pooled) for h, one in pairs.items()}
    series = charts.around(float(np.mean(_text_means(study, base))), 16, differences)
    grams = {name: float(np.mean(_text_means(study, base, name))) for name in charts.BASELINES}
    return charts.SizePanel(width, int(study.frame["parameters"][base][0]), series, grams)


def _surface(model: MixedModel) -> "Figure":
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
    points = [(float(h), n * h / 64) for n, h in design.POINTS[64]]
    return charts.surface_figure(u, v, bits, points)


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


def page(rows: Sequence[Row], study: Study) -> str:
    """The Markdown page."""
    fitted = fits(study)
    text = render(
        Path(__file__).with_name("analysis.md.jinja"),
        answer=_answer(study),
        at_equal_seconds=_lead_at_equal_seconds(study),
        headline=_headline(study),
        reading="\n".join(_reading(study, fitted)),
        blanks=table(("blank", "value"), zip(BLANKS, blanks(study), strict=False)),
        sentence=sentence(study),
        missing=_missing(study),
        results=table(HEADER, result_rows(primary(study) + secondary(study))),
        points=_point_table(study),
        repeated=_repeated_table(study),
        baselines=_baselines(study),
        sharing=_sharing_table(study),
        lengths=_length_table(study),
        optimizers=_optimizer_table(rows),
        rate_errors=_rate_table(study),
        fits=_fit_table(fitted),
        model=_model_table(study),
        check=CHECK.read_text().rstrip(),
        **_rate_errors(study),
        **_training_lengths(study),
    )
    return f"{text}\n"


def _answer(study: Study) -> str:
    """The best widths measured, for a reader who knows no letters yet."""
    best: dict[int, list[str]] = {}
    for width in STAGE_OF_WIDTH:
        mean = {h: float(np.mean(_text_means(study, study.point(n, h, width=width))))
                for n, h in design.POINTS[width] if n * h == width}  # fmt: skip
        best.setdefault(min(mean, key=mean.__getitem__), []).append(str(width))
    return "; ".join(
        f"heads of {h} have the lowest mean loss in models {', '.join(widths)} wide"
        for h, widths in best.items()
    )


def _reading(study: Study, found: Sequence[Fit]) -> list[str]:
    """What the numbers say, in bullets."""
    values = [2**one.optimum.best.value for one in found]
    alone = next(one for one in found if one.name == "D = 64 alone")
    bad = found[0].residual_sd > 2 * alone.residual_sd
    lines = [
        f"- From D = 64 alone the best head_dim is {_best(alone)} and the best N h "
        f"{_best_share(alone)} D (exploratory). The sentence of the plan takes the registered "
        "model of all complete stages"
        + (", which fits badly" if bad else "")
        + f": its residual is {found[0].residual_sd:.4f} bits, that of D = 64 alone "
        f"{alone.residual_sd:.4f}. By [other fits](#the-best-head-by-other-fits-exploratory) "
        f"the best head_dim is {min(values):.1f} to {max(values):.1f}.",
        _growth(found),
    ]
    for total, point in (("D/2", (2, 16)), ("3D/2", (6, 16))):
        difference = analysis.over_texts(
            against(study, 64, *point, "standard"),
            analysis.pool(list(from_reference(study).values())),
        )
        lines.append(
            f"- D = 64, heads of 16: N h = {total} against D costs {ends(difference)} bits at "
            f"equal FLOPs: {reading(difference)}."
        )
    return lines


def _growth(found: Sequence[Fit]) -> str:
    """Does the best head_dim grow with D? The registered slope beside one fit per D."""
    names = ["D = 32 alone, without h = 2", "D = 64 alone", "D = 96 alone"]
    alone = [f for name in names for f in found if f.name == name]
    slope = found[0].optimum.slope
    bests = [fit.optimum.best.value for fit in alone]
    agree = (bests[-1] - bests[0]) * slope.value > 0
    each = ", ".join(f"{2**best:.1f}" for best in bests)
    return (
        "- Does the best head_dim grow with D? The registered model says that it changes by a "
        f"factor of {power(slope, 2)} per doubling of D (S3; a factor of 1 is a fixed head_dim, 2 "
        f"a fixed number of heads). Fitted to each D alone, without heads of 2, it is {each} at "
        f"D = {', '.join(map(str, STAGE_OF_WIDTH))} (exploratory). "
        + ("" if agree else "The signs contradict each other, so its direction is not settled. ")
        + "Models of D = 256: [gpu.md](gpu.md)."
    )


def _best(fit: Fit) -> str:
    b = fit.optimum.best
    if not math.isfinite(b.low):
        return "not determined"
    return f"{2**b.value:.1f} ({2**b.low:.1f} to {2**b.high:.1f})"


def _best_share(fit: Fit) -> str:
    t = fit.total
    if not (math.isfinite(t.low) and math.isfinite(t.high)):
        return "not determined"
    return f"{2**t.value:.2f} ({2**t.low:.2f} to {2**t.high:.2f})"


def _fit_table(found: Sequence[Fit]) -> str:
    header = ("rows", "h\\*", "best N h / D", "slope of log2 h\\* on log2 D", "residual sd, bits")
    lines = []
    for one in found:
        slope = one.optimum.slope
        trend = ends(slope, 2) if math.isfinite(slope.value) else "–"
        lines.append([one.name, _best(one), _best_share(one), trend, f"{one.residual_sd:.4f}"])
    return table(header, lines)


def _optimizer_table(rows: Sequence[Row]) -> str:
    """Stage 0: minimum of 1x64 less minimum of 4x16, by parametrization and text."""
    cells = {
        (c.parametrization, c.text, c.variant.point): minimum(of_cell)
        for c, of_cell in cells_of([r for r in rows if r.spec.stage == 0]).items()
    }
    names = dict.fromkeys(name for name, _, _ in cells)
    lines = []
    for name in names:
        gaps = [f"{cells[name, t, '1x64'].bits - cells[name, t, '4x16'].bits:+.4f}"
                for t in design.STAGE0_TEXTS]  # fmt: skip
        lines.append([name, *gaps])
    return table(("optimizer", *design.STAGE0_TEXTS), lines)


def _training_lengths(study: Study) -> dict[str, str]:
    """What 1x64 costs against 4x16 at 20 and 80 bytes per parameter, on the same texts."""
    found = {}
    for name, each in (("usual", 20.0), ("longer", 80.0)):
        points = [study.point(*p, bytes_per_parameter=each) for p in ((4, 16), (1, 64))]
        texts = np.isin(study.frame["text"], design.LENGTH_TEXTS)
        pairs = analysis.paired(study.frame, points[0] & texts, points[1] & texts)
        found[name] = ends(analysis.over_texts(pairs))
    return found


def _text_means(study: Study, mask: Mask, column: str = "bits") -> list[float]:
    """Mean of a column on each text."""
    text, values = study.frame["text"][mask], study.frame[column][mask]
    return [float(values[text == one].mean()) for one in np.unique(text)]


def _headline(study: Study) -> str:
    last = primary(study)[-1]
    if last.conclusion == "inconclusive":
        return f"P1 is inconclusive: loss(2x32) - loss(4x16) = {ends(last.found)} bits per byte."
    size = dataclasses.replace(last.found, value=abs(last.found.value))
    if last.found.value < 0:
        size = dataclasses.replace(size, low=-last.found.high, high=-last.found.low)
    worse = "worse" if last.found.value > 0 else "better"
    of, margin = (math.exp(abs(x / study.slope.value)) for x in (size.value, analysis.MARGIN))
    return (
        f"The registered comparison (P1): in models 64 wide, at equal FLOPs, 2 heads of 32 are "
        f"{worse} than 4 heads of 16 by {ends(size, 4, '')} bits per byte (x {of:.2f} compute): "
        f"{last.conclusion} (x {margin:.2f} compute)."
    )


def _missing(study: Study) -> str:
    if study.has_second_look:
        return "Nothing."
    if looks(study)[0].conclusion == "inconclusive":
        return "Stage 7 (the second look at P1), since the first look is inconclusive."
    return "Nothing. Stage 7 (the second look at P1) is not run, since the first look decided."


def reading(found: Estimate) -> str:
    """What an interval says: "inconclusive" where it holds 0."""
    if not found.low * found.high > 0:
        return "inconclusive"
    return "worse" if found.value > 0 else "better"


def corrected(found: Sequence[Estimate]) -> list[list[str]]:
    """Of each: p after Holm's correction for all of them, and `reading` where p < 0.05."""
    said = []
    for one, p in zip(found, holm([one.p for one in found]).tolist(), strict=True):
        word = reading(one)
        lost = word != "inconclusive" and not p < ALPHA
        said.append([p_value(p), f"inconclusive (uncorrected: {word})" if lost else word])
    return said


def with_corrected(lines: Sequence[list[str]], found: Sequence[Estimate | None]) -> list[list[str]]:
    """The lines, each ended by what `corrected` says of its estimate; empty cells for None."""
    said = iter(corrected([one for one in found if one]))
    return [[*line, *(next(said) if one else ("", ""))]
            for line, one in zip(lines, found, strict=True)]  # fmt: skip


def at_equal_seconds(study: Study, width: int, heads: int, head_dim: int, layout: str) -> str:
    """The difference of a point from h = 16 on N h = D at equal CPU seconds, by the slope of the
    loss over all sizes; behind it by the slopes between this size and those beside it.

    Seconds are the least of the runs of a point.
    """
    masks = [study.point(width // 16, 16, width=width)]
    masks += [study.point(heads, head_dim, width=width, layout=layout)]
    base, own = (float(np.min(study.frame["cpu_seconds"][mask])) for mask in masks)
    difference = analysis.over_texts(against(study, width, heads, head_dim, layout)).value
    beside = [slope for pair, slope in chords(study).items() if width in pair]
    found, *others = (difference - s * math.log(own / base) for s in (study.slope.value, *beside))
    return f"{found:+.4f} ({' and '.join(f'{one:+.4f}' for one in others)})"


def _lead_at_equal_seconds(study: Study) -> str:
    cells = {w: at_equal_seconds(study, w, w // 32, 32, "standard") for w in (64, 96)}
    return " and ".join(f"{cell} bits at D = {width}" for width, cell in cells.items())


def _rate_table(study: Study) -> str:
    """How far the learning rate of each variant was from its best one, by its two rates."""
    lines = []
    for width in (32, 64):
        points: list[tuple[int, int, str]] = [(n, h, "standard") for n, h in design.POINTS[width]]
        points += [(n, h, "narrow") for n, h in design.NARROW if width == 64]
        for n, h, layout in points:
            error = rate_error(study, study.point(n, h, width=width, layout=layout))
            name = f"{n}x{h}" + (" narrow" if layout == "narrow" else "")
            cost = study.tuning_k * error**2
            lines.append([str(width), name, f"{error:+.2f}", f"{cost:.4f}"])
    return table(("D", "point", "ln r less the best ln r", "bits that it costs"), lines)


def rate_error(study: Study, mask: Mask) -> float:
    """ln r* less the best ln r of a variant that has two rates x on each text: the minimum of the
    parabola k x^2 + l x whose slope l is the mean over texts of that between the two rates."""
    text, x, bits = (study.frame[name][mask] for name in ("text", "tuning", "bits"))
    slopes, middles = [], []
    for one in np.unique(text):
        of_text = np.argsort(x[text == one])
        low, high = x[text == one][of_text[[0, -1]]]
        b_low, b_high = bits[text == one][of_text[[0, -1]]]
        slopes.append((b_high - b_low) / (high - low))
        middles.append((low + high) / 2)
    return float(np.mean(slopes) / (2 * study.tuning_k) - np.mean(middles))


def _point_table(study: Study) -> str:
    header = ("D", "point", "N h / D", "FFN width", "parameters", "bits", "difference (95 %)",
              "Tatoeba texts as one", "at equal seconds (this CPU)", "texts x seeds", "p, Holm",
              "")  # fmt: skip
    lines: list[list[str]] = []
    every: list[Estimate | None] = []
    for width in STAGE_OF_WIDTH:
        points: list[tuple[int, int, str]] = [(n, h, "standard") for n, h in design.POINTS[width]]
        points += [(n, h, "narrow") for n, h in design.NARROW if width == 64]
        many = {p: against(study, width, *p) for p in points if p != (width // 16, 16, "standard")}
        pooled = analysis.pool(list(from_reference(study, width).values()))
        for n, h, layout in points:
            mask = study.point(n, h, width=width, layout=layout)
            mean = float(np.mean(_text_means(study, mask)))
            shape = [f"{study.frame[f][mask][0]:,}" for f in ("ffn_width", "parameters")]
            name = f"{n}x{h}" + (" narrow" if layout == "narrow" else "")
            line = [str(width), name, f"{n * h / width:g}", *shape, f"{mean:.4f}"]
            pairs = many.get((n, h, layout))
            every.append(None if pairs is None else analysis.over_texts(pairs, pooled))
            if pairs is None:
                lines.append([*line, "reference", "", "", ""])
                continue
            merged = ends(analysis.over_texts(analysis.merged(pairs)))
            seconds = at_equal_seconds(study, width, n, h, layout)
            found = analysis.over_texts(pairs, pooled)
            lines.append([*line, ends(found), merged, seconds, _counts(pairs)])
    return table(header, with_corrected(lines, every))


def _repeated_table(study: Study) -> str:
    """Differences from 6x16 at D = 96 over the texts that are read less than four times."""
    points = [p for p in design.POINTS[96] if p != (6, 16)]
    many: dict[tuple[int, int], Pairs] = {}
    for point in points:
        pairs = against(study, 96, *point, "standard")
        many[point] = {t: d for t, d in pairs.items() if t not in design.REPEATED_TEXTS}
    pooled = analysis.pool([pairs for (n, h), pairs in many.items() if n * h == 96])
    every = [analysis.over_texts(pairs, pooled) for pairs in many.values()]
    lines = [[f"{n}x{h}", ends(found), _counts(pairs)]
             for ((n, h), pairs), found in zip(many.items(), every, strict=True)]  # fmt: skip
    header = ("point", "difference (95 %)", "texts x seeds", "p, Holm", "")
    return table(header, with_corrected(lines, every))


def against(study: Study, width: int, heads: int, head_dim: int, layout: str) -> Pairs:
    """Differences of a point from h = 16 on N h = D."""
    reference = study.point(width // 16, 16, width=width)
    point = study.point(heads, head_dim, width=width, layout=layout)
    return analysis.paired(study.frame, reference, point)


def _baselines(study: Study) -> str:
    header = ("D", "text", *charts.BASELINES.values(), "model h = 16, N h = D")
    lines = []
    for width in STAGE_OF_WIDTH:
        mask = study.point(width // 16, 16, width=width)
        for text in design.ALL_TEXTS:
            of_text = mask & (study.frame["text"] == text)
            names = (*charts.BASELINES, "bits")
            means = [f"{study.frame[name][of_text].mean():.3f}" for name in names]
            lines.append([str(width), text, *means])
    return table(header, lines)


def _length_table(study: Study) -> str:
    """Differences from 4x16 at 80 bytes per parameter and at T = 64 and 256, beside those of
    stage 3 on the same texts."""
    settings: list[tuple[int, float, Sequence[str]]] = [
        (128, 20.0, design.LENGTH_TEXTS),
        (128, 80.0, design.LENGTH_TEXTS),
    ]
    settings += [(t, 20.0, design.CONTEXT_TEXTS) for t in (64, 128, 256)]
    lines, every = [], []
    for length, each, texts in settings:
        others = ((16, 4), (8, 8), (2, 32), (1, 64))
        of_texts = np.isin(study.frame["text"], texts)
        at = {p: study.point(*p, length=length, bytes_per_parameter=each) & of_texts
              for p in ((4, 16), *others)}  # fmt: skip
        many = {p: analysis.paired(study.frame, at[4, 16], at[p]) for p in others}
        many = {p: pairs for p, pairs in many.items() if pairs}
        pooled = analysis.pool(list(many.values()))
        for (n, h), pairs in many.items():
            found = analysis.over_texts(pairs, pooled)
            cells = [str(length), f"{each:g}", ", ".join(texts), f"{n}x{h}", ends(found)]
            lines.append([*cells, _counts(pairs)])
            every.append(found)
    header = ("T", "bytes per parameter", "texts", "point", "bits worse than 4x16 (95 %)",
              "texts x seeds", "p, Holm", "")  # fmt: skip
    return table(header, with_corrected(lines, every))


def _sharing_table(study: Study) -> str:
    lines, every, slopes = [], [], chords(study)
    for budget in ("flops", "parameters"):
        for plan, found in sharing_costs(study, budget).items():
            counts = _counts(sharing(study, plan, budget))
            times, by_chords = "–", "–"
            if budget == "flops":
                times = multiple(found, study)
                each = (math.exp(found.value / abs(slope)) for slope in slopes.values())
                by_chords = " and ".join(f"{one:.2f}" for one in each)
            lines.append([plan, budget, ends(found), times, by_chords, counts])
            every.append(found)
    beside = " and ".join(f"{a} to {b}" for a, b in slopes)
    header = ("plan", "equal", "bits worse than separate (95 %)", "compute multiple",
              f"by the slope of D = {beside}", "texts x seeds", "p, Holm", "")  # fmt: skip
    return table(header, with_corrected(lines, every))


def _model_table(study: Study) -> str:
    names = [name for name in study.model.names if not name.startswith("a[")]
    lines = [[name, ends(study.model.contrast({name: 1}))] for name in names]
    sds = zip(("B1 (u by text)", "C1 (v by text)", "seed"), study.model.component_sd, strict=True)
    lines += [[f"standard deviation of {n}", f"{sd:.4f}"] for n, sd in sds]
    lines += [
        ["standard deviation of e", f"{study.model.residual_sd:.4f}"],
        ["k (stage 1)", f"{study.tuning_k:.4f}"],
    ]
    return table(("term", "estimate (95 % interval)"), lines)


def _rate_errors(study: Study) -> dict[str, str]:
    """How far learning rates were off, and the bits that this cost."""
    k, sd = study.tuning_k, study.rate_sd
    off = -study.model.contrast({"tuning": 1}).value / (2 * k)
    numbers = {"residual": f"{sd:.3f}", "cost": f"{k * sd**2:.4f}"}
    side = "low" if off > 0 else "high"
    return numbers | {"off": f"{side} by {abs(off):.2f}", "off_cost": f"{k * off**2:.4f}"}


def write_analysis(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes analysis.md, analysis.csv and the figures. Creates the folder.

    Raises ValueError as `read_study`, before that.
    """
    study = read_study(rows)
    texts = {
        "analysis.md": page(rows, study),
        "analysis.csv": _csv(primary(study) + secondary(study)),
    }
    texts |= {f"{n}.svg": themed_svg(drawn, n) for n, drawn in figures(study, rows).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in texts]


def _csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "what", "value", "error", "low", "high", "texts", "p", "conclusion"))
    for r in results:
        f = r.found
        numbers = (f.value, f.error, f.low, f.high, f.count, r.corrected)
        writer.writerow((r.name, r.text, *numbers, r.conclusion))
    return text.getvalue()
