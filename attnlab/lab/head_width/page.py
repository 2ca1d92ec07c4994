"""The page of the head-width study: tables, figures and text from rows alone, in seconds."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.lab.cells import table
from attnlab.lab.head_width import analysis, design
from attnlab.lab.head_width import figures as charts
from attnlab.lab.head_width.analysis import Mask, Pairs
from attnlab.lab.head_width.hypotheses import (
    BLANKS,
    NOT_YET,
    STAGE_OF_WIDTH,
    Fit,
    Result,
    Study,
    blanks,
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
from attnlab.lab.head_width.rates import PLANS, cells_of, minimum
from attnlab.lab.head_width.rows import Row
from attnlab.lab.mixed_model import Estimate, MixedModel
from attnlab.plotting import themed_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECK = Path(__file__).with_name("_recompute.py")


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
    """Figure name -> figure, of what there is."""
    drawn: dict[str, Figure] = {}
    panels = [_panel(study, w) for w, s in STAGE_OF_WIDTH.items() if study.complete(s)]
    if panels:
        drawn["figure1"] = charts.loss_figure(panels)
    if study.model is not None:
        alone = np.asarray(study.frame["stage"]) == STAGE_OF_WIDTH[64]
        part = analysis.select(study.frame, alone)
        drawn["figure2"] = _surface(analysis.surface_model(part, study.tuning_k))
    if study.slope is not None and study.complete(5):
        multiples = {
            plan: analysis.compute_multiple(cost, study.slope)
            for plan, cost in sharing_costs(study).items()
        }
        drawn["figure3"] = charts.sharing_figure(multiples)
    rates = _rates(rows)
    if rates:
        drawn["figure4"] = charts.rate_figure(rates)
    return drawn


def _panel(study: Study, width: int) -> charts.SizePanel:
    base = study.point(width // 16, 16, width=width)
    of_text = _text_means(study, base)
    level = float(np.mean(of_text))
    pairs = from_reference(study, width)
    pooled = analysis.pool(list(pairs.values()))
    series = {16: Estimate(level, math.nan, math.nan, math.nan, math.nan, len(of_text))}
    for h, one in pairs.items():
        d = analysis.over_texts(one, pooled)
        series[h] = dataclasses.replace(
            d, value=level + d.value, low=level + d.low, high=level + d.high
        )
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


CAPTIONS = {
    "figure1": "**Figure 1. Held-out loss over head_dim at N h = D and equal FLOPs.** Mean over 8 "
    "texts. Interval: 95 %, of the difference from h = 16 (which has none of its own), texts "
    "random, not narrower than the pooled one. Grey: baselines counted on the bytes of the same "
    "runs (Witten-Bell n-grams, n - 1 bytes of context) and gzip -9, means over the same texts; "
    "those outside the axis are in the title of the panel.",
    "figure2": "**Figure 2. Fitted loss (bits per byte) over head_dim and N h / D, D = 64.** "
    "Contours of the mixed model fitted to D = 64 alone (exploratory: the registered one has one "
    "curvature for all D); points: measured.",
    "figure3": "**Figure 3. Cost of sharing at equal FLOPs by sublayer,** as a compute multiple: "
    "how many times the compute gives the loss of separate layers. 95 % interval over texts, with "
    "the error of the slope.",
    "figure4": "**Figure 4. Best learning rate over head_dim at N h = D** (stage 1, validation "
    "part, one seed; cells with an interior minimum).",
}
LETTERS = """D is the width of the model, N the number of heads of a layer, h (head_dim) the width
of a head, T the length of a window in bytes. A point such as 4x16 is 4 heads of width 16.
Differences are in held-out bits per byte; positive is worse. `python -m experiments.study
--rows=docs/results/head_width/runs.csv --analysis=docs/results/head_width` writes this page from
`runs.csv`, in seconds.
"""
RULES = """## Registered results

Held-out bits per byte, texts random; S1 and S3 in units of log2. The rules are those of
[plan.md](plan.md) with its amendment 1:

