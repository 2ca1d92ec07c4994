"""The figures of a report."""

import re
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnlab.lab.results import label_of
from attnlab.lab.stats import VariantKey
from attnlab.report.page import Figure, draw
from attnlab.report.panel import Panel
from attnlab.report.style import FOREGROUND, SIZE, Style, add_legend, literal, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

INK = style(0, 0, FOREGROUND)
LINE = 26
"""Letters of a label before it breaks."""
MOST_ROWS = 12
"""Of a figure of differences that has single comparisons beside averages."""


def differences_figure(panel: Panel, name: str = "differences") -> list[Figure]:
    """Mean differences with their intervals, averages first; none without comparisons."""
    frame = panel.comparisons
    averages = frame[frame.over != ""]
    if len(averages) and len(frame) > MOST_ROWS:
        frame = averages
    baselines = list(dict.fromkeys(frame[frame.over == ""]["baseline"]))
    if not len(frame):
        return []
    figure, [[axes]] = new_figure(SIZE[0], SIZE[1])
    labels = []
    for y, row in enumerate(frame.itertuples()):
        label = row.variant
        if row.over or len(baselines) > 1:
            label += f" − {row.baseline}{' (mean)' if row.over else ''}"
        labels.append(literal(fill(label, LINE)))
        look = INK if row.over else panel.styles[row.variant]
        if np.isfinite(row.high):
            axes.plot([row.low, row.high], [y, y], color=look["color"], linewidth=1.6)
        axes.plot(row.difference, y, **look | {"linestyle": "none"}, markersize=7.0)
    lines = sum(max(1.6, label.count("\n") + 1) for label in labels)
    figure.set_figheight(max(1.9, 0.9 + 0.24 * lines))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.axvline(0, color=FOREGROUND, linewidth=1)
    than = f" minus {baselines[0]}" if len(baselines) == 1 else ""
    better = "left" if panel.sign > 0 else "right"
    unit = literal(fill(f"{panel.metric.unit}{than}", 44))
    axes.set_xlabel(f"{unit}\n({better} of 0 is better)")
    of = f"{panel.title}. " if panel.title else ""
    caption = (
        f"{of}Mean paired difference and its 95 % interval, before Holm's correction. An interval "
        "that includes zero says neither better nor worse."
        f"{' (mean): averaged over the other choices.' if len(averages) else ''}"
    )
    alt = panel.named("Differences between variants with their intervals")
    return [draw(figure, name, alt, caption)]


class Curve(NamedTuple):
    """The numbers of several runs at each x. The curve of runs that diverged does not set the range
    of the y axis."""

    label: str
    style: Style
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    diverged: bool = False


def curves_plot(curves: Sequence[Curve], xlabel: str, ylabel: str) -> "Drawing":
    """The mean over runs as a line, the lowest and the highest as a band."""
    figure, [[axes]] = new_figure(*SIZE)
    for curve in curves:
        low, mean, high = ([f(v) for v in curve.values] for f in (np.min, np.mean, np.max))
        axes.fill_between(curve.x, low, high, color=curve.style["color"], alpha=0.18, linewidth=0)
        options = curve.style | {"markersize": 4.0, "linewidth": 1.6}
        axes.plot(curve.x, mean, label=literal(curve.label), **options)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    add_legend(figure)
    return figure


def over_tag_figures(panel: Panel, name: str = "over") -> list[Figure]:
    """The score over each tag with three or more numbers; a curve for each value of the others."""
    found = []
    for tag in dict.fromkeys(n for variant in panel.scores for n, _ in variant):
        values = {dict(variant).get(tag) for variant in panel.scores}
        numbers = sorted(float(v) for v in values if isinstance(v, int | float) and v is not True)
        if len(numbers) < 3 or len(numbers) < len(values) or numbers[0] <= 0:
            continue
        series: dict[VariantKey, dict[float, list[float]]] = {}
        for variant, scores in panel.scores.items():
            rest = tuple(pair for pair in variant if pair[0] != tag)
            series.setdefault(rest, {})[float(dict(variant)[tag] or 0)] = list(scores.values())
        curves = [
            Curve(label_of(rest), style(i, i), sorted(points), [points[x] for x in sorted(points)])
            for i, (rest, points) in enumerate(series.items())
        ]
        words = tag.rpartition(".")[2].replace("_", " ")
        figure = curves_plot(curves, words, f"held-out {panel.metric.unit}")
        axes = figure.axes[0]
        axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{tick:.10g}" for tick in numbers])
        axes.minorticks_off()
        title = f"Held-out score over {words}"
        caption = f"{title}. Mean over runs; band: lowest to highest."
        file = re.sub(r"[^\w.-]+", "_", f"{name}-{tag}")
        found.append(draw(figure, file, title, caption))
    return found


def curves_figures(panel: Panel, name: str = "curves") -> list[Figure]:
    """Learning curves, one figure for each text."""
    found, texts = [], panel.results.texts
    for number, text in enumerate(texts, start=1):
        every = (_curve(panel, variant, text) for variant in panel.results.variants)
        if not (curves := [curve for curve in every if curve]):
            continue
        run = next(run for run in panel.results if panel.results.text_of(run) == text)
        windows, part = run.spec.config.train.evaluation.curve_windows, run.task.curves
        title = f"Text {number} of {len(texts)}: mean" if len(texts) > 1 else "Mean"
        caption = (
            f"{title} over seeds; band: lowest to highest. Every point, the last one too, is of "
            f"the same rows: at most {windows:,} {part} rows. Scores in tables are of more, where "
            "there are more. The first quarter may begin outside of the figure."
        )
        figure = learning_curves(curves, f"{part} {panel.metric.unit}")
        end = f"-{number}" if len(texts) > 1 else ""
        found.append(draw(figure, f"{name}{end}", panel.named("Learning curves"), caption))
    return found


def _curve(panel: Panel, variant: VariantKey, text: str) -> Curve | None:
    """Of the seeds of a variant, at the steps that all have."""
    runs = [run for run in panel.results.variants[variant] if panel.results.text_of(run) == text]
    complete = [run for run in runs if run.status == "complete"]
    metric = f"eval/{panel.metric.name}"
    every = [curve for run in complete or runs if (curve := panel.curve(run, metric))]
    steps = sorted(set.intersection(*map(set, every))) if every else []
    values = [[curve[step] for curve in every] for step in steps]
    if not steps or not np.isfinite(values).all():
        return None
    label = panel.results.labels[variant]
    shown = label if complete else f"{label} (diverged)"
    return Curve(shown, panel.styles[label], steps, values, not complete)


def learning_curves(curves: Sequence[Curve], ylabel: str) -> "Drawing":
    """The y axis shows the range of the last three quarters, since the initial drop would flatten
    the rest."""
    figure = curves_plot(curves, "training step", ylabel)
    [axes] = figure.axes
    last = max(curve.x[-1] for curve in curves)
    kept = [curve for curve in curves if not curve.diverged] or curves
    late = [
        number
        for curve in kept
        for step, numbers in zip(curve.x, curve.values, strict=True)
        if step >= min(last / 4, curve.x[-1])
        for number in numbers
    ]
    margin = 0.06 * (max(late) - min(late)) or 0.1
    axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlim(right=last)
    axes.locator_params(axis="x", nbins=6, integer=True)
    return figure
