"""The figures of a report: picks what is drawn and says what is seen."""

import math
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from attnlab import plotting
from attnlab.sharing.named_plans import PLANS
from experiments.reporting.document import Figure
from experiments.reporting.findings import heading
from experiments.reporting.pairs import compare
from experiments.reporting.results import Panel, Run, layout_number
from experiments.reporting.statistics import CONFIDENCE
from experiments.reporting.wording import listed, percent

if TYPE_CHECKING:
    import matplotlib.figure


def of_panel(panel: Panel, name: str) -> list[Figure]:
    """Curves, scores against two budgets, and every arm's distance from the best or the base."""
    title = heading(panel).lower()
    figures = _learning_curves(panel, name, title)
    if not panel.complete:
        return figures
    if len(panel.runs) > 1:
        figures += _against_budgets(panel, name, title)
    figures += _beside_yardsticks(panel, name, title) + _over_what_varies(panel, name, title)
    return figures + _distances(panel, name, title)


def _learning_curves(panel: Panel, name: str, title: str) -> list[Figure]:
    """The scores while training."""
    looks, curves = styles(panel), []
    for run in panel.arms:
        steps, values = run.curve()
        if len(steps):
            label = run.name if run.complete else f"{run.name} (diverged)"
            curves.append(plotting.Curve(label, looks[run.name], steps, values, not run.complete))
    if not curves:
        return []
    first = panel.runs[0]
    part = first.result.get("curves", "held-out")
    rows = first.record["config"]["train"]["curve_windows"]
    last = "the last point is the final score on all"
    if part == "validation":
        last = "the last point is on all; the held-out rows are scored once, at the end"
    return [
        drawn(
            f"{name}-curves",
            plotting.learning_curves(curves, f"{part} {panel.unit}"),
            f"Learning curves {title}",
            f"**{part.capitalize()} score while training, {title}.** Line: mean over seeds; "
            f"band: lowest to highest seed. On {rows:,} rows; {last}. The first quarter may "
            "begin outside the figure.",
        )
    ]


def _against_budgets(panel: Panel, name: str, title: str) -> list[Figure]:
    """Scores against what arms cost."""
    looks, figures = styles(panel), []
    for field, label in _budgets(panel.match):
        points = [
            plotting.Point(run.name, looks[run.name], run.result[field], run.score, run.spread)
            for run in panel.complete
        ]
        figures.append(
            drawn(
                f"{name}-{field.replace('_', '-')}",
                plotting.scatter(points, label, f"held-out {panel.unit}"),
                f"Held-out score against {label} {title}",
                f"**Held-out score against {label}, {title}.** Mean ± standard deviation over "
                "seeds.",
            )
        )
    return figures


def _distances(panel: Panel, name: str, title: str) -> list[Figure]:
    """Every arm's distance from the best or the base."""
    looks, rows = styles(panel), []
    one = panel.base or panel.complete[0]
    for pair in compare(panel):
        a, b, d = pair.a, pair.b, pair.difference
        if math.isinf(d.high):
            continue
        if b is one:  # the difference the other way round
            rows.append(plotting.Interval(a.name, looks[a.name], -d.mean, -d.high, -d.low))
        elif a is one:
            rows.append(plotting.Interval(b.name, looks[b.name], d.mean, d.low, d.high))
    if not rows:
        return []
    return [
        drawn(
            f"{name}-distance",
            plotting.interval_plot(rows, fill(f"{panel.unit} worse than {one.name}", 42)),
            f"Distance of every arm from {one.name} {title}",
            f"**How far each arm is from {one.name}, {title}.** Mean paired difference and "
            f"its {percent(CONFIDENCE)} interval before Holm's correction; a line that crosses "
            "zero: cannot tell.",
        )
    ]


