"""`Row`: the result of one run, and the CSV file that keeps rows."""

import contextlib
import csv
import dataclasses
import fcntl
import io
import os
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlab.lab.head_width.spec import StudyRun, Variant

VERSION = 1
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
    version: int = VERSION


class WrongRows(ValueError):
    """Rows that may not stand beside those of this study."""


def flat(value: Any) -> dict[str, Any]:
    """The fields of nested dataclasses side by side, in order."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        found |= flat(one) if dataclasses.is_dataclass(one) else {field.name: one}
    return found


def read_flat(kind: type[Any], values: dict[str, str]) -> Any:
    """The record whose fields `flat` put side by side, of their texts."""
    hints = typing.get_type_hints(kind)
    made: dict[str, Any] = {}
    for name, hint in hints.items():
        nested: Any = hint
        made[name] = (
            read_flat(nested, values)
            if hasattr(hint, "__dataclass_fields__")
            else nested(values[name])
        )
    return kind(**made)


def columns() -> list[str]:
    """The header of the file."""
    names: list[str] = []
    for kind in (StudyRun, Sizes, Scores, Baselines, Origin):
        for field in dataclasses.fields(kind):
            nested = kind is StudyRun and field.name == "variant"
            names += [f.name for f in dataclasses.fields(Variant)] if nested else [field.name]
    return [*names, "version"]


def read_rows(path: Path) -> list[Row]:
    """Every row of the file, none where there is no file.

    Raises WrongRows for another header or version, or a run that is there twice.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or []) != columns():
            raise WrongRows(f"{path} has other columns than version {VERSION} of a row")
        rows: list[Row] = [read_flat(Row, values) for values in reader]
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
                "name the commit in --accept_commit if the numbers are comparable"
            )
        expected = digests.get(row.spec.text, row.origin.text_sha256)
        if row.origin.text_sha256 != expected:
            raise WrongRows(
                f"{row.spec.id} was trained on a text {row.spec.text} of digest "
                f"{row.origin.text_sha256[:12]}, here it is {expected[:12]}; use the same data"
            )


def append_row(path: Path, row: Row) -> bool:
    """Adds a row to the file, once: False where its run is there already.

    The new file replaces the old one whole, under a lock, so a kill leaves either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(path.name + ".lock")):
        rows = read_rows(path)
        if any(one.spec.id == row.spec.id for one in rows):
            return False
        text = io.StringIO()
        writer = csv.DictWriter(text, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat(one) for one in [*rows, row])
        write_whole(path, text.getvalue())
    return True


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
