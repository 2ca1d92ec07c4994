"""Numbers and lists as a report writes them."""

import math
from collections.abc import Sequence

from experiments.reporting.results import Run
from experiments.reporting.statistics import Difference


def bits(run: Run) -> str:
    """Held-out loss, mean ± standard deviation."""
    spread = run.spread
    return f"{run.loss:.3f}" + ("" if math.isnan(spread) else f" ± {spread:.3f}")


def span(d: Difference) -> str:
    """An interval."""
    return "–" if math.isnan(d.p) else f"{signed(d.low)} to {signed(d.high)}"


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
