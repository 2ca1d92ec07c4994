"""Rows of small trainings that are no runs of `lab.sweep`: a CSV file of them, and comparisons."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas

from attnlab.atomic import write_atomic
from attnlab.lab.stats import holm, paired_difference
from attnlab.report.page import p_equation
from attnlab.report.style import themed_svg


def completed(
    path: Path, runs: Iterable[dict[str, Any]], train: Callable[..., Mapping[str, float]]
) -> pandas.DataFrame:
    """The rows of a file that has one for each of `runs`.

    Args:
      path: of the file.
      runs: column -> value of each run; runs without a row are trained, and their row appended.
      train: called with the values of a run by name; returns the numbers of its row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in runs:
        rows = pandas.read_csv(path) if path.exists() else pandas.DataFrame(columns=list(run))
        if (rows[list(run)] == list(run.values())).all(axis=1).any():
            continue
        began = time.perf_counter()
        numbers = {name: f"{value:.6g}" for name, value in train(**run).items()}
        row = run | numbers | {"seconds": f"{time.perf_counter() - began:.1f}"}
        pandas.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    return pandas.read_csv(path)


def conclusions(scores: Mapping[str, pandas.Series], digits: int) -> dict[str, tuple[str, str]]:
    """Compares every variant with the first one.

    Args:
      scores: of each variant, by seed; higher is better.
      digits: decimals.

    Returns:
      Variant -> its paired difference with 95 % interval, p-value after Holm's correction and
      conclusion; and the conclusion alone.
    """
    first, *others = scores
    found = [paired_difference((scores[name] - scores[first]).dropna()) for name in others]
    words = {}
    for name, one, p in zip(others, found, holm([one.p for one in found]), strict=True):
        word = "inconclusive" if p >= 0.05 else "better" if one.mean > 0 else "worse"
        mean, low, high = (f"{value:+.{digits}f}" for value in (one.mean, one.low, one.high))
        words[name] = f"{mean} ({low} to {high}; {p_equation(p)}): {word}", word
    return words


def write_page(folder: Path, name: str, page: str, figure: Any) -> None:
    """Writes NAME.md and NAME.svg beside NAME.csv."""
    write_atomic(folder / f"{name}.md", page.encode())
    write_atomic(folder / f"{name}.svg", themed_svg(figure, name).encode())
    print(f"wrote {folder}/{name}.md, {name}.csv and {name}.svg")
