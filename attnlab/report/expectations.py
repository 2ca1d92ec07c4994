"""Expected results beside what was found."""

import numpy as np

from attnlab.lab.description import Expectation, Tags
from attnlab.lab.stats import Array
from attnlab.report.page import Paragraph
from attnlab.report.panel import Panel

RELATIONS = {"at most": np.less_equal, "at least": np.greater_equal, "exactly": np.equal}


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
