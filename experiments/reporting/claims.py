"""What was known beforehand beside what came: one sentence, one figure (`running/claims.py`)."""

import functools
import operator
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np

from attnlab import plotting
from attnlab.training.metrics import read_metrics
from experiments.reporting.document import Block, Figure, Figures, Paragraph
from experiments.reporting.figures import styles
from experiments.reporting.results import Panel, Run
from experiments.reporting.wording import listed

RELATIONS = {
    "at most": lambda a, value: a <= value,
    "at least": lambda a, value: a >= value,
    "exactly": lambda a, value: a == value,
}


def question(panels: Sequence[Panel]) -> str:
    """What the sweeps ask, where each of them has a claim; else nothing."""
    asked = list(dict.fromkeys(panel.claim.get("question", "") for panel in panels))
    return " ".join(asked) if all(asked) else ""


def section(panel: Panel, name: str) -> list[Block]:
    """The sentence and the figure."""
    drawn = _drawing(panel, name)
    return [Paragraph(answer(panel)), *([Figures([drawn])] if drawn else [])]


def answer(panel: Panel) -> str:
    """What was expected, with the numbers that came; what did not come stands first."""
    runs = {run.name: run for run in panel.complete}
    met: list[str] = []
    missed: list[str] = []
    absent: list[str] = []
    for expect in panel.claim["expects"]:
        names = [name for name in (expect["arm"], expect["of"]) if name]
        if any(name not in runs for name in names):
            absent += [name for name in names if name not in runs]
            continue
        held, text = _judge(expect, runs)
        (met if held else missed).append(text)
    parts = [f"**Not as expected:** {'; '.join(missed)}."] if missed else []
    word = "As expected in the rest" if missed else "As expected"
    parts += [f"**{word}:** {'; '.join(met)}."] if met else []
    if absent:
        parts.append(f"No result, so no answer: {listed(list(dict.fromkeys(absent)), 'and')}.")
    return f"{' '.join(parts)} The expectation is of {panel.claim['source']}."


def _judge(expect: dict[str, Any], runs: dict[str, Run]) -> tuple[bool, str]:
    """Did it come, and in which words?"""
    values = _numbers(runs[expect["arm"]], expect["number"])
    told = {"mean": values.mean(), "least": values.min(), "most": values.max()}
    judged = values
    if expect["of"]:
        told["ratio"] = values.mean() / _numbers(runs[expect["of"]], expect["number"]).mean()
        judged = np.array([told["ratio"]])
    held = bool(np.all(RELATIONS[expect["relation"]](judged, expect["value"])))
    asked = f"asked: {expect['relation']} {expect['value']:g}"
    return held, f"{expect['says'].format(**told)} ({asked})"


def _numbers(run: Run, name: str) -> np.ndarray:
    """[S]"""
    return np.array(run.result[name]) if name else run.heldout


def _drawing(panel: Panel, name: str) -> Figure | None:
    """The figure of the claim; None where no arm is complete."""
    told, title = panel.claim["drawing"], panel.claim["question"]
    if not panel.complete:
        return None
    label = told["label"] or f"held-out {panel.unit}"
    figure = DRAWINGS[told["kind"]](panel, told, label)
    return Figure(f"{name}-claim", plotting.to_svg(figure, f"{name}-claim"), title, told["caption"])


def _bars(panel: Panel, told: dict[str, Any], label: str) -> Any:
    """Every arm in the order of the sweep; dashed what needs no model, of any of them."""
    looks, order = styles(panel), list(panel.sweep["titles"].values())
    runs = sorted(panel.complete, key=lambda run: order.index(run.name))
    rows = [plotting.Bar(run.name, looks[run.name], run.score, run.spread) for run in runs]
    lines = {n: v for run in runs for n, v in run.yardsticks.items()}
    return plotting.bar_plot(rows, lines, label)


def _dots(panel: Panel, told: dict[str, Any], label: str) -> Any:
    """Every arm, best on top."""
    looks = styles(panel)
    rows = [
        plotting.Bar(fill(run.name, 30), looks[run.name], run.score, run.spread)
        for run in panel.arms
        if run.complete
    ]
    return plotting.dot_plot(rows, label, panel.complete[0].metrics[0]["digits"])


def _curves(panel: Panel, told: dict[str, Any], label: str) -> Any:
    """A number of metrics.jsonl over the steps."""
    looks, curves = styles(panel), []
    for run in panel.complete:
        rows = [r for r in read_metrics(run.folder / "metrics.jsonl") if told["number"] in r]
        steps = np.array([r["step"] for r in rows], int)
        values = np.array([r[told["number"]] for r in rows]).T
        curves.append(plotting.Curve(run.name, looks[run.name], steps, values, False))
    return plotting.learning_curves(curves, label)


def _over(panel: Panel, told: dict[str, Any], label: str) -> Any:
    """Held-out scores over a number of the config, a curve for what stands before the
    comma in their names."""
    looks, path = styles(panel), told["field"].split(".")
    series: dict[str, list[tuple[int, Run]]] = {}
    for run in panel.complete:
        at = functools.reduce(operator.getitem, path, run.record["config"])
        series.setdefault(run.name.partition(",")[0], []).append((at, run))
    curves = []
    for word, found in series.items():
        found.sort(key=lambda pair: pair[0])
        at, values = np.array([x for x, _ in found]), np.stack([r.heldout for _, r in found], 1)
        curves.append(plotting.Curve(word, looks[found[0][1].name], at, values, False))
    quantity = path[-1].replace("num_", "").replace("_", " ")
    return plotting.metric_curves(curves, [], quantity, label, told["log"])


DRAWINGS = {"bars": _bars, "dots": _dots, "curves": _curves, "over": _over}
