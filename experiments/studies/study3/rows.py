"""`Row`: the result of one run, and the CSV file that keeps rows. The columns are frozen."""

import contextlib
import csv
import dataclasses
import fcntl
import io
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from attnlab.atomic import write_atomic
from experiments.studies.study3.spec import Run

T = TypeVar("T")
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


class WrongRows(ValueError):
    """Rows that may not stand beside those of this study."""


def flat(record: typing.Any) -> dict[str, object]:
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


def write_records(path: Path, records: Sequence[typing.Any]) -> None:
    """One or more records of a kind as CSV; a kill leaves the old file or the new one."""
    lines = [flat(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, text.getvalue().encode())


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
