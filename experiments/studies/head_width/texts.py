"""The texts of the head-width study, each split by document into training, validation, held out.

No validation text continues a held-out or training text: texts are split by file, book, review,
article or sentence, by the official split where there is one.
"""

import dataclasses
import functools
import gzip
import hashlib
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.data import BYTES, Batch, Dataset, DataSizes
from attnlab.data.batching import TokenArray, windows
from attnlab.data.dataset import BatchShapes
from attnlab.data.text import SKIPPED_FOLDERS, Corpus, dataset_of_corpus
from attnlab.names import lookup

Parts = tuple[bytes, bytes, bytes]
"""Training, validation, held out."""
HELDOUT_BYTES, VALIDATION_BYTES = 1 << 18, 1 << 17
"""At most so many targets of a part are scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyText:
    """One of `TEXTS` as a dataset.

    Attributes:
      name: of the text.
      folder: of the files; the text "python" needs none.
    """

    name: str = "python"
    folder: str = ""

    def sizes(self) -> DataSizes:
        """Bytes."""
        return BYTES

    def shapes(self, length: int) -> BatchShapes:
        """Windows of `length` + 1 bytes."""
        return {"tokens": jax.ShapeDtypeStruct((1, length + 1), np.int32)}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Random training windows; fixed held-out and validation windows."""
        return make_dataset(load_text(self.name, Path(self.folder)), length)


def make_dataset(corpus: Corpus, length: int) -> Dataset:
    """The dataset of a run; all runs of a text and length are scored on the same windows."""
    assert corpus.validation is not None
    heldout = scored_windows(corpus.heldout, length, HELDOUT_BYTES)
    validation = scored_windows(corpus.validation, length, VALIDATION_BYTES)
    return dataclasses.replace(
        dataset_of_corpus(corpus, length),
        heldout=lambda count: heldout,
        validation=lambda count: validation,
        baselines=dict,
    )


def scored_windows(text: np.ndarray, length: int, most: int) -> Batch:
    """Evenly spaced windows of at most `most` targets, the same for every run of a text."""
    count = max(1, min(most, len(text) - 1) // length)
    tokens, valid = windows(TokenArray(text), length, count)
    return {"tokens": tokens, "valid": valid}


def load_text(name: str, data: Path) -> Corpus:
    """One of `TEXTS`, from the folder `data` (the standard library needs none).

    `sha256` is that of the three parts with their lengths. Raises FileNotFoundError where a file
    is missing.
    """
    return _load(name, data.resolve())


@functools.lru_cache(maxsize=2)
def _load(name: str, data: Path) -> Corpus:
    text = lookup(TEXTS, name, what="text")
    parts = text.read([data / file for file in text.files])
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode() + part)
    train, validation, heldout = (np.frombuffer(p, np.uint8).astype(np.int32) for p in parts)
    return Corpus(name, train, heldout, digest.hexdigest(), validation)


def check_texts(names: Iterable[str], data: Path) -> None:
    """Raises FileNotFoundError where a file of one of these texts is missing; reads none."""
    for name in names:
        for file in lookup(TEXTS, name, what="text").files:
            if not (data / file).is_file():
                raise FileNotFoundError(f"no file {data / file} of the text {name}; see --data")


def _gz(path: Path) -> bytes:
    with gzip.open(path, "rb") as file:
        return file.read()


def _joined(pieces: Iterable[tuple[int, bytes]], between: bytes = b"") -> Parts:
    """(number of a part, piece) -> the pieces of each part, one behind the other."""
    parts: tuple[list[bytes], ...] = ([], [], [])
    for part, piece in pieces:
        parts[part].append(piece)
    train, validation, heldout = map(between.join, parts)
    return train, validation, heldout


def _bucket(name: bytes, count: int) -> int:
    return int(hashlib.sha256(name).hexdigest(), 16) % count


