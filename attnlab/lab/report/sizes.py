"""Models of several sizes: power laws of the loss, and what each variant is worth."""

import math
from collections.abc import Sequence

import numpy as np

from attnlab import plotting
from attnlab.extras import extra
from attnlab.lab.comparisons import Variant
from attnlab.lab.report.figures import training_flops
from attnlab.lab.report.page import Figure, Figures, Paragraph, Section, Table, draw, number
from attnlab.lab.report.panel import Panel
from attnlab.lab.statistics import Array, Gain, PowerLaw, compute_gain, power_law

with extra("lab"):
    import pandas


def sizes_section(panel: Panel) -> list[Section]:
    """Laws and gains of the variants that are complete at all sizes; empty for one size."""
    panels = panel.by_size()
    if len(panels) < 2:
        return []
    title = panel.named("Model sizes")
    if panel.sign < 0:
        text = "A power law describes a loss; here higher scores are better."
        return [Section(title, [Paragraph(text)])]
    at = [{_without(v, panel.about.size_tag): v for v in p.scores} for p in panels]
    whole = [v for v in at[0] if all(v in one for one in at)]
    base = _without(panels[0].baseline or (), panel.about.size_tag)
    if base not in whole:
        text = "The baseline is not complete at all sizes, so nothing is compared."
        return [Section(title, [Paragraph(text)])]
    order = [base, *(v for v in whole if v != base)]
    found = {v: _measured(panels, [one[v] for one in at]) for v in order}
    flops = {v: (x, losses) for v, (_, x, losses) in found.items()}
    names = {v: panels[0].labels[at[0][v]] for v in order}
    table = _table(panel, flops, found, names)
    text = (
        f"Every variant at {len(panels)} sizes. The gain of a variant is how many times its own "
        f"training FLOPs {names[base]} needs to be as good, by the law of that variant; above 1 "
        "the variant is better at equal FLOPs, if its interval leaves out 1 at the smallest and at "
        "the largest size. Laws: L = E + A x^-alpha by least squares over all seeds; intervals by "
        "profile likelihood. They cover variation over seeds, not that the law may be another one."
    )
    styles = {v: panels[0].styles[at[0][v]] for v in order}
    return [
        Section(title, [Paragraph(text), table, Figures([_figure(panel, found, names, styles)])])
    ]


def _without(variant: Variant, tag: str) -> Variant:
    return tuple((n, v) for n, v in variant if n != tag)


Measured = tuple[Array, Array, Array]
"""Parameters [K], training FLOPs [K], losses [K, S]."""


def _measured(panels: Sequence[Panel], variants: Sequence[Variant]) -> Measured:
    """Of the (text, seed) that all sizes have."""
    runs = [panel.variants[v][0] for panel, v in zip(panels, variants, strict=True)]
    scores = [panel.scores[v] for panel, v in zip(panels, variants, strict=True)]
    keys = sorted(set.intersection(*(set(some) for some in scores)))
    losses = np.array([[some[key] for key in keys] for some in scores], np.float64)
    parameters = np.array([run.sizes.parameters for run in runs], np.float64)
    return parameters, np.array([training_flops(run) for run in runs], np.float64), losses


def _table(
    panel: Panel,
    flops: dict[Variant, tuple[Array, Array]],
    found: dict[Variant, Measured],
    names: dict[Variant, str],
) -> Table:
    rows = []
    base, *_ = flops
    for variant, (x, losses) in flops.items():
        gains = [Gain(1.0, 1.0, 1.0)] * 2
        if variant != base:
            gains = [compute_gain(*flops[base], x[i], losses[i]) for i in (0, -1)]
        law = power_law(found[variant][0], losses)
        rows.append({
            "variant": names[variant],
            "gain at the smallest size": "baseline" if variant == base else _gain(gains[0]),
            "gain at the largest size": "baseline" if variant == base else _gain(gains[1]),
            "at equal FLOPs": "baseline" if variant == base else _conclusion(gains),
            "law over parameters": _law(law),
            "law over training FLOPs": _law(power_law(x, losses)),
        })  # fmt: skip
    caption = (
        "Gains and laws with 95 % intervals (of alpha in brackets). E is fitted from three sizes "
        "on, else 0."
    )
    return Table("sizes" + _end(panel), caption, pandas.DataFrame(rows, dtype=object))


def _end(panel: Panel) -> str:
    return f"-{panel.title}".replace(" ", "-") if panel.title else ""


def _conclusion(gains: Sequence[Gain]) -> str:
    if all(gain.low > 1 for gain in gains):
        return "better at both ends"
    return "worse at both ends" if all(gain.high < 1 for gain in gains) else "inconclusive"


def _gain(gain: Gain) -> str:
    if math.isnan(gain.low):
        return f"{gain.value:.2f} (no interval)"
    return f"{gain.value:.2f} ({gain.low:.2f} to {number(gain.high, 2)})"


def _law(law: PowerLaw) -> str:
    floor = f"{law.floor:.3g} + " if law.has_floor else ""
    ends = f"{law.low:.2g} to {number(law.high, 2)}" if law.low == law.low else "no interval"
    return f"{floor}{law.scale:.3g} x^−{law.exponent:.2g} ({ends})"


def _figure(
    panel: Panel,
    found: dict[Variant, Measured],
    names: dict[Variant, str],
    styles: dict[Variant, plotting.Style],
) -> Figure:
    measured: list[list[plotting.Curve]] = [[], []]
    fitted: list[list[plotting.Curve]] = [[], []]
    for variant, (parameters, flops, losses) in found.items():
        for i, x in enumerate((parameters, flops)):
            style, name = styles[variant], names[variant]
            measured[i].append(plotting.Curve(name, style, x, losses.T))
            along = np.geomspace(x.min(), x.max(), 50)
            line = power_law(x, losses).at(along)[None]
            fitted[i].append(plotting.Curve(name, style, along, line))
    labels = ["parameters", "training FLOPs of a run"]
    figure = plotting.scaling_curves(measured, fitted, labels, f"held-out {panel.metric.unit}")
    caption = (
        "Mean over seeds, lowest to highest; the lines are the laws of the table. Both axes are "
        "logarithmic."
    )
    return draw(figure, "sizes" + _end(panel), "Held-out score over model size", caption)
