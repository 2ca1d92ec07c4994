"""The figures of a report."""

import math
from collections.abc import Sequence
from textwrap import fill

import numpy as np

from attnlab.lab.result import RunResult
from attnlab.lab.results import label_of
from attnlab.lab.stats import Comparison, Variant, best_rate, text_difference
from attnlab.report.curves import fitted_curves, learning_curves, metric_curves
from attnlab.report.intervals import bar_plot, dot_plot, interval_plot
from attnlab.report.page import Figure, draw
from attnlab.report.panel import Panel, mean_of, spread_of
from attnlab.report.scatter import scatter, scatter_with_front
from attnlab.report.style import FOREGROUND, MARKERS, Bar, Curve, Interval, Point, Style, style

_INK = style(0, 0)._replace(colour=FOREGROUND)
PASSES = 3
"""A training step in forward passes: one forward, and a backward pass of two."""
MOST_LABELS = 8
"""Points of a scatter plot that are all labelled."""
LINE = 26
"""Letters of a label before it breaks."""


def training_flops(run: RunResult) -> float:
    """FLOPs of the training of a run: of a token x tokens x `PASSES`. Optimizer and evaluation are
    not counted."""
    train = run.spec.config.train
    return float(PASSES * run.sizes.flops_per_token * train.steps * train.batch_size * train.length)


def by_unit(panels: Sequence[Panel]) -> list[list[Panel]]:
    """The panels whose scores may stand on one axis, together."""
    found: dict[tuple[str, int], list[Panel]] = {}
    for panel in panels:
        found.setdefault((panel.metric.unit, panel.sign), []).append(panel)
    return list(found.values())


def effects_figure(panels: Sequence[Panel], name: str = "differences") -> list[Figure]:
    """Mean differences with their intervals, of panels with one unit: averaged effects first, then
    comparisons."""
    rows = []
    for panel in panels:
        title = f"{panel.title}: " if panel.title else ""
        for effect in panel.effects:
            c = effect.comparison
            label = f"{title}{c.variant[0][1]} − {c.baseline[0][1]} (mean)"
            rows.append(_interval(c, label, _INK))
        several = len({c.baseline for c in panel.comparisons}) > 1 or len(panels) > 1
        for c in panel.comparisons:
            label = panel.labels[c.variant]
            label = f"{title}{label} − {panel.labels[c.baseline]}" if several else label
            rows.append(_interval(c, label, panel.styles[c.variant]))
    drawn = [row for row in rows if row]
    if not drawn:
        return []
    first = panels[0]
    same = {c.baseline for p in panels for c in p.comparisons}
    than = f" less {first.labels[next(iter(same))]}" if len(same) == len(panels) == 1 else ""
    better = "left" if first.sign > 0 else "right"
    label = fill(f"{first.metric.unit}{than}", 44) + f"\n({better} of 0 is better)"
    averaged = " Mean: over the other tags." if any(p.effects for p in panels) else ""
    return [
        draw(
            interval_plot(drawn, label),
            name,
            "Differences between variants with their intervals",
            "Mean paired difference and its 95 % interval, before Holm's correction. An interval "
            f"that includes zero is inconclusive.{averaged}",
        )
    ]


def _interval(c: Comparison, label: str, style: Style) -> Interval | None:
    d = c.difference
    if not math.isfinite(d.high):
        return None
    return Interval(fill(label, LINE), style, d.mean, d.low, d.high)


def scores_figure(panel: Panel, name: str) -> list[Figure]:
    """Mean of each variant with its interval, and the baselines without a model."""
    if len(panel.scores) < 2:
        return []
    rows = []
    for variant, scores in panel.scores.items():
        d = text_difference(list(scores.values()), [text for text, _ in scores])
        half = float(np.nan_to_num(d.high - d.mean))
        label = fill(panel.labels[variant], LINE)
        rows.append(Bar(label, panel.styles[variant], d.mean, half))
    over = "texts and seeds" if len(panel.results.texts) > 1 else "seeds"
    caption = f"Mean held-out score and its 95 % interval over {over}, of the variant alone."
    label = f"held-out {panel.metric.unit}"
    if panel.sign < 0:  # shares of 100 %: bars from zero, beside the baselines
        baselines = dict(panel.results[0].scores.baselines.get(panel.metric.name, {}))
        figure = bar_plot(rows, baselines, label)
        caption += " Dashed: baselines without a model." if baselines else ""
    else:
        figure = dot_plot(rows, label, panel.metric.digits)
    return [draw(figure, name, panel.named("Held-out scores"), caption)]


def over_tag_figures(panel: Panel, name: str) -> list[Figure]:
    """The score over each tag with three or more numbers; a curve for each value of the others."""
    found = []
    for tag in dict.fromkeys(n for variant in panel.scores for n, _ in variant):
        values = {dict(variant).get(tag) for variant in panel.scores}
        numbers = [float(v) for v in values if isinstance(v, int | float) and v is not True]
        if len(numbers) < 3 or len(numbers) < len(values) or min(numbers) <= 0:
            continue
        series: dict[Variant, dict[float, Variant]] = {}
        for variant in panel.scores:
            rest = tuple(pair for pair in variant if pair[0] != tag)
            series.setdefault(rest, {})[float(dict(variant)[tag] or 0)] = variant
        curves = []
        for i, (rest, points) in enumerate(series.items()):
            at = sorted(points)
            keys = set.intersection(*(set(panel.scores[points[x]]) for x in at))
            scores = [[panel.scores[points[x]][key] for x in at] for key in sorted(keys)]
            if scores:
                label = fill(label_of(rest) if rest else panel.metric.unit, LINE)
                curves.append(Curve(label, style(i, i), np.array(at), np.array(scores)))
        if curves:
            words = tag.replace("_", " ")
            figure = metric_curves(curves, words, f"held-out {panel.metric.unit}")
            title, caption = f"Held-out score over {words}", "Mean over runs, lowest to highest."
            found.append(draw(figure, f"{name}-{tag}", title, f"{title}. {caption}"))
    return found


