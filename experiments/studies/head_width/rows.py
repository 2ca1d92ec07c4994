"""`Row`: the result of one run, and the CSV file that keeps rows."""

import contextlib
import csv
import dataclasses
import fcntl
import io
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attnlab.atomic import write_atomic
from experiments.studies.head_width.spec import StudyRun

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

COMPLETE, DIVERGED = "complete", "diverged"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of the model and of its training."""

    ffn_width: int
    parameters: int
    flops_per_token: int
    steps: int
    bytes_trained: int


@dataclasses.dataclass(frozen=True)
class Scores:
    """Bits per byte; infinite where the run diverged."""

    status: str
    heldout_bits: float
    validation_bits: float
    train_bits: float


@dataclasses.dataclass(frozen=True)
class Baselines:
    """Bits per byte on the held-out windows: n-grams of the bytes the run was trained on (order n
    has n - 1 bytes of context), and gzip -9 of those windows by themselves."""

    unigram: float
    ngram3: float
    ngram4: float
    ngram5: float
    gzip: float


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a row comes from. Seconds are of training and scoring, over every start of the run;
    a kill without warning loses those since the last checkpoint."""

    text_sha256: str
    commit: str
    seconds: float
    cpu_seconds: float
    machine: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished run. Written as one line, the fields of every part side by side."""

    spec: StudyRun
    sizes: Sizes
    scores: Scores
    baselines: Baselines
    origin: Origin
    version: int = 1


class WrongRows(ValueError):
    """Rows that may not stand beside those of this study."""


def flat(record: "DataclassInstance") -> dict[str, object]:
    """The fields of nested dataclasses side by side, in order."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        found |= flat(value) if nested else {field.name: value}
    return found


def read_flat(kind: type[T], texts: Mapping[str, str]) -> T:
    """The record whose fields `flat` put side by side, of their texts."""
    made = {}
    for name, hint in typing.get_type_hints(kind).items():
        nested = dataclasses.is_dataclass(hint)
        made[name] = read_flat(hint, texts) if nested else hint(texts[name])
    return kind(**made)


def columns(kind: type = Row) -> list[str]:
    """The header of a file of records."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        names += columns(hint) if nested else [name]
    return names


def write_records(path: Path, records: "Sequence[DataclassInstance]") -> None:
    """One or more records of a kind as CSV; a kill leaves the old file or the new one."""
    lines = [flat(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, text.getvalue().encode())


def check_columns(path: Path, found: Sequence[str], kind: type) -> None:
    """Raises WrongRows unless these are the columns of the records."""
    if list(found) != columns(kind):
        raise WrongRows(f"{path} has other columns than a file of {kind.__name__}; name another")


def read_rows(path: Path) -> list[Row]:
    """Every row of the file, none where there is no file.

    Raises WrongRows for other columns, or a run that is there twice.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        check_columns(path, reader.fieldnames or [], Row)
        rows = [read_flat(Row, values) for values in reader]
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
                "name the commit in --accept_commit if the numbers are comparable"
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
