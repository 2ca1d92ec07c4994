"""The command of a study of small trainings: a CSV file of rows, comparisons, and the page."""

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import pandas
from absl import flags
from matplotlib.figure import Figure

from attnlab.atomic import write_atomic
from attnlab.lab.stats import holm, paired_difference
from attnlab.report import page as report
from attnlab.report.style import themed_svg
from experiments import app

Row: TypeAlias = dict[str, Any]


def start(
    study: ModuleType,
    rows: Callable[[Path], pandas.DataFrame],
    page: Callable[[pandas.DataFrame], str],
    figure: Callable[[pandas.DataFrame], Figure] | None = None,
) -> NoReturn:
    """The command of a study: writes NAME.csv, NAME.md and NAME.svg to --out.

    Args:
      study: its docstring is that of the command, its package is NAME.
      rows: path of the CSV file -> its rows, after what is missing was trained.
      page: rows -> the Markdown page.
      figure: rows -> the figure of the page, if it has one.
    """
    name = study.__name__.split(".")[-2]
    sys.modules["__main__"].__doc__ = study.__doc__
    flags.DEFINE_string("out", "docs/results", "Folder of the page, its rows and its figure.")
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["out"])  # for --help

    def main() -> None:
        path = Path(flags.FLAGS.out) / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = rows(path)
        text = page(found)
        write_atomic(path.with_suffix(".md"), text.encode())
        if figure:
            svg = themed_svg(figure(found), name)
            write_atomic(path.with_suffix(".svg"), svg.encode())
        print(f"{text}\nwrote {name}.csv and its page to {path.parent}")

    app.start(main)


def completed(
    path: Path, runs: Sequence[Row], train: Callable[[list[Row]], Iterable[Row]]
) -> pandas.DataFrame:
    """The rows of a file that has one for each of `runs`, so that a stopped command resumes.

    Args:
      path: of the file.
      runs: column -> value of each run.
      train: runs that have no row -> their rows, each of which is appended when it is there.

    Raises:
      ValueError: the file has no such columns, so it is of something else.
    """
    columns, text = list(runs[0]), path.read_text() if path.exists() else ""
    text = text[: text.rfind("\n") + 1]  # without a line that a kill has cut
    rows = pandas.read_csv(io.StringIO(text)) if text else pandas.DataFrame(columns=columns)
    if missing := [name for name in columns if name not in rows]:
        raise ValueError(f"{path} has no column {missing[0]!r}; name another folder with --out")
    there = set(rows[columns].itertuples(index=False, name=None))
    for row in train([run for run in runs if tuple(run.values()) not in there]):
        text += pandas.DataFrame([row]).to_csv(header=not text, index=False)
        write_atomic(path, text.encode())
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
        word = "inconclusive" if not p < 0.05 else "better" if one.mean > 0 else "worse"
        mean, low, high = (f"{value:+.{digits}f}" for value in (one.mean, one.low, one.high))
        words[name] = f"{mean} ({low} to {high}; {report.p_equation(p)}): {word}", word
    return words


def render(file: str, **values: object) -> str:
    """The template page.md.jinja beside a file."""
    return report.render(Path(file).with_name("page.md.jinja"), **values) + "\n"