def _python(files: Sequence[Path]) -> Parts:
    """By file: sha256 of the relative path modulo 10 is 0 for held-out files, 1 for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return _joined(
        ({0: 2, 1: 1}.get(_bucket(name.encode(), 10), 0), (root / name).read_bytes())
        for name in names
        if not SKIPPED_FOLDERS & set(Path(name).parts[:-1])
    )


def _as_stored(files: Sequence[Path]) -> Parts:
    """By the official split, or by book: a file for each part. Any more are held out too."""
    return _joined((min(i, 2), _gz(path)) for i, path in enumerate(files))


def _movie_reviews(files: Sequence[Path]) -> Parts:
    """By review: the authors' folds 0 to 7, 8 and 9."""
    with zipfile.ZipFile(files[0]) as archive:
        names = [n for n in archive.namelist() if n.endswith(".txt") and "/cv" in n]
        names.sort(key=lambda n: (n.rsplit("/", 1)[1], n))
        folds = [int(name.rsplit("/cv", 1)[1][0]) for name in names]
        return _joined(
            (max(0, fold - 7), archive.read(name)) for fold, name in zip(folds, names, strict=True)
        )


def _tatoeba(side: int, files: Sequence[Path]) -> Parts:
    """By English sentence, sha256 modulo 100: 0 to 3 held out, 4 and 5 validation.

    Each sentence once, in the order of its own sha256 (the file is sorted by length); what is also
    a training sentence is left out of the other parts.
    """
    parts: tuple[set[bytes], ...] = (set(), set(), set())
    for line in _gz(files[0]).splitlines():
        sides = line.split(b"\t")
        bucket = _bucket(sides[0], 100)
        parts[2 if bucket < 4 else 1 if bucket < 6 else 0].add(sides[side])
    train, validation, heldout = parts
    return _lines(train), _lines(validation - train), _lines(heldout - validation - train)


def _lines(lines: Iterable[bytes]) -> bytes:
    ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
    return b"".join(line + b"\n" for line in ordered)


def _web(files: Sequence[Path]) -> Parts:
    """EWT, the official split, then pages of enwik8: the first 80 % of bytes, 10 %, 10 %."""
    pages = _gz(files[0]).split(b"  <page>")
    before = np.cumsum([0, *map(len, pages)])
    numbers = np.searchsorted(before[-1] * np.array([0.8, 0.9]), before[:-1], side="right")
    wiki = _joined(zip(numbers, pages, strict=True), b"  <page>")
    train, validation, heldout = (
        _ewt(path) + text for path, text in zip(files[1:], wiki, strict=True)
    )
    return train, validation, heldout


def _ewt(path: Path) -> bytes:
    start = b"# text = "
    lines = _gz(path).splitlines()
    return b"".join(line[len(start) :] + b"\n" for line in lines if line.startswith(start))


class Text(NamedTuple):
    """The files of a text below the data folder, and how they are read."""

    read: Callable[[Sequence[Path]], Parts]
    files: tuple[str, ...] = ()


def _files(pattern: str, *names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names)


TATOEBA = ("tatoeba_fra_eng/fra.txt.gz",)
EWT = _files("ud_english_ewt/en_ewt-ud-{}.conllu.gz", "train", "dev", "test")
TEXTS = {
    "python": Text(_python),
    "wikitext2": Text(_as_stored, _files("wikitext2/{}.txt.gz", "train", "valid", "test")),
    "novels": Text(_as_stored, _files("novels/{}.txt.gz", "train-a", "valid", "test")),
    "movie_reviews": Text(_movie_reviews, ("movie_reviews/movie_reviews.zip",)),
    "tatoeba_fr": Text(functools.partial(_tatoeba, 1), TATOEBA),
    "tatoeba_en": Text(functools.partial(_tatoeba, 0), TATOEBA),
    "multi30k_de": Text(
        _as_stored,
        _files("multi30k/{}.de.gz", "train", "val", "test_2016_flickr", "test_2017_flickr"),
    ),
    "web": Text(_web, ("enwik8_head/enwik8-1m-chars.gz", *EWT)),
}
