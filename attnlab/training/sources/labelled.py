"""The row `labelled`: texts with a class each."""

import dataclasses
import functools
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.tokenizer import make_tokenizer, num_tokens
from attnlab.training.sources.files import bucket, digest, lines_of, read_bytes
from attnlab.training.sources.rows import drawn, padded, spaced
from attnlab.training.sources.source import Batch, Sizes, Source

PARTS = ("train", "valid", "test")
FOLD = re.compile(r"cv(\d)\d\d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled:
    """Texts with a class each, of which `path` holds some in a form that `read_labelled` reads.

    The training part is learnt from, curves are of the validation part, the result of the test
    part. Of a text the first `length` tokens are read; how many texts are longer is told.
    """

    path: str = ""
    tokenizer: str = "bytes"

    def __post_init__(self):
        if self.path and not Path(self.path).exists():
            raise FileNotFoundError(f"there is no {self.path}; set data.path to labelled texts")

    @property
    def texts(self) -> list["Example"]:
        """What the path holds."""
        if not self.path:
            raise ValueError("set data.path to labelled texts")
        return read_labelled(Path(self.path))

    def sizes(self) -> Sizes:
        """Tokens and classes."""
        return Sizes(num_tokens(self.tokenizer), len({one.label for one in self.texts}))

    def shapes(self, length: int) -> Batch:
        """The tokens and the class of a text."""
        return {
            "tokens": jax.ShapeDtypeStruct((1, length), np.int32),
            "labels": jax.ShapeDtypeStruct((1,), np.int32),
        }

    def load(self, length: int, folder: Path | None = None) -> Source:
        """The first `length` tokens of each text."""
        texts = self.texts
        of = {part: [one for one in texts if one.part == part] for part in PARTS}
        tokenizer = make_tokenizer(self.tokenizer, [one.text for one in of["train"]], folder)
        classes = sorted({one.label for one in texts})
        rows, longer = {}, 0
        for part, some in of.items():
            encoded = [e.tokens for e in tokenizer.encode([one.text for one in some])]
            longer += sum(len(tokens) > length for tokens in encoded)
            labels = np.array([classes.index(one.label) for one in some], np.int32)
            rows[part] = {"tokens": padded(encoded, length), "labels": labels}

        def take(part: str, index: np.ndarray) -> Batch:
            return {name: a[index] for name, a in rows[part].items()}

        def scored(part: str, many: int) -> Batch:
            index = spaced(len(of[part]), many)
            return take(part, index) | {"valid": np.ones(len(index), bool)}

        def batch(seed: int, step: int, size: int, part: slice) -> Batch:
            return take("train", drawn(len(of["train"]), seed, step, size, part))

        def yardsticks() -> dict[str, dict[str, float]]:
            train, test = ([(one.text, one.label) for one in of[p]] for p in ("train", "test"))
            return {
                "accuracy": {
                    "majority class": 100 * majority(train, test),
                    "naive Bayes": 100 * naive_bayes(train, test),
                }
            }

        everything = (w.encode() for one in texts for w in one)
        return Source(
            name=f"{Path(self.path).stem}, {', '.join(classes)}",
            digest=digest([*everything, tokenizer.content, b"%d" % length]),
            sizes=self.sizes(),
            row_tokens=length,
            batch=batch,
            heldout=functools.partial(scored, "test"),
            validation=functools.partial(scored, "valid"),
            train=functools.partial(scored, "train"),
            write=tokenizer.decode,
            files=tokenizer.files,
            yardsticks=yardsticks,
            facts={
                **{f"{part} texts": len(some) for part, some in of.items()},
                "texts cut": longer,
                "tokenizer": self.tokenizer,
            },
        )


class Example(NamedTuple):
    """One text."""

    text: str
    label: str
    part: str
    """train, valid or test"""


@functools.lru_cache(maxsize=2)
def read_labelled(path: Path) -> list[Example]:
    r"""The examples of a folder, of a zip of one, or of one file.

    - Folders beside each other: each is a class, each of its files a text.
    - Files that differ in what stands behind the last dot alone (`rt-polarity.pos`, `.neg`):
      each is a class, each of its lines a text. Other files beside them are not read.
    - One file (or `.gz`): lines `class<TAB>text`.

    Files named `cv<three digits>` bring their authors' folds, by the first digit: 0 to 7 train, 8
    valid, 9 test (Pang and Lee 2004). All else is split by content, so that equal texts stay
    together: sha256 of the text modulo 10 is 0 for the test, 1 for the validation.

    Raises ValueError, naming file and line, for an empty text, a line without class and a byte that
    is not UTF-8, and where there are fewer than two classes or a part has no text.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; set data.path to labelled texts")
    whole = path.is_dir() or path.suffix == ".zip"
    found = _from_tree(_files(path), path) if whole else _from_lines(path)
    if len({text.label for text in found}) < 2:
        raise ValueError(f"{path}: fewer than two classes; there is nothing to tell apart")
    for part in PARTS:
        if not any(text.part == part for text in found):
            raise ValueError(f"{path}: no text falls into the part {part!r}; give more texts")
    return found


def _files(path: Path) -> dict[str, bytes]:
    """Name within the folder or zip -> content, the folders that hold all of it left out."""
    try:
        if path.is_dir():
            found = {
                p.relative_to(path).as_posix(): p.read_bytes()
                for p in sorted(path.rglob("*"))
                if p.is_file()
            }
        else:
            with zipfile.ZipFile(path) as archive:
                names = sorted(i.filename for i in archive.infolist() if not i.is_dir())
                found = {name: archive.read(name) for name in names}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    while len({name.partition("/")[0] for name in found}) == 1 and "/" in next(iter(found)):
        found = {name.partition("/")[2]: data for name, data in found.items()}
    return found


def _from_tree(files: dict[str, bytes], path: Path) -> list[Example]:
    folders = {name: data for name, data in files.items() if name.count("/") == 1}
    if folders:
        return [
            _text("\n".join(lines_of(data, path / name)), name.split("/")[0], path / name)
            for name, data in folders.items()
        ]
    stems = Counter(name.rpartition(".")[0] for name in files)
    several = [stem for stem, count in stems.items() if count > 1]
    if len(several) != 1:
        raise ValueError(
            f"{path} holds neither a folder a class nor one file a class (NAME.CLASS); it holds "
            f"{', '.join(list(files)[:5]) or 'nothing'}"
        )
    return [
        _text(line, name.rpartition(".")[2], f"{path / name}:{number}")
        for name, data in files.items()
        if name.rpartition(".")[0] == several[0]
        for number, line in enumerate(lines_of(data, path / name), 1)
    ]


def _from_lines(path: Path) -> list[Example]:
    found = []
    for number, line in enumerate(lines_of(read_bytes(path), path), 1):
        label, tab, text = line.partition("\t")
        if not (label.strip() and tab):
            raise ValueError(f"{path}:{number}: no class before a tab; write class<TAB>text")
        found.append(_text(text, label.strip(), f"{path}:{number}"))
    return found


def _text(text: str, label: str, where: object) -> Example:
    if not text.strip():
        raise ValueError(f"{where}: the text is empty; drop it")
    fold = FOLD.match(where.name) if isinstance(where, Path) else None
    number = 9 - int(fold[1]) if fold else bucket(text, 10)
    return Example(text.strip(), label, ("test", "valid", "train")[min(number, 2)])


def majority(train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> float:
    """Accuracy of the commonest label of the training part; a text is a pair (text, label).

    >>> majority([("good", "+"), ("fun", "+"), ("dull", "-")], [("fine", "+"), ("bad", "-")])
    0.5
    """
    commonest = Counter(label for _, label in train).most_common(1)[0][0]
    return sum(label == commonest for _, label in test) / len(test)


def naive_bayes(train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> float:
    """Accuracy of Bernoulli naive Bayes on whether a word occurs, both counts one more.

    p(class | text) ~ p(class) prod_w p(w in text | class) over all words of the training texts;
    words are what stands between white space.

    >>> naive_bayes([("good fun", "+"), ("dull", "-"), ("fun", "+")], [("fun", "+"), ("dull", "-")])
    1.0
    """
    words = {w: i for i, w in enumerate(sorted({w for text, _ in train for w in text.split()}))}
    labels = sorted({label for _, label in train})
    counts = np.ones((len(labels), len(words)))
    sizes = np.zeros(len(labels))
    for text, label in train:
        row = labels.index(label)
        counts[row, [words[w] for w in set(text.split())]] += 1
        sizes[row] += 1
    p = counts / (sizes[:, None] + 2)
    absent, ratio = np.log1p(-p).sum(1), np.log(p) - np.log1p(-p)
    prior = np.log(sizes) + absent
    right = 0
    for text, label in test:
        known = [words[w] for w in set(text.split()) if w in words]
        right += labels[int(np.argmax(prior + ratio[:, known].sum(1)))] == label
    return right / len(test)
