"""The texts of the head-width study, each split by document into training, validation, held out.

No validation text continues a held-out or training text: texts are split by file, book, review,
article or sentence, by the official split where there is one.
"""

import dataclasses
import functools
import gzip
import hashlib
import re
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab.data import BYTES, Batch, Dataset, DataSizes
from attnlab.data.batching import TokenArray, windows
from attnlab.data.dataset import BatchShapes
from attnlab.data.files import bucket
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


@functools.lru_cache(maxsize=2)
def load_text(name: str, data: Path) -> Corpus:
    """One of `TEXTS`, from the folder `data` (the standard library needs none).

    `sha256` is that of the three parts with their lengths. Raises FileNotFoundError where a file
    is missing.
    """
    read, files = lookup(TEXTS, name, what="text")
    parts = read([data / file for file in files])
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode() + part)
    train, validation, heldout = (np.frombuffer(p, np.uint8).astype(np.int32) for p in parts)
    return Corpus(name, train, heldout, digest.hexdigest(), validation)


def check_texts(names: Iterable[str], data: Path) -> None:
    """Raises FileNotFoundError where a file of one of these texts is missing; reads none."""
    for name in names:
        for file in lookup(TEXTS, name, what="text")[1]:
            if not (data / file).is_file():
                raise FileNotFoundError(f"no file {data / file} of the text {name}; see --data")


def _gz(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def _joined(pieces: Iterable[tuple[int, bytes]], between: bytes = b"") -> Parts:
    """(number of a part, piece) -> the pieces of each part, one behind the other."""
    parts: tuple[list[bytes], ...] = ([], [], [])
    for part, piece in pieces:
        parts[part].append(piece)
    train, validation, heldout = map(between.join, parts)
    return train, validation, heldout


def _python(files: Sequence[Path]) -> Parts:
    """By file: sha256 of the relative path modulo 10 is 0 for held-out files, 1 for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return _joined(
        ({0: 2, 1: 1}.get(bucket(name, 10), 0), (root / name).read_bytes())
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
        fold = lambda name: int(name.rsplit("/cv", 1)[1][0])
        return _joined((max(0, fold(name) - 7), archive.read(name)) for name in names)


def _tatoeba(side: int, files: Sequence[Path]) -> Parts:
    """By English sentence, sha256 modulo 100: 0 to 3 held out, 4 and 5 validation.

    Each sentence once, in the order of its own sha256 (the file is sorted by length); what is also
    a training sentence is left out of the other parts.
    """
    parts: tuple[set[bytes], ...] = (set(), set(), set())
    for line in _gz(files[0]).splitlines():
        sides = line.split(b"\t")
        number = bucket(sides[0], 100)
        parts[2 if number < 4 else 1 if number < 6 else 0].add(sides[side])
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
    train, validation, heldout = map(bytes.__add__, map(_ewt, files[1:]), wiki)
    return train, validation, heldout


def _ewt(path: Path) -> bytes:
    texts = re.findall(rb"^# text = (.*)", _gz(path), re.MULTILINE)
    return b"".join(text + b"\n" for text in texts)


TATOEBA = ("tatoeba_fra_eng/fra.txt.gz",)
MULTI30K = ("train", "val", "test_2016_flickr", "test_2017_flickr")
TEXTS: dict[str, tuple[Callable[[Sequence[Path]], Parts], Sequence[str]]] = {
    "python": (_python, ()),
    "wikitext2": (_as_stored, [f"wikitext2/{n}.txt.gz" for n in ("train", "valid", "test")]),
    "novels": (_as_stored, [f"novels/{n}.txt.gz" for n in ("train-a", "valid", "test")]),
    "movie_reviews": (_movie_reviews, ("movie_reviews/movie_reviews.zip",)),
    "tatoeba_fr": (functools.partial(_tatoeba, 1), TATOEBA),
    "tatoeba_en": (functools.partial(_tatoeba, 0), TATOEBA),
    "multi30k_de": (_as_stored, [f"multi30k/{n}.de.gz" for n in MULTI30K]),
    "web": (_web, ("enwik8_head/enwik8-1m-chars.gz", *(
        f"ud_english_ewt/en_ewt-ud-{n}.conllu.gz" for n in ("train", "dev", "test")))),
}  # fmt: skip
"""Name -> how its files are read, and the files below the data folder."""
