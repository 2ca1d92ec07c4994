"""Runs of a small experiment: one CSV line per finished run, so that a stopped command resumes."""

import csv
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attnlab.atomic import write_atomic
from attnlab.lab.stats import holm, paired_difference
from attnlab.report.page import p_equation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = TypeVar("Cell")
Line = dict[str, str]


def run_cells(
    cells: Iterable[Cell], run: Callable[[Cell], Mapping[str, float]], path: Path
) -> list[Line]:
    """Runs each cell (a flat dataclass) whose line is not in the CSV file yet.

    Args:
        cells: the runs, in order.
        run: cell -> numbers.
        path: CSV file. A line is the fields of a cell, the numbers, and the wall seconds.

    Returns:
        The lines of `cells`, as text. Raises ValueError where the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = list(csv.DictReader(path.open())) if path.exists() else []
    found = []
    for cell in cells:
        assert dataclasses.is_dataclass(cell)
        assert not isinstance(cell, type)
        key = {name: str(value) for name, value in dataclasses.asdict(cell).items()}
        old = matching(lines, **key)
        if not old:
            began = time.perf_counter()
            numbers = {name: f"{value:.6g}" for name, value in run(cell).items()}
            line = key | numbers | {"seconds": f"{time.perf_counter() - began:.1f}"}
            if lines and list(lines[0]) != list(line):
                raise ValueError(f"{path} has columns {list(lines[0])}, not {list(line)}")
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(line), lineterminator="\n")
                if not lines:
                    writer.writeheader()
                writer.writerow(line)
            lines.append(line)
            old = [line]
        found += old
    return found


def matching(lines: Iterable[Line], **fields: object) -> list[Line]:
    """The lines whose fields have these values.

    >>> matching([{"seed": "0"}, {"seed": "1"}], seed=1)
    [{'seed': '1'}]
    """
    wanted = {name: str(value) for name, value in fields.items()}
    return [line for line in lines if wanted.items() <= line.items()]


def numbers(lines: Iterable[Line], name: str) -> list[float]:
    """A number of each line."""
    return [float(line[name]) for line in lines]


def write_results(folder: Path, name: str, page: str, figure: "Figure") -> None:
    """Writes NAME.md and NAME.svg beside NAME.csv."""
    from attnlab.report.style import themed_svg

    write_atomic(folder / f"{name}.md", page.encode())
    write_atomic(folder / f"{name}.svg", themed_svg(figure, name).encode())
    print(f"wrote {folder}/{name}.md, {name}.csv and {name}.svg")


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean and the 95 % interval of Student's t of independent runs.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    found = paired_difference(list(values))
    return found.mean, found.low, found.high


def conclusions(differences: Mapping[str, Iterable[float]], digits: int = 1) -> dict[str, str]:
    """Name -> mean difference (higher is better) with its 95 % interval and conclusion.

    p-values and conclusions are after Holm's correction for all names.

    >>> conclusions({"a": [1.0, 2.0, 3.0], "b": [-4.0, -4.1, -4.2]})["b"]
    '-4.1 (-4.3 to -3.9; p < 0.001): worse'
    """
    found = {name: paired_difference(list(of)) for name, of in differences.items()}
    said = {}
    p_values = holm([one.p for one in found.values()])
    for (name, d), p in zip(found.items(), p_values, strict=True):
        word = "inconclusive" if p >= 0.05 else "better" if d.mean > 0 else "worse"
        mean, low, high = (f"{value:+.{digits}f}" for value in (d.mean, d.low, d.high))
        said[name] = f"{mean} ({low} to {high}; {p_equation(p)}): {word}"
    return said
