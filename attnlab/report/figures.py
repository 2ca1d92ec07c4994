"""The figures of a report."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnlab.lab.results import label_of
from attnlab.lab.stats import Variant, text_difference
from attnlab.report.page import Figure, draw
from attnlab.report.panel import Panel
from attnlab.report.style import (
    FONT_SIZE,
    FOREGROUND,
    SIZE,
    Style,
    add_legend,
    new_figure,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

INK = style(0, 0, FOREGROUND)
LINE = 26
"""Letters of a label before it breaks."""
MOST_ROWS = 12
"""Of a figure of differences that has single comparisons beside averages."""


class Row(NamedTuple):
    """A value with its interval; NaN: no interval."""

    label: str
    style: Style
    value: float
    low: float
    high: float


def by_unit(panels: Sequence[Panel]) -> list[list[Panel]]:
    """The panels whose scores may stand on one axis, together."""
    found: dict[tuple[str, int], list[Panel]] = {}
    for panel in panels:
        found.setdefault((panel.metric.unit, panel.sign), []).append(panel)
    return list(found.values())


def differences_figure(panels: Sequence[Panel], name: str = "differences") -> list[Figure]:
    """Mean differences with their intervals, of panels with one unit: averages first."""
    rows, first = [], panels[0]
    frames = [panel.comparisons for panel in panels]
    averaged = any((frame.over != "").any() for frame in frames)
    if averaged and sum(map(len, frames)) > MOST_ROWS:
        frames = [frame[frame.over != ""] for frame in frames]
    baselines = {base for frame in frames for base in frame[frame.over == ""]["baseline"]}
    several = len(baselines) > 1 or len(panels) > 1
    for panel, frame in zip(panels, frames, strict=True):
        title = f"{panel.title}: " if panel.title else ""
        for c in frame.itertuples():
            if not np.isfinite(c.high):
                continue
            label = f"{title}{c.variant}"
            if c.over or several:
                label += f" − {c.baseline}{' (mean)' if c.over else ''}"
            look = INK if c.over else panel.styles[c.variant]
            rows.append(Row(fill(label, LINE), look, c.difference, c.low, c.high))
    if not rows:
        return []
    than = "" if several or not baselines else f" minus {next(iter(baselines))}"
    better = "left" if first.sign > 0 else "right"
    label = fill(f"{first.metric.unit}{than}", 44) + f"\n({better} of 0 is better)"
    averages = " (mean): averaged over the other choices." if averaged else ""
    caption = (
        "Mean paired difference and its 95 % interval, before Holm's correction. An interval that "
        f"includes zero is inconclusive.{averages}"
    )
    figure = interval_plot(rows, label)
    figure.axes[0].axvline(0, color=FOREGROUND, linewidth=1)
    return [draw(figure, name, "Differences between variants with their intervals", caption)]


def scores_figure(panel: Panel, name: str = "scores") -> list[Figure]:
    """Mean of each variant with its interval; none of a single variant."""
    rows = []
    for variant, scores in panel.scores.items():
        d = text_difference(list(scores.values()), [text for text, _ in scores])
        label = panel.results.labels[variant]
        rows.append(Row(fill(label, LINE), panel.styles[label], d.mean, d.low, d.high))
    if len(rows) < 2:
        return []
    figure = interval_plot(rows, f"held-out {panel.metric.unit}", panel.metric.digits)
    caption = "Mean held-out score and its 95 % interval, of the variant alone."
    return [draw(figure, name, panel.named("Held-out scores"), caption)]


def interval_plot(rows: Sequence[Row], xlabel: str, digits: int | None = None) -> "Drawing":
    """Values with their intervals, the first row on top; with `digits` the value beside each."""
    lines = sum(max(1.6, row.label.count("\n") + 1) for row in rows)
    figure, [[axes]] = new_figure(SIZE[0], max(1.9, 0.9 + 0.24 * lines))
    for y, row in enumerate(rows):
        axes.plot([row.low, row.high], [y, y], color=row.style["color"], linewidth=1.6)
        axes.plot(row.value, y, **row.style | {"linestyle": "none"}, markersize=7.0)
        if digits is not None:
            end = row.high if np.isfinite(row.high) else row.value
            axes.annotate(
                f"{row.value:.{digits}f}", (end, y), (6, 0), textcoords="offset points",
                va="center", fontsize=FONT_SIZE, color=FOREGROUND,
            )  # fmt: skip
            axes.margins(x=0.25)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(row.style["color"])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=xlabel)
    return figure


def over_tag_figures(panel: Panel, name: str = "over") -> list[Figure]:
    """The score over each tag with three or more numbers; a curve for each value of the others."""
    found = []
    for tag in dict.fromkeys(n for variant in panel.scores for n, _ in variant):
        values = {dict(variant).get(tag) for variant in panel.scores}
        numbers = [float(v) for v in values if isinstance(v, int | float) and v is not True]
        if len(numbers) < 3 or len(numbers) < len(values) or min(numbers) <= 0:
            continue
        series: dict[Variant, dict[float, list[float]]] = {}
        for variant, scores in panel.scores.items():
            rest = tuple(pair for pair in variant if pair[0] != tag)
            series.setdefault(rest, {})[float(dict(variant)[tag] or 0)] = list(scores.values())
        words = tag.rpartition(".")[2].replace("_", " ")
        figure = _over(series, words, f"held-out {panel.metric.unit}")
        title = f"Held-out score over {words}"
        caption = f"{title}. Mean over runs; bars: lowest to highest."
        found.append(draw(figure, f"{name}-{tag}", title, caption))
    return found


def _over(series: dict[Variant, dict[float, list[float]]], xlabel: str, ylabel: str) -> "Drawing":
    figure, [[axes]] = new_figure(*SIZE)
    for i, (rest, points) in enumerate(series.items()):
        at = sorted(points)
        mean = np.array([np.mean(points[x]) for x in at])
        # Rounded, the mean of equal values may lie beside them.
        low = np.maximum(mean - [min(points[x]) for x in at], 0)
        high = np.maximum([max(points[x]) for x in at] - mean, 0)
        options = style(i, i) | {"markersize": 6.0, "linewidth": 1.6, "capsize": 2.5}
        axes.errorbar(at, mean, yerr=[low, high], label=label_of(rest), **options)
    axes.set_xscale("log")
    ticks = sorted({x for points in series.values() for x in points})
    axes.set_xticks(ticks, [f"{tick:.10g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if len(series) > 1:
        add_legend(figure)
    return figure


def curves_figures(panel: Panel, name: str = "curves") -> list[Figure]:
    """Learning curves, one figure for each text."""
    found = []
    texts = panel.results.texts
    for number, text in enumerate(texts, start=1):
        curves = [c for variant in panel.results.variants if (c := _curve(panel, variant, text))]
        if not curves:
            continue
        run = next(run for run in panel.results if panel.results.text_of(run) == text)
        windows, part = run.spec.config.train.evaluation.curve_windows, run.task.curves
        figure = learning_curves(curves, f"{part} {panel.metric.unit}")
        title = f"Text {number} of {len(texts)}: mean" if len(texts) > 1 else "Mean"
        caption = (
            f"{title} over seeds; band: lowest to highest. Every point, the last one too, is of "
            f"the same {windows:,} {part} rows; tables have the score on all. The first quarter "
            "may begin outside of the figure."
        )
        end = f"-{number}" if len(texts) > 1 else ""
        found.append(draw(figure, f"{name}{end}", panel.named("Learning curves"), caption))
    return found


class Curve(NamedTuple):
    """A metric at steps [P], one row of `values` [S, P] per seed. A diverged one does not set the
    range of the y axis."""

    label: str
    style: Style
    steps: np.ndarray
    values: np.ndarray
    diverged: bool


def _curve(panel: Panel, variant: Variant, text: str) -> Curve | None:
    """Of the seeds of a variant, at the steps that all have."""
    runs = [run for run in panel.results.variants[variant] if panel.results.text_of(run) == text]
    complete = [run for run in runs if run.status == "complete"]
    metric = f"eval/{panel.metric.name}"
    every = [curve for run in complete or runs if (curve := panel.curve(run, metric))]
    steps = sorted(set.intersection(*(set(curve) for curve in every))) if every else []
    values = np.array([[curve[step] for step in steps] for curve in every], float)
    if not steps or not np.isfinite(values).all():
        return None
    label = panel.results.labels[variant]
    shown = label + ("" if complete else " (diverged)")
    return Curve(shown, panel.styles[label], np.array(steps), values, not complete)


def learning_curves(series: Sequence[Curve], ylabel: str) -> "Drawing":
    """The mean over seeds as a line and the range over seeds as a band.

    The y axis shows the range of the last three quarters, since the initial drop would flatten the
    rest.
    """
    figure, [[axes]] = new_figure(*SIZE)
    for curve in series:
        band = curve.values.min(0), curve.values.max(0)
        axes.fill_between(curve.steps, *band, color=curve.style["color"], alpha=0.18, linewidth=0)
        options = curve.style | {"markersize": 4.0, "linewidth": 1.6}
        axes.plot(curve.steps, curve.values.mean(0), label=curve.label, **options)
    _set_limits(axes, series)
    axes.set(xlabel="training step", ylabel=ylabel)
    axes.locator_params(axis="x", nbins=6, integer=True)
    add_legend(figure)
    return figure


def _set_limits(axes: "Axes", series: Sequence[Curve]) -> None:
    kept = [c for c in series if not c.diverged] or series
    last = max(int(c.steps[-1]) for c in series)
    late = [c.values[:, c.steps >= min(last / 4, c.steps[-1])].ravel() for c in kept]
    values = np.concatenate(late)
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(right=last)
