"""Tables, and numbers in words, of the pages of the head-width study."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.lab.stats import ALPHA, holm
from attnlab.report import page as pages
from attnlab.report.page import p_value
from experiments.studies.head_width.mixed_model import Estimate

Line = Mapping[str, object]
"""Column -> cell of a table."""


def render(name: str, **values: Any) -> str:
    """A template of this folder."""
    path = Path(__file__).with_name(f"{name}.md.jinja")
    text = pages.render(
        path, exp=math.exp, isfinite=math.isfinite, ends=ends, power=power, **values
    )
    return text.rstrip("\n") + "\n"


def table(lines: Sequence[Line]) -> str:
    """A Markdown table. The columns are those of the longest line; cells that another lacks are
    empty, an estimate has its interval."""
    header = max(map(list, lines), key=len)
    cells = [[line.get(name, "") for name in header] for line in lines]
    text = lambda cell: ends(cell) if isinstance(cell, Estimate) else str(cell)
    return pages.table(header, [list(map(text, line)) for line in cells])


def judged_table(lines: Sequence[Line], column: str) -> str:
    """A table each of whose lines ends with the cells of `corrected` for the estimate in a column,
    if it has one, among all of them."""
    found = [line[column] for line in lines]
    cells = iter(corrected([one for one in found if isinstance(one, Estimate)]))
    return table([
        {**line, **(next(cells) if isinstance(one, Estimate) else {})}
        for line, one in zip(lines, found, strict=True)
    ])  # fmt: skip


def ends(found: Estimate, digits: int = 4, plus: str = "+") -> str:
    """ "value (low to high)"."""
    interval = f"{found.low:{plus}.{digits}f} to {found.high:{plus}.{digits}f}"
    return f"{found.value:{plus}.{digits}f} ({interval})"


def power(e: Estimate, digits: int = 1) -> str:
    """2 to the power of an estimate and of its ends; "not determined" where it has no interval."""
    if not (math.isfinite(e.low) and math.isfinite(e.high)):
        return "not determined"
    return ends(dataclasses.replace(e, value=2**e.value, low=2**e.low, high=2**e.high), digits, "")


def reading(found: Estimate) -> str:
    """The conclusion from an interval: "inconclusive" where it holds 0."""
    if not found.leaves_out_0:
        return "inconclusive"
    return "worse" if found.value > 0 else "better"


def corrected(found: Sequence[Estimate]) -> list[Line]:
    """Of each: p after Holm's correction for all of them, and `reading` where p < 0.05."""
    cells: list[Line] = []
    for one, p in zip(found, holm([one.p for one in found]).tolist(), strict=True):
        word = reading(one)
        lost = word != "inconclusive" and not p < ALPHA
        word = f"inconclusive (uncorrected: {word})" if lost else word
        cells.append({"p, Holm": p_value(p), "": word})
    return cells