def _beside_yardsticks(panel: Panel, name: str, title: str) -> list[Figure]:
    """Bars of a score that is better higher, where all arms have the same yardsticks."""
    first, looks = panel.complete[0], styles(panel)
    found = [run.yardsticks for run in panel.complete]
    if first.sign > 0 or not found[0] or any(one != found[0] for one in found):
        return []
    rows = [plotting.Bar(r.name, looks[r.name], r.score, r.spread) for r in panel.complete]
    told = listed([f"{n} {first.shown(v)}" for n, v in found[0].items()], "and")
    return [
        drawn(
            f"{name}-yardsticks",
            plotting.bar_plot(rows, found[0], f"held-out {panel.unit}"),
            f"Held-out score beside yardsticks {title}",
            f"**Held-out score beside what needs no model, {title}.** Mean ± standard deviation "
            f"over seeds; dashed: {told}.",
        )
    ]


def _over_what_varies(panel: Panel, name: str, title: str) -> list[Figure]:
    """The score over every number of `config.data` that the sweep varies: one series for each
    first word of the arms' titles."""
    figures, looks = [], styles(panel)
    data = [run.record["config"]["data"] for run in panel.complete]
    numbers = [
        f for f, v in data[0].items() if isinstance(v, int) and len({d[f] for d in data}) > 1
    ]
    for field in numbers:
        series: dict[str, dict[int, Run]] = {}
        for run, one in zip(panel.complete, data, strict=True):
            series.setdefault(run.name.split()[0], {})[one[field]] = run
        curves = [_curve(word, looks, runs) for word, runs in series.items()]
        most = max(series.values(), key=len)
        known = {n for run in most.values() for n in run.yardsticks}
        ink = plotting.style(0, 0)._replace(colour=plotting.FOREGROUND)
        yardsticks = [
            plotting.Curve(
                n, ink, np.array(sorted(most)),
                np.array([[most[x].yardsticks.get(n, np.nan) for x in sorted(most)]]), False,
            )
            for n in sorted(known)
        ]  # fmt: skip
        figures.append(
            drawn(
                f"{name}-{field}",
                plotting.metric_curves(curves, yardsticks, field, f"held-out {panel.unit}"),
                f"Held-out score over {field} {title}",
                f"**Held-out score over {field}, {title}.** Mean over seeds, lowest to highest; "
                "dotted: what needs no model.",
            )
        )
    return figures


def _curve(word: str, looks: dict[str, plotting.Style], runs: dict[int, Run]) -> plotting.Curve:
    at = sorted(runs)
    values = np.stack([runs[x].heldout for x in at], axis=1)
    return plotting.Curve(word, looks[runs[at[0]].name], np.array(at), values, False)


def _budgets(match: str) -> list[tuple[str, str]]:
    """The two budgets to draw losses against: not the one that is the same for every arm."""
    names = {
        "parameters": "unique parameters",
        "applied": "applied parameters",
        "flops": "FLOPs per token",
    }
    names.pop(match if match in names else "applied")
    return [(name.replace(" ", "_").lower(), name) for name in names.values()]


def drawn(
    name: str, figure: "matplotlib.figure.Figure", alt: str, caption: str, source: str = ""
) -> Figure:
    return Figure(name, plotting.to_svg(figure, name), alt, caption, source)


def styles(panel: Panel) -> dict[str, plotting.Style]:
    """Of each arm. With titles the first word gives the colour: the group of rows of a table."""
    titles = {run.title for run in panel.runs}
    if "" in titles:
        return {run.name: style_of(run) for run in panel.runs}
    groups: dict[str, list[str]] = {}
    for name in (name for name in panel.paper.get("rows", sorted(titles)) if name in titles):
        groups.setdefault(name.split()[0], []).append(name)
    return {
        name: plotting.style(colour, pattern)
        for colour, names in enumerate(groups.values())
        for pattern, name in enumerate(names)
    }


def style_of(run: Run) -> plotting.Style:
    """The layout gives the colour, the plan the dashes and the marker."""
    plan = run.result["plan"].partition(":")[0]
    pattern = list(PLANS).index(plan) if plan in PLANS else len(PLANS)  # written by hand
    return plotting.style(layout_number(run.result["layout"]), pattern)
