"""Numbers and lists as a report writes them."""

import math
from collections.abc import Sequence
from typing import Any

from attnlab.training.optimizers import OPTIMIZERS
from experiments.reporting.results import Panel, Run
from experiments.reporting.statistics import Difference


def score(run: Run) -> str:
    """Held-out, in the unit of the run: mean ± standard deviation."""
    spread = run.spread
    return run.shown(run.score) + ("" if math.isnan(spread) else f" ± {run.shown(spread)}")


def span(d: Difference) -> str:
    """An interval."""
    if math.isnan(d.p):
        return "–"
    return f"{signed(d.low)} to {signed(d.high)}" if math.isfinite(d.high) else "not bounded"


def signed(value: float, digits: int = 3) -> str:
    """With so many decimals and a true minus."""
    return f"{value:.{digits}f}".replace("-", "−")


def p_value(p: float) -> str:
    """Three decimals."""
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def percent(share: float, digits: int = 0) -> str:
    """0.95 -> "95 %"."""
    return f"{100 * share:.{digits}f} %"


def listed(names: Sequence[str], word: str) -> str:
    """a, b `word` c."""
    return f"{', '.join(names[:-1])} {word} {names[-1]}" if len(names) > 1 else names[0]


def direction(panel: Panel) -> str:
    """ "less is better" or the other."""
    signs = {run.sign for run in panel.runs}
    return "less is better" if signs == {1} else "more is better" if signs == {-1} else "mixed"


def counted(facts: dict[str, Any]) -> list[str]:
    """{"bytes": 1000} -> "1,000 bytes"; texts are "name: text"."""
    return [
        f"{value:,} {name}" if isinstance(value, int) else f"{name}: {value}"
        for name, value in facts.items()
    ]


def optimizer(trains: dict[str, Any]) -> str:
    """Optimizer and schedule of a run: "AdamW, cosine"."""
    return f"{OPTIMIZERS[trains['optimizer']].title}, {trains['schedule'].replace('_', ' ')}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells: the first column to the left, numbers to the right where there are several.

    >>> print(columns([("arm", "seeds", "steps"), ("wide", "3", "800")]))
    arm   seeds  steps
    wide      3    800
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(rest, widths[1:], strict=True):
            cells.append(cell.rjust(width) if len(rest) > 1 else cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