- Student's t with texts - 1 degrees of freedom. No interval is narrower than that of the variance
  pooled over pairs of variants.
- P1 is judged by two methods, the mixed model and the paired t-test over the text means. It is
  significant (p < 0.005 at the first look, p < 0.048 at the second) or equivalent (90 % interval
  within 0.02) only where both say so; otherwise it is inconclusive. It can be both: a difference
  that is not 0 and yet smaller than 0.02.
- The first look reads stages 1 and 3 alone, the second stages 1, 3 and 7. Stage 7 is run only where
  the first look is neither.
- S1 to S5 are judged once, when stages 2 to 5 are complete, with Holm's correction over 5.
- S1: p is the larger of those of the slopes at both ends of D = 64. S4, S5: paired over 4 texts.
- S5 asks whether they are equal within 0.01; "worse" there: not equal, and the interval is above 0.
"""
EXPLORATORY = """## Every point (exploratory)

Difference of held-out bits per byte from h = 16 on N h = D, paired by text and seed, at equal FLOPs
per token. Not corrected for the number of comparisons. "inconclusive": the interval contains 0.
"""
REPEATED = """## D = 96 without the texts that are read 4 to 5 times

The plan asks for D = 96 without `multi30k_de` and `web` beside the whole: the differences from 6x16
over the other six texts.
"""
LIMITS = """## Limits

- Models of 42,496 to 521,344 parameters on bytes, 4 layers, T = 128, 20 bytes per parameter, one
  optimizer (Muon, by the rule of stage 0). Nothing here is measured at the sizes of language models
  in use.
- Equal FLOPs are equal parameters on N h = D only; elsewhere parameters differ by up to 28 % at
  D = 32, 15 % at D = 64 and 11 % at D = 96.
- At D = 32 a table of 5-grams counted on the same bytes predicts better than every model, on all
  eight texts; at D = 64 and 96 on none. So D = 32 shows models that have not learnt what the table
  knows.
- Learning rates were tuned on 2 texts at D = 32 and 1 at D = 64; a formula gives the others. It
  leaves a standard deviation of {residual:.3f} in ln r, and an error of that size costs {cost:.4f}
  bits. By the coefficient `tuning` the rates of all points were off by {off:+.2f} in ln r on
  average, which costs {offcost:.4f} bits.
- The intervals do not include the error of k. In 500 simulated studies
  (`tests/lab/test_study_simulations.py`) the intervals of S1 to S5 cover 94 to 98 %; those of P1 98
  to 100 %, since they are not narrower than the pooled one. False positives: P1 1.2 % over both
  looks, S1 to S5 at most 0.8 %.
- The mixed model assumes a parabola in log2 h that is the same in every text except for its slope;
  the paired t-test does not. N h / D has only three levels, so its parabola cannot be tested; the
  interval of the best N h holds if the model does.
- The interval of S3 covers 97.4 % in 500 simulated studies (standard error 0.7 %), since t with
  texts - 1 degrees of freedom is wide for a term without random slopes of texts. The plan keeps it.
- 16x2 at D = 32 has its best rate on `tatoeba_fr` beyond the end of the grid, so its loss may be
  too high. Of the results at D = 64 only those of the registered model depend on it.
- The two Tatoeba texts are translations of each other: see the column with both as one text.
  `multi30k_de` and `web` are read 2 times at D = 64 and 4 to 5 times at D = 96.
- Baselines of 1, 3, 4 and 5 bytes (n-gram order) and gzip were recorded, a 2-gram was not.
"""
FITS = """## The best head by other fits (exploratory)

The registered model has one parabola in log2 h for all D. It fits badly: h = 2 at D = 32 costs much
more than a parabola allows, which bends the fit at D = 64 too. The large residual also hides the
variation over texts (standard deviations of B1, C1 and seed below). The table has the same model on
fewer rows.
"""
OPTIMIZERS = """## The cost of one wide head by optimizer (stage 0, exploratory)

