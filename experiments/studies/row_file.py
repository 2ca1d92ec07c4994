"""A CSV file with a row for each finished run, so that a stopped command resumes."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas


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