def curves_figures(panel: Panel, name: str) -> list[Figure]:
    """Learning curves, one figure for each text."""
    found = []
    texts = panel.results.texts
    for number, text in enumerate(texts):
        curves = [c for v in panel.variants if (c := _curve(panel, v, text))]
        if not curves:
            continue
        run = next(run for run in panel.results if panel.results.text_of(run) == text)
        windows = run.spec.config.train.evaluation.curve_windows
        part = run.task.curves
        figure = learning_curves(curves, f"{part} {panel.metric.unit}")
        title = f"text {number + 1} of {len(texts)}: " if len(texts) > 1 else ""
        caption = (
            f"{title}mean over seeds; band: lowest to highest. Every point, the last one too, is "
            f"of the same {windows:,} {part} rows; tables have the score on all. The first quarter "
            "may begin outside of the figure."
        )
        end = f"-{number + 1}" if len(texts) > 1 else ""
        alt = panel.named("Learning curves")
        found.append(draw(figure, f"{name}{end}", alt, caption[0].upper() + caption[1:]))
    return found


def _curve(panel: Panel, variant: Variant, text: str) -> Curve | None:
    """Of the seeds of a variant, at the steps that all have."""
    runs = [run for run in panel.variants[variant] if panel.results.text_of(run) == text]
    complete = [run for run in runs if run.status == "complete"]
    metric = f"eval/{panel.metric.name}"
    every = [curve for run in complete or runs if (curve := panel.curve(run, metric))]
    if not every:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in every)))
    values = np.array([[curve[step] for step in steps] for curve in every], float)
    if not steps or not np.isfinite(values).all():
        return None
    label = panel.labels[variant] + ("" if complete else " (diverged)")
    return Curve(fill(label, LINE), panel.styles[variant], np.array(steps), values, not complete)


COSTS = (
    ("parameters", "parameters", lambda run: float(run.sizes.parameters)),
    ("flops", "training FLOPs of a run", training_flops),
    ("seconds", "seconds of a run", lambda run: float(run.timing.seconds)),
)


def budget_figures(panels: Sequence[Panel], end: str) -> list[Figure]:
    """Scores against parameters, training FLOPs and seconds, where these differ, of panels with one
    unit; `end` ends their names."""
    if sum(len(panel.scores) for panel in panels) < 2:
        return []
    figures = []
    for name, label, cost in COSTS:
        points, markers = [], MARKERS
        for i, panel in enumerate(panels):
            for variant, scores in panel.scores.items():
                runs = [run for run in panel.variants[variant] if run.scores.heldout]
                x = float(np.mean([cost(run) for run in runs]))
                style = panel.styles[variant]
                if len(panels) > 1:
                    style = style._replace(marker=markers[i % len(markers)])
                text = fill(panel.named(panel.labels[variant]), LINE)
                points.append(Point(text, style, x, mean_of(scores), spread_of(scores) or 0.0))
        xs = [point.x for point in points]
        if min(xs) > 0 and max(xs) / min(xs) > 1.02:
            figures.append(_scatter(points, panels[0], f"{name}{end}", label))
    return figures


def _scatter(points: list[Point], panel: Panel, name: str, label: str) -> Figure:
    title, ylabel = f"Held-out score against {label}", f"held-out {panel.metric.unit}"
    caption = f"{title}. Bars: standard deviation over runs."
    if len(points) <= MOST_LABELS:
        figure = scatter(points, label, ylabel)
    else:
        best = [points[i] for i in front([p.x for p in points], [panel.sign * p.y for p in points])]
        figure = scatter_with_front(points, best, [], label, ylabel)
        caption += " The dotted line joins what nothing of lower cost is better than."
    return draw(figure, f"score-{name}", title, caption)


def front(costs: Sequence[float], ranks: Sequence[float]) -> list[int]:
    """Indices of those that nothing as cheap is better than, the cheapest first; less is better.

    >>> front([1, 2, 2, 3, 4], [9, 8, 7, 7, 1])
    [0, 2, 4]
    """
    found: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], ranks[i])):
        if not found or ranks[i] < ranks[found[-1]]:
            found.append(i)
    return found


def rates_figure(
    tried: dict[str, tuple[Style, dict[float, float]]], unit: str, sign: int, name: str
) -> Figure:
    """Validation scores over the learning rate, with the parabolas; scores are times `sign`."""
    points, fitted = [], []
    for label, (look, scores) in tried.items():
        rates = np.array([rate for rate in sorted(scores) if math.isfinite(scores[rate])])
        if not len(rates):
            continue
        values = sign * np.array([[scores[rate] for rate in rates]])
        points.append(Curve(fill(label, LINE), look, rates, values))
        if best := best_rate(scores):
            near = np.geomspace(rates[0], rates[-1], 50)
            a, b, c = best.coefficients
            parabola = sign * (a + b * np.log(near) + c * np.log(near) ** 2)[None]
            fitted.append(Curve(label, look, near, parabola))
    figure = fitted_curves(points, fitted, "learning rate", f"validation {unit}")
    caption = (
        "Validation score over the learning rate, and the parabola through the best and its "
        "neighbours, in the logarithm of the rate."
    )
    return draw(figure, name, "Validation score over the learning rate", caption)