Bits by which the best learning rate of 1x64 is worse than that of 4x16, D = 64: validation part,
one seed a text, minimum of a parabola in ln r.
"""
CHANGE = "## What would change the conclusion"
PROVISIONAL = """† Compute multiples from the loss at D = 32 and 64 alone. The plan takes the slope
from D = 32, 64 and 96; the loss falls more slowly at larger D, where the same bits are worth more
compute.
"""
AGAIN = """## The main numbers again, with numpy alone

Run this in the folder of `runs.csv`. It prints the difference of every point of D = 64 from 4 heads
of 16 (2x32 is P1), and those of S2, S4 and S5: mean, standard error, number of texts. Then it
prints the best head_dim and N h / D of the fit "D = 64 alone".
"""


def page(rows: Sequence[Row], study: Study, drawn: Sequence[str]) -> str:
    """The Markdown page."""
    fitted = fits(study)
    lines = [
        "# Head-width study: analysis", "",
        *_answer(study), "**" + _headline(study) + "**", "", LETTERS, *_reading(study, fitted),
        "## The sentence of the plan", "",
        "The sentence of [the plan](plan.md) with its blanks filled. Each number has its 95 % "
        "interval and its number of texts and seeds.", "",
        *table(("blank", "value"), zip(BLANKS, blanks(study), strict=False)),
        f"> {sentence(study)}", "",
        "## What is missing", "", _missing(study), "", RULES,
        *table(HEADER, result_rows(primary(study) + secondary(study))),
    ]  # fmt: skip
    for name, caption in CAPTIONS.items():
        shown = f"![{caption.split('**')[1]}]({name}.svg)"
        lines += [shown if name in drawn else f"({name}: {NOT_YET})", "", caption, ""]
    lines += [EXPLORATORY, *_point_tables(study)]
    lines += [REPEATED, *_repeated_table(study)]
    lines += ["## Baselines", "", *_baselines(study)]
    lines += ["## Every plan of sharing", "", *_sharing_table(study)]
    lines += ["## Training length and context (stage 6)", "", *_length_tables(study)]
    lines += [OPTIMIZERS, *_optimizer_table(rows)]
    if study.model is not None:
        lines += [FITS, *_fit_table(study, fitted)]
        lines += ["## Coefficients of the mixed model", "", *_model_table(study), _limits(study)]
        lines += [CHANGE, "", *_changes(study), ""]
    lines += [AGAIN, "```python", CHECK.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _answer(study: Study) -> list[str]:
    """The first paragraph: the best width measured, for a reader who knows no letters yet."""
    best: dict[int, list[str]] = {}
    for width in (w for w, stage in STAGE_OF_WIDTH.items() if study.complete(stage)):
        mean = {h: float(np.mean(_text_means(study, study.point(n, h, width=width))))
                for n, h in design.POINTS[width] if n * h == width}  # fmt: skip
        best.setdefault(min(mean, key=mean.__getitem__), []).append(str(width))
    if not best:
        return []
    said = "; ".join(
        f"heads of {h} have the lowest loss in models {', '.join(widths)} wide"
        for h, widths in best.items()
    )
    return [
        "**How wide should a head be? Of the widths tried for heads that together fill the model, "
        f"{said}.** What the others cost: [every point](#every-point-exploratory). What shared "
        "layers cost: [every plan of sharing](#every-plan-of-sharing).",
        "",
    ]


def _reading(study: Study, found: Sequence[Fit]) -> list[str]:
    """What the numbers say, in bullets. Empty where there is no model."""
    if not found:
        return []
    marked = study.slope is not None and len(study.slope_widths) < len(STAGE_OF_WIDTH)
    lines = [PROVISIONAL] if marked else []
    values = [2**one.optimum.best.value for one in found]
    if len(found) > 2:
        alone = next(one for one in found if one.name == "D = 64 alone")
        bad = found[0].residual_sd > 2 * alone.residual_sd
        lines.append(
            f"- From D = 64 alone the best head_dim is {_best(alone)} and the best N h "
            f"{_best_share(alone)} D (exploratory). The sentence of the plan takes the registered "
            "model of all complete stages"
            + (", which fits badly" if bad else "")
            + f": its residual is {found[0].residual_sd:.4f} bits, that of D = 64 alone "
            f"{alone.residual_sd:.4f}. By [other fits](#the-best-head-by-other-fits-exploratory) "
            f"the best head_dim is {min(values):.1f} to {max(values):.1f}."
        )
    lines += _growth(found)
    for total, point in (("D/2", (2, 16)), ("3D/2", (6, 16))):
        difference = analysis.over_texts(
            against(study, 64, *point, "standard"),
            analysis.pool(list(from_reference(study).values())),
        )
        lines.append(
            f"- D = 64, heads of 16: N h = {total} against D costs {ends(difference)} bits at "
            f"equal FLOPs: {reading(difference)}."
        )
    return [*lines, ""]


def _growth(found: Sequence[Fit]) -> list[str]:
    """Does the best head_dim grow with D? The registered slope beside one fit per D."""
    alone = [f for f in found if f.name in {f"D = {w} alone" for w in STAGE_OF_WIDTH}]
    slope = found[0].optimum.slope
    if len(alone) < len(STAGE_OF_WIDTH):
        return []
    bests = [fit.optimum.best.value for fit in alone]
    agree = (bests[-1] - bests[0]) * slope.value > 0
    each = ", ".join(f"{2**best:.1f}" for best in bests)
    return [
        "- Does the best head_dim grow with D? The registered model says that it changes by a "
        f"factor of {power(slope, 2)} per doubling of D (S3; a factor of 1 is a fixed head_dim, 2 "
        f"a fixed number of heads). Fitted to each D alone it is {each} at "
        f"D = {', '.join(map(str, STAGE_OF_WIDTH))} (exploratory). "
        + ("" if agree else "The signs contradict each other, so its direction is not settled. ")
        + "Models of D = 256: [gpu.md](gpu.md)."
    ]


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


def _fit_table(study: Study, found: Sequence[Fit]) -> list[str]:
    header = ("rows", "h\\*", "best N h / D", "slope of log2 h\\* on log2 D", "residual sd, bits")
    lines = []
    for one in found:
        slope = one.optimum.slope
        trend = "–"
        if math.isfinite(slope.value):
            trend = ends(slope, 2) if study.complete(2, 3, 4) else NOT_YET
        lines.append([one.name, _best(one), _best_share(one), trend, f"{one.residual_sd:.4f}"])
    return table(header, lines)


def _optimizer_table(rows: Sequence[Row]) -> list[str]:
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


def _changes(study: Study) -> list[str]:
    """What would change the conclusion, with what is known of each."""
    lines = [
        "- Other texts: the intervals are over 8 texts, five of them English, one French, one "
        "German and one Python code.",
        "- Another optimizer: only Muon was judged. What one wide head costs depends on the "
        "optimizer: see the table by optimizer.",
    ]
    if study.complete(3, 6):
        at = {}
        for each in (20.0, 80.0):
            points = [study.point(*p, bytes_per_parameter=each) for p in ((4, 16), (1, 64))]
            texts = np.isin(study.frame["text"], design.LENGTH_TEXTS)
            pairs = analysis.paired(study.frame, points[0] & texts, points[1] & texts)
            at[each] = ends(analysis.over_texts(pairs))
        lines.append(
            f"- Longer training: on 4 texts 1x64 is worse than 4x16 by {at[20.0]} bits at 20 bytes "
            f"per parameter (2 seeds), and by {at[80.0]} at 80 (1 seed). Beyond 80: not known."
        )
        lines.append(
            "- Another context: T = 64 and 256 were run on 2 texts with one seed, too few to tell."
        )
    else:
        lines.append(f"- Longer training or another context (stage 6): {NOT_YET}.")
    lines.append(
        "- Larger models: a slope of log2 h\\* on log2 D of 1 would mean a fixed number of heads, "
        "0 a fixed width. "
        + ("" if study.complete(4) else f"D = 96 (stage 4): {NOT_YET}. ")
        + "D = 256 was trained on a GPU, outside the registered stages: [gpu.md](gpu.md)."
    )
    return lines


def _text_means(study: Study, mask: Mask, column: str = "bits") -> list[float]:
    """Mean of a column on each text."""
    text, values = study.frame["text"][mask], study.frame[column][mask]
    return [float(values[text == one].mean()) for one in np.unique(text)]


def _headline(study: Study) -> str:
    results = primary(study)
    last = results[-1]
    if last.found is None:
        return f"P1: {NOT_YET}."
    if last.conclusion == "inconclusive":
        return f"P1 is inconclusive: loss(2x32) - loss(4x16) = {ends(last.found)} bits per byte."
    size = dataclasses.replace(last.found, value=abs(last.found.value))
    if last.found.value < 0:
        size = dataclasses.replace(size, low=-last.found.high, high=-last.found.low)
    worse = "worse" if last.found.value > 0 else "better"
    return (
        f"The registered comparison (P1): in models 64 wide, at equal FLOPs, 2 heads of 32 are "
        f"{worse} than 4 heads of 16 by {ends(size, 4, '')} bits per byte: {last.conclusion}."
    )


def _missing(study: Study) -> str:
    decided = any(look.conclusion != "inconclusive" for look in looks(study))
    left = [
        f"Stage {s} ({design.TITLES[s]}) lacks {n} runs"
        for s, n in study.left.items()
        if n and not (decided and s == 7)
    ]
    said = ". ".join(left) + f'. Their results say "{NOT_YET}".' if left else "Nothing."
    if decided and study.left[7]:
        said += " Stage 7 (the second look at P1) is not run, since the first look decided."
    return said


def reading(found: Estimate) -> str:
    """What an interval says: "inconclusive" where it holds 0."""
    if not found.low * found.high > 0:
        return "inconclusive"
    return "worse" if found.value > 0 else "better"


def _point_tables(study: Study) -> Iterator[str]:
    header = ("D", "point", "N h / D", "FFN width", "parameters", "bits", "difference (95 %)",
              "Tatoeba texts as one", "texts x seeds", "")  # fmt: skip
    lines = []
    for width, stage in STAGE_OF_WIDTH.items():
        if not study.complete(stage) or not study.frame:
            lines.append([str(width), *[NOT_YET] * 8, ""])
            continue
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
            if pairs is None:
                lines.append([*line, "reference", "", "", ""])
                continue
            found = analysis.over_texts(pairs, pooled)
            merged = ends(analysis.over_texts(analysis.merged(pairs)))
            lines.append([*line, ends(found), merged, _counts(pairs), reading(found)])
    yield from table(header, lines)


def _repeated_table(study: Study) -> list[str]:
    """Differences from 6x16 at D = 96 over the texts that are read less than four times."""
    points = [p for p in design.POINTS[96] if p != (6, 16)]
    many: dict[tuple[int, int], Pairs] = {}
    if study.complete(STAGE_OF_WIDTH[96]):
        for point in points:
            pairs = against(study, 96, *point, "standard")
            many[point] = {t: d for t, d in pairs.items() if t not in design.REPEATED_TEXTS}
    pooled = analysis.pool([pairs for (n, h), pairs in many.items() if n * h == 96])
    lines = []
    for n, h in points:
        if (n, h) not in many:
            lines.append([f"{n}x{h}", NOT_YET, "", ""])
            continue
        found = analysis.over_texts(many[n, h], pooled)
        lines.append([f"{n}x{h}", ends(found), _counts(many[n, h]), reading(found)])
    return table(("point", "difference (95 %)", "texts x seeds", ""), lines)


def against(study: Study, width: int, heads: int, head_dim: int, layout: str) -> Pairs:
    """Differences of a point from h = 16 on N h = D."""
    reference = study.point(width // 16, 16, width=width)
    point = study.point(heads, head_dim, width=width, layout=layout)
    return analysis.paired(study.frame, reference, point)


def _baselines(study: Study) -> list[str]:
    header = ("D", "text", *charts.BASELINES.values(), "model h = 16, N h = D")
    lines = []
    for width, stage in STAGE_OF_WIDTH.items():
        if not study.frame or not study.complete(stage):
            lines.append([str(width), *[NOT_YET] * (len(header) - 1)])
            continue
        mask = study.point(width // 16, 16, width=width)
        for text in design.ALL_TEXTS:
            of_text = mask & (study.frame["text"] == text)
            names = (*charts.BASELINES, "bits")
            means = [f"{study.frame[name][of_text].mean():.3f}" for name in names]
            lines.append([str(width), text, *means])
    return table(header, lines)


def _length_tables(study: Study) -> list[str]:
    """Differences from 4x16 at 80 bytes per parameter and at T = 64 and 256, beside those of
    stage 3 on the same texts."""
    if not study.complete(3, 6):
        return [f"{NOT_YET}: 80 bytes per parameter on 4 texts, T = 64 and 256 on 2 texts.", ""]
    settings: list[tuple[int, float, Sequence[str]]] = [
        (128, 20.0, design.LENGTH_TEXTS),
        (128, 80.0, design.LENGTH_TEXTS),
    ]
    settings += [(t, 20.0, design.CONTEXT_TEXTS) for t in (64, 128, 256)]
    lines = []
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
            lines.append([*cells, _counts(pairs), reading(found)])
    header = ("T", "bytes per parameter", "texts", "point", "bits worse than 4x16 (95 %)",
              "texts x seeds", "")  # fmt: skip
    return table(header, lines)


def _sharing_table(study: Study) -> list[str]:
    lines = []
    for budget in ("flops", "parameters"):
        if not study.complete(3, 5):
            lines += [[plan, budget, *[NOT_YET] * 3, ""] for plan in PLANS]
            continue
        for plan, found in sharing_costs(study, budget).items():
            counts = _counts(sharing(study, plan, budget))
            times = multiple(found, study) if budget == "flops" else "–"
            lines.append([plan, budget, ends(found), times, counts, reading(found)])
    header = ("plan", "equal", "bits worse than separate (95 %)", "compute multiple",
              "texts x seeds", "")  # fmt: skip
    return table(header, lines)


def _model_table(study: Study) -> list[str]:
    assert study.model is not None
    names = [name for name in study.model.names if not name.startswith("a[")]
    lines = [[name, ends(study.model.contrast({name: 1}))] for name in names]
    sds = zip(("B1 (u by text)", "C1 (v by text)", "seed"), study.model.component_sd, strict=True)
    lines += [[f"standard deviation of {n}", f"{sd:.4f}"] for n, sd in sds]
    lines += [
        ["standard deviation of e", f"{study.model.residual_sd:.4f}"],
        ["k (stage 1)", f"{study.tuning_k:.4f}"],
    ]
    return table(("term", "estimate (95 % interval)"), lines)


def _limits(study: Study) -> str:
    assert study.model is not None
    k, sd = study.tuning_k, study.rate_sd
    off = -study.model.contrast({"tuning": 1}).value / (2 * k)
    return LIMITS.format(residual=sd, cost=k * sd**2, off=off, offcost=k * off**2)


def write_analysis(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes analysis.md, analysis.csv and the figures that have their rows; removes the others.

    Creates the folder.
    """
    study = read_study(rows)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(study, rows)
    paths = []
    for name in CAPTIONS:
        path = folder / f"{name}.svg"
        path.unlink(missing_ok=True)
        if name in drawn:
            write_atomic(path, themed_svg(drawn[name], name).encode())
            paths.append(path)
    write_atomic(folder / "analysis.csv", _csv(primary(study) + secondary(study)).encode())
    write_atomic(folder / "analysis.md", page(rows, study, list(drawn)).encode())
    return [folder / "analysis.md", folder / "analysis.csv", *paths]


def _csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "what", "value", "error", "low", "high", "texts", "p", "conclusion"))
    for r in results:
        f = r.found
        numbers = (f.value, f.error, f.low, f.high, f.count, r.corrected) if f else ("",) * 6
        writer.writerow((r.name, r.text, *numbers, r.conclusion))
    return text.getvalue()
