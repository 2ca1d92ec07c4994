"""Curves: a metric over training steps, over a varied quantity, over model sizes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attnlab.report.labels import label_ends
from attnlab.report.style import FOREGROUND, SIZE, Curve, marker_options, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def learning_curves(series: Sequence[Curve], ylabel: str) -> "Figure":
    """The mean over seeds as a line and the range over seeds as a band.

    The y axis shows the range of the last three quarters, since the initial drop would flatten the
    rest.

    Args:
      series: curves, at least one; the rows of `values` are seeds.
      ylabel: the metric and its unit.

    >>> from attnlab.report.style import style
    >>> curve = Curve("a", style(0, 0), np.array([1, 2, 4]), np.array([[3.0, 2.0, 1.5]]))
    >>> learning_curves([curve], "loss").axes[0].get_ylabel()
    'loss'
    """
    # Many labels need a taller figure.
    figure, [[axes]] = new_figure(SIZE[0], _height(len(series)))
    for curve in series:
        mean, look = curve.values.mean(0), curve.style
        band = curve.values.min(0), curve.values.max(0)
        axes.fill_between(curve.steps, *band, color=look.colour, alpha=0.18, linewidth=0)
        axes.plot(
            curve.steps,
            mean,
            color=look.colour,
            linestyle=look.dashes,
            linewidth=1.6,
            **marker_options(look, 4.0),
        )
    kept = [c for c in series if not c.diverged] or series
    last = max(int(c.steps[-1]) for c in series)
    late = [c.values[:, c.steps >= min(last / 4, c.steps[-1])] for c in kept]
    values = np.concatenate([v.ravel() for v in late])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(right=last)
    axes.set(xlabel="training step", ylabel=ylabel)
    axes.locator_params(axis="x", nbins=6, integer=True)
    label_ends(axes, series)
    return figure


def metric_curves(series: Sequence[Curve], xlabel: str, ylabel: str) -> "Figure":
    """A metric over a quantity that was varied, on a logarithmic axis: mean and range over seeds.

    Args:
      series: curves, at least one; `steps` are the values of the quantity, above 0, and the rows of
        `values` are seeds.
      xlabel: the quantity.
      ylabel: the metric and its unit.

    >>> from attnlab.report.style import style
    >>> curve = Curve("a", style(0, 0), np.array([1, 2, 4]), np.array([[3.0, 2.0, 1.5]]))
    >>> metric_curves([curve], "length", "loss").axes[0].get_xlabel()
    'length'
    """
    figure, [[axes]] = new_figure(SIZE[0], _height(len(series)))
    for curve in series:
        _draw_range(axes, curve, linestyle=curve.style.dashes)
    axes.set_xscale("log")
    _tick_at_points(axes, series)
    axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, series)
    return figure


def ratio_curves(series: Sequence[Curve], xlabel: str, ylabel: str) -> "Figure":
    """Ratios of times over a size, with error bars. Both axes are logarithmic, with a line at 1.

    Args:
      series: curves, at least one; `values` are [3, P]: low end, ratio and high end.
      xlabel: the size.
      ylabel: which times.

    >>> from attnlab.report.style import style
    >>> times = np.array([[0.9, 0.8], [1.0, 0.9], [1.1, 1.0]])
    >>> curve = Curve("a", style(0, 0), np.array([1, 2]), times)
    >>> ratio_curves([curve], "length", "ratio").axes[0].get_ylabel()
    'ratio'
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, [[axes]] = new_figure(SIZE[0], _height(len(series)))
    axes.axhline(1.0, color=FOREGROUND, linewidth=1.0)
    for curve in series:
        (low, middle, high), look = curve.values, curve.style
        axes.errorbar(
            curve.steps, middle, yerr=[middle - low, high - middle], color=look.colour, capsize=2.5,
            linestyle=look.dashes, linewidth=1.6, **marker_options(look, 6.0),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    _tick_at_points(axes, series)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, 0.8), max(top, 1.25))
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, series)
    return figure


def fitted_curves(
    tried: Sequence[Curve], fitted: Sequence[Curve], xlabel: str, ylabel: str
) -> "Figure":
    """Measured points and fitted lines over a logarithmic quantity.

    Args:
      tried: measured points, at least one curve; the first row of `values` is drawn, and labelled.
      fitted: lines; the first row of `values` is drawn.
      xlabel: the quantity, above 0.
      ylabel: the metric and its unit.

    >>> from attnlab.report.style import style
    >>> curve = Curve("a", style(0, 0), np.array([1, 2, 4]), np.array([[3.0, 2.0, 1.5]]))
    >>> fitted_curves([curve], [curve], "rate", "loss").axes[0].get_xlabel()
    'rate'
    """
    figure, [[axes]] = new_figure(SIZE[0], _height(len(tried)))
    for curve in tried:
        axes.plot(
            curve.steps, curve.values[0], color=curve.style.colour, linestyle="none",
            **marker_options(curve.style, 5.0),
        )  # fmt: skip
    for curve in fitted:
        axes.plot(
            curve.steps, curve.values[0], color=curve.style.colour, linewidth=1.4,
            linestyle=curve.style.dashes,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    label_ends(axes, tried)
    return figure


def _height(num_labels: int) -> float:
    """Inches of a figure with so many labels at its right side."""
    return max(SIZE[1], 0.24 * num_labels)


def _tick_at_points(axes: "Axes", series: Sequence[Curve]) -> None:
    """Labels each x at which there is a point, whole or not."""
    ticks = sorted({float(x) for curve in series for x in curve.steps})
    axes.set_xticks(ticks, [f"{tick:.10g}" for tick in ticks])


def _draw_range(axes: "Axes", curve: Curve, *, linestyle: str) -> None:
    """Mean over seeds, with the range over seeds as error bars."""
    mean = curve.values.mean(0)
    # Rounded, the mean of equal values may lie beside them.
    ranges = [np.maximum(mean - curve.values.min(0), 0), np.maximum(curve.values.max(0) - mean, 0)]
    axes.errorbar(
        curve.steps, mean, yerr=ranges, color=curve.style.colour, capsize=2.5, linewidth=1.6,
        linestyle=linestyle, elinewidth=1.2 if linestyle == "none" else None,
        **marker_options(curve.style, 6.0),
    )  # fmt: skip
