"""The texts of the head-width study, each split by document into training, validation, held out.

No validation text continues a held-out or training text: texts are split by file, book, review,
article or sentence, by the official split where there is one.
"""

import functools
import gzip
import hashlib
import sysconfig
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from attnlab.data.text import SKIPPED_FOLDERS, Corpus
from attnlab.names import lookup

Parts = tuple[bytes, bytes, bytes]
"""Training, validation, held out."""


def load_text(name: str, data: Path) -> Corpus:
    """One of `TEXTS`, from the folder `data` (the standard library needs none).

    `sha256` is that of the three parts with their lengths. Raises FileNotFoundError where a file
    is missing.
    """
    return _load(name, data.resolve())


@functools.lru_cache(maxsize=2)
def _load(name: str, data: Path) -> Corpus:
    parts = lookup(TEXTS, name, what="text")(data)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode() + part)
    train, validation, heldout = (np.frombuffer(p, np.uint8).astype(np.int32) for p in parts)
    return Corpus(name, train, heldout, digest.hexdigest(), validation)


def _gz(path: Path) -> bytes:
    with gzip.open(path, "rb") as file:
        return file.read()


def _python(data: Path) -> Parts:
    """By file: sha256 of the relative path modulo 10 is 0 for held-out files, 1 for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], ...] = ([], [], [])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    for name, path in sorted(files.items()):
        if not SKIPPED_FOLDERS & set(Path(name).parts[:-1]):
            bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
            parts[{0: 2, 1: 1}.get(bucket, 0)].append(path.read_bytes())
    train, validation, heldout = (b"".join(part) for part in parts)
    return train, validation, heldout


def _wikitext2(data: Path) -> Parts:
    """The official split."""
    train, valid, test = (_gz(data / f"wikitext2/{n}.txt.gz") for n in ("train", "valid", "test"))
    return train, valid, test


def _novels(data: Path) -> Parts:
    """By book."""
    train, valid, test = (_gz(data / f"novels/{n}.txt.gz") for n in ("train-a", "valid", "test"))
    return train, valid, test


def _movie_reviews(data: Path) -> Parts:
    """By review: the authors' folds 0 to 7, 8 and 9."""
    parts: tuple[list[bytes], ...] = ([], [], [])
    with zipfile.ZipFile(data / "movie_reviews/movie_reviews.zip") as archive:
        names = [n for n in archive.namelist() if n.endswith(".txt") and "/cv" in n]
        for name in sorted(names, key=lambda n: (n.rsplit("/", 1)[1], n)):
            fold = int(name.rsplit("/cv", 1)[1][0])
            parts[max(0, fold - 7)].append(archive.read(name))
    train, validation, heldout = (b"".join(part) for part in parts)
    return train, validation, heldout


def _tatoeba(side: int, data: Path) -> Parts:
    """By English sentence, sha256 modulo 100: 0 to 3 held out, 4 and 5 validation.

    Each sentence once, in the order of its own sha256 (the file is sorted by length); what is also
    a training sentence is left out of the other parts.
    """
    parts: tuple[set[bytes], ...] = (set(), set(), set())
    for line in _gz(data / "tatoeba_fra_eng/fra.txt.gz").splitlines():
        sides = line.split(b"\t")
        bucket = int(hashlib.sha256(sides[0]).hexdigest(), 16) % 100
        parts[2 if bucket < 4 else 1 if bucket < 6 else 0].add(sides[side])
    train, validation, heldout = parts
    return _lines(train), _lines(validation - train), _lines(heldout - validation - train)


def _lines(lines: Iterable[bytes]) -> bytes:
    ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
    return b"".join(line + b"\n" for line in ordered)


def _multi30k(data: Path) -> Parts:
    """The official split; both test sets are held out."""
    names = ("train", "val", "test_2016_flickr", "test_2017_flickr")
    train, val, test_2016, test_2017 = (_gz(data / f"multi30k/{name}.de.gz") for name in names)
    return train, val, test_2016 + test_2017


def _web(data: Path) -> Parts:
    """EWT, the official split, then pages of enwik8: the first 80 % of bytes, 10 %, 10 %."""
    pages = _gz(data / "enwik8_head/enwik8-1m-chars.gz").split(b"  <page>")
    total, done = sum(map(len, pages)), 0
    parts: tuple[list[bytes], ...] = ([], [], [])
    for page in pages:
        parts[0 if done < 0.8 * total else 1 if done < 0.9 * total else 2].append(page)
        done += len(page)
    wiki = [b"  <page>".join(part) for part in parts]
    train, validation, heldout = (
        _ewt(data, name) + text for name, text in zip(("train", "dev", "test"), wiki, strict=True)
    )
    return train, validation, heldout


def _ewt(data: Path, part: str) -> bytes:
    start = b"# text = "
    lines = _gz(data / f"ud_english_ewt/en_ewt-ud-{part}.conllu.gz").splitlines()
    return b"".join(line[len(start) :] + b"\n" for line in lines if line.startswith(start))


TEXTS: dict[str, Callable[[Path], Parts]] = {
    "python": _python,
    "wikitext2": _wikitext2,
    "novels": _novels,
    "movie_reviews": _movie_reviews,
    "tatoeba_fr": functools.partial(_tatoeba, 1),
    "tatoeba_en": functools.partial(_tatoeba, 0),
    "multi30k_de": _multi30k,
    "web": _web,
}
"""Name -> how it is read from the data folder."""
