"""`Row`: the result of one run, and the CSV file that keeps rows. The columns are frozen."""

import contextlib
import csv
import dataclasses
import fcntl
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from experiments.studies.head_width.rows import (
    Baselines,
    WrongRows,
    columns,
    read_flat,
    write_records,
)
from experiments.studies.study3.spec import Run

VERSION = 1
COMPLETE, DIVERGED = "complete", "diverged"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of the model and of its training."""

    ffn_width: int
    parameters: int
    flops_per_token: int
    training_flops: float
    """3 x FLOPs per token x bytes, of both halves; by the formula of `attnlab.flops_per_token`."""
    steps: int
    bytes_trained: int


@dataclasses.dataclass(frozen=True)
class Scores:
    """Bits per byte, infinite where the run diverged. NaN: no byte of that kind was scored."""

    status: str
    heldout_bits: float
    heldout_copy_bits: float
    heldout_other_bits: float
    heldout_bytes: int
    heldout_copy_bytes: int
    validation_bits: float
    validation_copy_bits: float
    validation_other_bits: float
    train_bits: float
    copy_step: int
    """First step with the probe below 2 bits; -1 for never. Part D alone, else 0."""
    probe_bits: str
    """step:bits of the probe, separated by spaces. Part D alone."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a row comes from. Seconds are of training and scoring, over every start of the run;
    those of a first half that other runs use too are in the run that trained it."""

    text_sha256: str
    commit: str
    python: str
    jax: str
    numpy: str
    optax: str
    flax: str
    machine: str
    seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished run. Written as one line, the fields of every part side by side."""

    spec: Run
    sizes: Sizes
    scores: Scores
    baselines: Baselines
    origin: Origin
    version: int = VERSION


def read_rows(path: Path) -> list[Row]:
    """Every row of the file, none where there is no file.

    Raises WrongRows for other columns or another version, or a run that is there twice.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or []) != columns(Row):
            raise WrongRows(f"{path} has other columns than rows of study 3; name another file")
        rows = [read_flat(Row, values) for values in reader]
    if old := {row.version for row in rows} - {VERSION}:
        raise WrongRows(f"{path} has rows of version {min(old)}; this code reads {VERSION}")
    ids = [row.spec.id for row in rows]
    if len(set(ids)) != len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise WrongRows(f"{path} has the run {twice} twice")
    return rows


def check_origin(rows: Iterable[Row], commits: Sequence[str], digests: dict[str, str]) -> None:
    """Raises WrongRows for a row of a commit that is not listed, or of another text."""
    for row in rows:
        if row.origin.commit not in commits:
            raise WrongRows(
                f"{row.spec.id} is of commit {row.origin.commit}, not {' or '.join(commits)}; "
                "name the commit in --accept-commit if the numbers are comparable"
            )
        expected = digests.get(row.spec.text, row.origin.text_sha256)
        if row.origin.text_sha256 != expected:
            raise WrongRows(
                f"{row.spec.id} was trained on a text {row.spec.text} of digest "
                f"{row.origin.text_sha256[:12]}, here it is {expected[:12]}; use the same data"
            )


def append_row(path: Path, row: Row) -> bool:
    """Adds a row to the file, under a lock, once: False where its run is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        rows = read_rows(path)
        if any(one.spec.id == row.spec.id for one in rows):
            return False
        write_records(path, [*rows, row])
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
