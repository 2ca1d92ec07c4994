"""Rows of the study: a CSV file with frozen columns, one line a run, and how results get there."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas
from pandas import DataFrame

from attnlab import lab
from attnlab.atomic import write_atomic
from attnlab.lab.machine import processor
from experiments.studies.head_width.ngrams import NAMES, baselines
from experiments.studies.head_width.spec import BATCH_TOKENS, StudyRun, num_steps
from experiments.studies.head_width.texts import load_text

PUBLISHED = Path(__file__).parents[3] / "docs/results/head_width"
BITS = ("heldout_bits", "validation_bits", "train_bits")
"""Bits per byte; infinite where the run diverged."""
GRAMS = ("unigram", *NAMES, "gzip")
RUN = ["stage", *(f.name for f in dataclasses.fields(StudyRun) if f.name != "stage")]
COLUMNS = [
    *RUN,
    "ffn_width", "parameters", "flops_per_token", "steps", "bytes_trained", "status", *BITS, *GRAMS,
    "text_sha256", "commit", "seconds", "cpu_seconds", "machine", "version",
]  # fmt: skip
"""`version` is 1 for the published rows, of which alone `cpu_seconds` are known."""
FLOATS = ("learning_rate", "bytes_per_parameter", *BITS, *GRAMS, "seconds", "cpu_seconds")


def read_csv(path: Path, columns: Iterable[str]) -> DataFrame:
    """The file, empty where there is none. Raises ValueError for other columns."""
    if not path.exists():
        return DataFrame(columns=list(columns))
    rows = pandas.read_csv(path, dtype=dict.fromkeys([*FLOATS, "commit"], str))
    if list(rows.columns) != list(columns):
        raise ValueError(f"{path} has other columns than rows of this study; name another folder")
    # Of texts, since `read_csv` rounds floats.
    return rows.astype({name: float for name in FLOATS if name in rows})


def append_csv(path: Path, rows: DataFrame) -> None:
    """Adds lines to the file; a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.read_text() if path.exists() else ",".join(rows.columns) + "\n"
    write_atomic(path, (there + rows.to_csv(index=False, header=False)).encode())


def read_rows(path: Path) -> DataFrame:
    """Every row of the file. Raises ValueError for other columns, or a run that is there twice."""
    rows = read_csv(path, COLUMNS)
    twice = rows.duplicated(RUN)
    if twice.any():
        raise ValueError(f"line {twice.argmax() + 2} of {path} has a run for the second time")
    return rows


def runs_of(rows: DataFrame) -> list[StudyRun]:
    """The run of each row, by its columns."""
    return [StudyRun(**record) for record in rows[RUN].to_dict("records")]


@functools.cache
def published_runs() -> tuple[StudyRun, ...]:
    """The runs of the published rows."""
    return tuple(runs_of(read_rows(PUBLISHED / "runs.csv")))


def check_complete(rows: DataFrame) -> None:
    """Raises ValueError unless all published runs are there."""
    if missing := len(set(published_runs()) - set(runs_of(rows))):
        raise ValueError(f"the pages need all runs; {missing} are missing: run them first")


def new_rows(results: lab.Results, data: Path, commit: str) -> DataFrame:
    """Results of `lab.sweep` as rows, with the n-gram baselines of each run."""
    rows = results.to_pandas()
    for name in BITS:
        scores = rows.get(name.replace("bits", "bits_per_byte"), np.inf)
        rows[name] = np.where(rows["status"] == "complete", scores, np.inf)
    runs = runs_of(rows)
    rows["steps"] = list(map(num_steps, runs))
    rows["bytes_trained"] = rows["steps"] * BATCH_TOKENS
    rows["text_sha256"] = [load_text(run.text, data).sha256 for run in runs]
    rows[list(GRAMS)] = DataFrame([
        baselines(load_text(run.text, data), run.length, BATCH_TOKENS // run.length,
                  num_steps(run), run.seed)
        for run in runs
    ])[list(GRAMS)]  # fmt: skip
    rows["commit"], rows["machine"], rows["version"] = commit, processor(), 2
    return rows.reindex(columns=COLUMNS)


def check_origin(rows: DataFrame, commits: Iterable[str], digests: Mapping[str, str]) -> None:
    """Raises ValueError for a row of a commit that is not listed, or of another text."""
    if other := set(rows["commit"]) - set(commits):
        raise ValueError(
            f"rows are of commit {min(other)}, not {' or '.join(commits)}; name it in "
            "--accept_commit if the numbers are comparable"
        )
    for text, there in rows.groupby("text")["text_sha256"].first().items():
        if there != digests.get(str(text), there):
            raise ValueError(
                f"rows of {text} are of another text ({there[:12]}); use the same data"
            )
