"""Datasets of short texts: with a class each (`labelled`), aligned in two languages (`pairs`)."""

import dataclasses
import functools
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attnlab.data import files
from attnlab.data.batching import dataset_of_rows, pad_rows, rows_of
from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes
from attnlab.data.files import bucket, check_path
from attnlab.data.text import gzip_bits, unigram_bits
from attnlab.data.tokenizer import Tokenizer, make_tokenizer, num_tokens
from attnlab.fields import Spec

SPLITS = ("train", "valid", "test")
FOLD = re.compile(r".*/cv(\d)\d\d[^/:]*")
"""A file that is one text; its first digit is the fold."""


def _dataset(
    rows: Sequence[Batch], tokenizer: Tokenizer, texts: Iterable[str], length: int, **fields: Any
) -> Dataset:
    """The dataset of the rows of each split (`SPLITS`), which were made of `texts`."""
    contents = (text.encode() for text in texts)
    return dataset_of_rows(
        dict(zip(("train", "validation", "heldout"), map(rows_of, rows), strict=True)),
        digest=files.digest([*contents, tokenizer.content, b"%d" % length]),
        decode=tokenizer.decode,
        files=tokenizer.files,
        **fields,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled(Spec, prefix="data."):
    """Texts with a class each.

    Training reads the training split, learning curves the validation split, the result the test
    split. The first `length` tokens of a text are read; how many texts are longer is reported.

    Attributes:
      path: a folder, zip or file of texts, in one of the forms that `read_labelled` lists.
      tokenizer: "bytes", "bpe:N" (learnt from the training split) or the path of a tokenizer.json.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for label, text in (("neg", "dull"), ("pos", "fun")):
    ...         Path(folder, label).mkdir()
    ...         for name in ("cv000", "cv800", "cv900"):  # train, valid, test
    ...             _ = Path(folder, label, name).write_text(text)
    ...     rows = Labelled(path=folder).load(4).heldout(0)
    >>> rows["tokens"].tolist(), rows["labels"].tolist()
    ([[100, 117, 108, 108], [102, 117, 110, -1]], [0, 1])
    """

    path: str = ""
    tokenizer: str = "bytes"

    def sizes(self) -> DataSizes:
        """Tokens and classes."""
        labels = {text.label for text in read_labelled(self.path)}
        return DataSizes(num_tokens(self.tokenizer), len(labels))

    def shapes(self, length: int) -> BatchShapes:
        """The tokens and the class of a text."""
        return {
            "tokens": jax.ShapeDtypeStruct((1, length), np.int32),
            "labels": jax.ShapeDtypeStruct((1,), np.int32),
        }

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """The first `length` tokens of each text.

        Args:
          length: tokens of a row; a shorter text ends with -1.
          folder: where a tokenizer that was learnt before is found; None: it is learnt.

        Raises:
          FileNotFoundError: there is nothing at `path`, or no such tokenizer.json.
          ValueError: no `path`; or `read_labelled` or `make_tokenizer` raises it.
          ModuleNotFoundError: a tokenizer other than "bytes" without the package tokenizers.
        """
        texts = read_labelled(self.path)
        splits = [[text for text in texts if text.split == split] for split in SPLITS]
        train, _, test = splits
        tokenizer = make_tokenizer(self.tokenizer, [text.text for text in train], folder)
        classes = sorted({text.label for text in texts})
        rows: list[Batch] = []
        truncated = 0
        for some in splits:
            tokens = tokenizer.ids([text.text for text in some])
            truncated += sum(len(one) > length for one in tokens)
            labels = np.array([classes.index(text.label) for text in some], np.int32)
            rows.append({"tokens": pad_rows(tokens, length), "labels": labels})
        counts = {f"{n} texts": len(some) for n, some in zip(SPLITS, splits, strict=True)}
        return _dataset(
            rows,
            tokenizer,
            (field for text in texts for field in text),
            length,
            name=f"{Path(files.last_name(self.path)).stem}, {', '.join(classes)}",
            sizes=self.sizes(),
            row_tokens=length,
            baselines=functools.partial(_class_baselines, train, test),
            facts={**counts, "texts cut": truncated, "tokenizer": self.tokenizer},
        )


class LabelledText(NamedTuple):
    """One text; the split is train, valid or test."""

    text: str
    label: str
    split: str


def _class_baselines(train: list[LabelledText], test: list[LabelledText]) -> Baselines:
    commonest = Counter(text.label for text in train).most_common(1)[0][0]
    majority = sum(text.label == commonest for text in test) / len(test)
    known = {"majority class": 100 * majority, "naive Bayes": 100 * naive_bayes(train, test)}
    return {"accuracy": known}


def read_labelled(path: str | Path) -> list[LabelledText]:
    r"""The examples of a folder, of a zip of one, or of one file; hidden files are left out.

    - Folders beside each other: each is a class, each of its files a text.
    - Files that differ in what stands behind the last dot alone (`rt-polarity.pos`, `.neg`):
      each is a class, each of its lines a text. Other files beside them are not read.
    - One file (or `.gz`): lines `class<TAB>text`.

    Files named `cv<three digits>` bring their authors' folds, by the first digit: 0 to 7 train, 8
    valid, 9 test (Pang and Lee 2004). All else is split by content, so that equal texts stay
    together: sha256 of the text, with the blanks at its ends, modulo 10 is 0 for the test, 1 for
    the validation.

    Raises ValueError, naming file and line, for an empty text, a line without class and a byte that
    is not UTF-8, and where there are fewer than two classes or a part has no text.
    """
    if not path:
        raise ValueError("set data.path to labelled texts")
    check_path(str(path), "text", "set data.path to labelled texts")
    return _read(Path(path), files.stamp(Path(path)))


@functools.lru_cache(maxsize=2)  # the variants of a sweep read the same texts
def _read(path: Path, stamp: files.Stamp) -> list[LabelledText]:
    found = []
    for where, label, text in _examples(path):
        if not label:
            raise ValueError(f"{where}: no class before a tab; write class<TAB>text")
        if not text.strip():
            raise ValueError(f"{where}: the text is empty; remove the line")
        fold = FOLD.fullmatch(where)
        number = 9 - int(fold[1]) if fold else bucket(text, 10)
        found.append(LabelledText(text.strip(), label, ("test", "valid", "train")[min(number, 2)]))
    if len({text.label for text in found}) < 2:
        raise ValueError(f"{path}: fewer than two classes; give texts of at least two")
    if missing := {*SPLITS} - {text.split for text in found}:
        raise ValueError(f"{path}: no text falls into the split {min(missing)}; give more texts")
    return found


def _examples(path: Path) -> Iterator[tuple[str, str, str]]:
    """(file or file:line, class, text) of every example."""
    if path.is_file() and path.suffix != ".zip":
        for number, line in enumerate(files.read_lines(path), 1):
            label, tab, text = line.partition("\t")
            yield f"{path}:{number}", label.strip() if tab else "", text
        return
    contents = _contents(path)
    top = f"{os.path.commonpath(contents)}/" if len(contents) > 1 else ""  # what holds all of them
    named = {name.removeprefix(top): content for name, content in contents.items()}
    folders = [name for name in named if name.count("/") == 1]
    stems = Counter(name.rpartition(".")[0] for name in named)
    several = [stem for stem, count in stems.items() if stem and count > 1]
    if not folders and len(several) != 1:
        raise ValueError(
            f"{path} holds neither a folder a class nor one file a class (NAME.CLASS); it holds "
            f"{', '.join(list(named)[:5]) or 'nothing'}"
        )
    for name in folders or [name for name in named if name.rpartition(".")[0] == several[0]]:
        where = f"{path / name}"
        lines = files.split_lines(files.check_text(named[name], where), where)
        if folders:
            yield where, name.split("/")[0], "\n".join(lines)
            continue
        for number, line in enumerate(lines, 1):
            yield f"{where}:{number}", name.rpartition(".")[2], line


def _contents(path: Path) -> dict[str, bytes]:
    """Name -> content of each visible file in a folder or zip, sorted."""
    try:
        if path.is_dir():
            found = files.visible_files(path)
            return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist(), key=lambda name: name.split("/"))
            seen = [n for n in names if not n.endswith("/") and "/." not in f"/{n}"]
            return {name: archive.read(name) for name in seen}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def naive_bayes(train: Sequence[LabelledText], test: Sequence[LabelledText]) -> float:
    """Accuracy of Bernoulli naive Bayes on whether a word occurs, both counts one more.

    p(class | text) ~ p(class) prod_w p(w in text | class) over all words of the training texts;
    words are what stands between white space.

    >>> train = [LabelledText(t, c, "") for t, c in (("good fun", "+"), ("dull", "-"))]
    >>> naive_bayes(train, [LabelledText("fun", "+", ""), LabelledText("dull", "-", "")])
    1.0
    """
    words = {w: i for i, w in enumerate(sorted({w for one in train for w in one.text.split()}))}
    labels = sorted({one.label for one in train})
    counts = np.ones((len(labels), len(words)))
    sizes = np.zeros(len(labels))
    for one in train:
        row = labels.index(one.label)
        counts[row, [words[w] for w in set(one.text.split())]] += 1
        sizes[row] += 1
    p = counts / (sizes[:, None] + 2)
    absent, ratio = np.log1p(-p).sum(1), np.log(p) - np.log1p(-p)
    prior = np.log(sizes) + absent
    right = 0
    for one in test:
        known = [words[w] for w in set(one.text.split()) if w in words]
        right += labels[int(np.argmax(prior + ratio[:, known].sum(1)))] == one.label
    return right / len(test)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Spec, prefix="data."):
    """Pairs of lines in two languages: the second is predicted, given the first.

    One tokenizer, trained on both sides, reads both. Training pairs with a side of more than
    `length` tokens are left out and counted; of the other parts every pair is scored, in rows as
    long as the longest.

    Attributes:
      path: a folder with the files `<part>.<language>`, plain or compressed (`.gz`).
      languages: of source and target, with a hyphen between them, as the names of the files end.
      parts: names of the training, validation and test part, separated by commas, or of one part
        that is split here (see `find_pairs`).
      tokenizer: "bytes", "bpe:N" (learnt from the training part) or the path of a tokenizer.json.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for part in ("train", "valid", "test"):
    ...         for language, line in (("en", "a cat"), ("de", "die Katze")):
    ...             _ = Path(folder, f"{part}.{language}").write_text(line)
    ...     rows = Pairs(path=folder).load(16).heldout(0)
    >>> {name: a.shape for name, a in rows.items()}  # the end of the target is a byte too
    {'valid': (1,), 'source': (1, 9), 'target': (1, 9), 'bytes': (1, 10)}
    """

    path: str = ""
    languages: str = "en-de"
    parts: str = "train,valid,test"
    tokenizer: str = "bytes"

    def sizes(self) -> DataSizes:
        """The tokens."""
        check_path(self.path, "folder", "set data.path to that of the files", folder=True)
        return DataSizes(num_tokens(self.tokenizer))

    def shapes(self, length: int) -> BatchShapes:
        """Both sides, and the bytes of each target."""
        row = jax.ShapeDtypeStruct((1, length), np.int32)
        sizes = jax.ShapeDtypeStruct((1, length + 1), np.float32)
        return {"source": row, "target": row, "bytes": sizes}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Both sides of at most `length` tokens.

        Args:
          length: tokens of a side of a training pair, at most; a shorter one ends with -1.
          folder: where a tokenizer that was learnt before is found; None: it is learnt.

        Raises:
          FileNotFoundError: there is no folder `path`, no file of a part, or no such
            tokenizer.json.
          ValueError: no `path`; every training pair is longer than `length`; or `find_pairs` or
            `make_tokenizer` raises it.
          ModuleNotFoundError: a tokenizer other than "bytes" without the package tokenizers.
        """
        if not self.path:
            raise ValueError("set data.path to a folder of aligned files")
        pairs = find_pairs(Path(self.path), self.languages.split("-"), self.parts.split(","))
        lines = [line for some in pairs.values() for pair in some for line in pair]
        tokenizer = make_tokenizer(self.tokenizer, lines[: 2 * len(pairs["train"])], folder)
        rows = [_rows(pairs[n], tokenizer, length if n == "train" else None) for n in SPLITS]
        left_out = len(pairs["train"]) - len(rows[0]["source"])
        if left_out == len(pairs["train"]):
            raise ValueError(f"every training pair is longer than {length}; raise train.length")
        counts = {f"{split} pairs": len(some) for split, some in pairs.items()}
        left = {"training pairs left out as too long": left_out, "tokenizer": self.tokenizer}
        return _dataset(
            rows,
            tokenizer,
            lines,
            length,
            name=f"{files.last_name(self.path)} {self.languages}",
            sizes=self.sizes(),
            row_tokens=2 * length,
            baselines=functools.partial(_pair_baselines, pairs["test"]),
            facts={**counts, **left},
        )


def _rows(pairs: list["Pair"], tokenizer: Tokenizer, length: int | None) -> Batch:
    """Both sides of the pairs with at most `length` tokens; None: of all pairs."""
    source, target = (tokenizer.encode(side) for side in zip(*pairs, strict=True))
    sides = zip(source, target, strict=True)
    longest = np.array([max(len(a.tokens), len(b.tokens)) for a, b in sides])
    length = int(longest.max()) if length is None else length
    kept = np.flatnonzero(longest <= length)
    # The end of a row stands for the end of the line, which is a byte too.
    sizes = pad_rows([np.append(target[i].sizes, 1) for i in kept], length + 1)
    return {
        "source": pad_rows([source[i].tokens for i in kept], length),
        "target": pad_rows([target[i].tokens for i in kept], length),
        "bytes": np.maximum(sizes, 0).astype(np.float32),
    }


def _pair_baselines(pairs: list["Pair"]) -> Baselines:
    text = "".join(pair.target + "\n" for pair in pairs).encode()
    tokens = np.frombuffer(text, np.uint8)
    known = {"unigram entropy": unigram_bits(tokens), "gzip -9": gzip_bits(tokens)}
    return {"bits_per_target_byte": known}


class Pair(NamedTuple):
    """One line of each file."""

    source: str
    target: str


def read_pairs(source: Path, target: Path) -> list[Pair]:
    """The lines of two files side by side.

    Raises ValueError where the files have different numbers of lines, and that names file and line
    where a line is empty or not UTF-8.
    """
    sides = {path: files.read_lines(path) for path in (source, target)}
    ours, theirs = map(len, sides.values())
    if ours != theirs:
        raise ValueError(f"{source} has {ours} lines, {target} {theirs}; give one for each line")
    for path, lines in sides.items():
        if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
            raise ValueError(f"{path}:{empty[0]}: the line is empty; remove it from both files")
    return list(map(Pair, *sides.values()))


def find_pairs(
    folder: Path, languages: Sequence[str], parts: Sequence[str]
) -> dict[str, list[Pair]]:
    """part of `SPLITS` -> its pairs, from the files `<part>.<language>` of a folder, or `.gz`.

    `parts` names the files of the three parts; one name alone is split here: the pairs of a source
    line go to the test where sha256 of the line is 0 modulo 100, to the validation where it is 1,
    so that equal source lines stay together. Raises ValueError as `read_pairs` does, and where a
    part has no pair.
    """
    if len(languages) != 2 or len(parts) not in (1, 3):
        raise ValueError(
            f"data.languages {languages!r} and data.parts {parts!r} must name 2 languages, and "
            "1 part or 3 (train, valid, test)"
        )
    one, two = languages
    read = [read_pairs(_part_file(folder, n, one), _part_file(folder, n, two)) for n in parts]
    if len(read) == 1:
        places = [min(bucket(pair.source, 100), 2) for pair in read[0]]
        read = [[p for p, at in zip(read[0], places, strict=True) if at == n] for n in (2, 1, 0)]
    found = dict(zip(SPLITS, read, strict=True))
    if empty := [part for part, pairs in found.items() if not pairs]:
        raise ValueError(f"{folder}: no pair for the part {empty[0]!r}; give more lines")
    return found


def _part_file(folder: Path, stem: str, language: str) -> Path:
    path = folder / f"{stem}.{language}"
    path = path if path.exists() else path.with_name(f"{path.name}.gz")
    check_path(str(path), "file", "set data.path, data.parts and data.languages")
    return path
