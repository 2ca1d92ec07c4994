"""Published numbers beside ours, and expected results beside what was found."""

import math

import numpy as np

from attnlab.extras import extra
from attnlab.lab.description import Expectation, PublishedTable, Tags
from attnlab.lab.report.page import Facts, Paragraph, Section, Table, number
from attnlab.lab.report.panel import Panel, mean_of, spread_of
from attnlab.lab.statistics import Array

with extra("lab"):
    import pandas
    from scipy import stats

RELATIONS = {"at most": np.less_equal, "at least": np.greater_equal, "exactly": np.equal}


def published_section(panel: Panel) -> list[Section]:
    """The table of a paper beside ours, what differs, and whether the order is the same."""
    paper = panel.about.published
    if paper is None:
        return []
    text = f"{paper.source}. Its rows and ours are the same changes of a model; what differs:"
    return [
        Section(
            panel.named("Published numbers beside ours"),
            [
                Paragraph(text),
                Facts([(name, f"{there}. Here: {_here(panel, name)}")
                       for name, there in paper.setting.items()]),
                _table(panel, paper),
                Paragraph(_order(panel, paper)),
                *([Paragraph(paper.notes)] if paper.notes else []),
            ],
        )
    ]  # fmt: skip


def _here(panel: Panel, name: str) -> str:
    """What was done here, of the baseline."""
    run = panel.variants[panel.baseline][0] if panel.baseline else panel.results[0]
    config = run.spec.config
    model, train = config.model, config.train
    facts = {
        "data": run.data.name or type(config.data).__name__,
        "task": run.task.description or config.task,
        "model": f"{model.kind}, {model.num_layers} layers, width {model.width:,}, FFN "
        f"{model.ffn.width:,}",
        "training": f"{train.steps:,} steps of {train.batch_size:,} rows of {train.length:,} "
        f"tokens, {train.optimizer.name}",
        "score": f"held-out {panel.metric.unit}",
    }
    return facts.get(name, "see How it was made")


def _table(panel: Panel, paper: PublishedTable) -> Table:
    rows = []
    for row in paper.rows:
        variant = panel.find(row.tags)
        scores = panel.scores.get(variant or ())
        runs = panel.variants.get(variant or (), [])
        ours = mean_of(scores) if scores else "diverged" if runs else "not run"
        rows.append({
            "row": ", ".join(map(str, row.tags.values())),
            f"ours: held-out {panel.metric.unit}": ours,
            "standard deviation": spread_of(scores or {}),
            "parameters here": runs[0].sizes.parameters if runs else None,
            "at the paper's size": row.parameters or None,
            "as printed": row.printed or "–",
            **{
                f"paper: {column}": row.scores[i] if i < len(row.scores) else None
                for i, column in enumerate(paper.columns)
            },
        })  # fmt: skip
    frame = pandas.DataFrame(rows, dtype=object)
    frame = frame.astype(object).where(frame.notna(), None)
    caption = (
        f"In the paper's order. The paper's {paper.columns[0]}: {paper.better} is better. "
        "Parameters at the paper's size are counted from the same config; the paper prints them "
        "rounded, or not at all (–)."
    )
    digits = {f"paper: {column}": _digits(paper, i) for i, column in enumerate(paper.columns)}
    return Table("published", caption, frame, digits)


def _digits(paper: PublishedTable, column: int) -> int:
    """Decimals that the paper's numbers need."""
    values = [row.scores[column] for row in paper.rows if column < len(row.scores)]
    return max((len(str(v).partition(".")[2]) for v in values if v is not None), default=0)


def _order(panel: Panel, paper: PublishedTable) -> str:
    """Spearman's rank correlation with the paper's main column, and what it is worth."""
    ours, theirs = [], []
    for row in paper.rows:
        variant = panel.find(row.tags)
        score = row.scores[0] if row.scores else None
        if variant in panel.scores and variant is not None and score is not None:
            ours.append(panel.sign * mean_of(panel.scores[variant]))
            theirs.append(score if paper.better == "lower" else -score)
    if len(ours) < 3:
        return f"Rows that both have: {len(ours)}, too few to compare an order."
    found = math.nan
    if np.ptp(ours) and np.ptp(theirs):
        found = float(stats.spearmanr(ours, theirs).statistic)
    text = (
        f"Order: over the {len(ours)} rows that both have, Spearman's rank correlation with the "
        f"paper's {paper.columns[0]} is {number(found, 2)} (1: the same order; 0: unrelated; −1: "
        "the reverse)"
    )
    if len(ours) < 6:
        text += f"; by chance the same order comes once in {math.factorial(len(ours))} times"
    return f"{text}. Other data, task and scale: this is no replication."


def expectations(panel: Panel) -> list[Paragraph]:
    """Which expected results were found, those that were not first."""
    about = panel.about
    found = [(expected, _judge(panel, expected)) for expected in about.expectations]
    missed = [text for _, (held, text) in found if held is False]
    met = [text for _, (held, text) in found if held]
    absent = [text for _, (held, text) in found if held is None]
    parts = []
    if missed:
        parts.append(Paragraph("; ".join(missed) + ".", "Not as expected:", "answer"))
    if met:
        lead = "As expected in the rest:" if missed else "As expected:"
        parts.append(Paragraph("; ".join(met) + ".", lead, "" if missed else "answer"))
    if absent:
        parts.append(Paragraph("; ".join(absent) + ".", "No result:"))
    if parts and about.source:
        parts.append(Paragraph(f"The expectation is of {about.source}."))
    return parts


def _judge(panel: Panel, expected: Expectation) -> tuple[bool | None, str]:
    """Did it come (None: no result), and in which words?"""
    values = _numbers(panel, expected, expected.tags)
    if not len(values):
        return None, ", ".join(map(str, expected.tags.values()))
    numbers = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    judged = values
    if expected.over is not None:
        others = _numbers(panel, expected, expected.over)
        if not len(others):
            return None, ", ".join(map(str, expected.over.values()))
        numbers["ratio"] = values.mean() / others.mean()
        judged = np.array([numbers["ratio"]])
    held = bool(np.all(RELATIONS[expected.relation](judged, expected.value)))
    expectation = f"expected: {expected.relation} {expected.value:g}"
    return held, f"{expected.text.format(**numbers)} ({expectation})"


def _numbers(panel: Panel, expected: Expectation, tags: Tags) -> Array:
    variant = panel.find(tags)
    return np.array(panel.numbers(variant, expected.number) if variant else [], np.float64)
