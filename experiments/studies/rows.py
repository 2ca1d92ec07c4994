"""Rows of small trainings: a CSV file of them, comparisons, and the page."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pandas

from attnlab.atomic import write_atomic
from attnlab.lab.stats import holm, paired_difference
from attnlab.report.page import p_equation
from attnlab.report.style import themed_svg

Row: TypeAlias = dict[str, Any]


def completed(
    path: Path, runs: Sequence[Row], train: Callable[[list[Row]], Iterable[Row]]
) -> pandas.DataFrame:
    """The rows of a file that has one for each of `runs`, so that a stopped command resumes.

    Args:
      path: of the file.
      runs: column -> value of each run.
      train: runs that have no row -> their rows, each of which is appended when it is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(runs[0])
    rows = pandas.read_csv(path) if path.exists() else pandas.DataFrame(columns=columns)
    there = set(rows[columns].itertuples(index=False, name=None))
    for row in train([run for run in runs if tuple(run.values()) not in there]):
        pandas.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    return pandas.read_csv(path)


def one_by_one(
    train: Callable[..., Mapping[str, float]],
) -> Callable[[list[Row]], Iterator[Row]]:
    """Trains each run in this process, where it is no model of `lab.sweep`.

    Args:
      train: called with the values of a run by name; returns the numbers of its row.
    """

    def rows(runs: list[Row]) -> Iterator[Row]:
        for run in runs:
            began = time.perf_counter()
            numbers = {name: f"{value:.6g}" for name, value in train(**run).items()}
            yield run | numbers | {"seconds": f"{time.perf_counter() - began:.1f}"}

    return rows


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
