"""A treebank in CoNLL-U -> its sentences: the text, where each word stands in it, who depends on
whom and how. The format: universaldependencies.org/format.html."""

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

COLUMNS = 10
NUMBER = re.compile(r"\d+(-\d+|\.\d+)?")


class Tree(NamedTuple):
    """A sentence of W words."""

    text: str
    """As it was typed"""
    words: tuple[str, ...]
    """Their forms"""
    spans: np.ndarray
    """[W, 2]: from where to where in the text, in characters"""
    heads: np.ndarray
    """[W]: the word that each depends on, counted from 0; -1: the root, on none"""
    labels: tuple[str, ...]
    """How: nsubj, nmod:poss, ..."""


def read_trees(path: Path | str) -> list[Tree]:
    """The sentences of a file in CoNLL-U and UTF-8, compressed (`.gz`) or not.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file cannot be read, is not UTF-8, has no sentence, or is not of the format,
        with its name and the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "few.conllu")
    ...     _ = file.write_text("1\\tSee\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_\\n\\n")
    ...     print(read_trees(file)[0].text)
    See
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no treebank at {path}; give a .conllu or .conllu.gz file")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file"
        ) from None
    trees = list(parse_trees(io.StringIO(text, newline=None), str(path)))
    if not trees:
        raise ValueError(f"{path} holds no sentence")
    return trees


def treebank_parts(folder: Path | str) -> dict[str, Path]:
    """The files of a treebank by their part: "train", "dev", "test", as their names end.

    Hidden files, and others than `.conllu` and `.conllu.gz`, are left out.

    Raises:
      ValueError: two files are the same part.
      FileNotFoundError: there is no such folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "en_ewt-ud-dev.conllu").touch()
    ...     print(list(treebank_parts(folder)))
    ['dev']
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder {folder} of a treebank")
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("[!.]*.conllu*")):
        if not path.name.endswith((".conllu", ".conllu.gz")):
            continue
        part = path.name.partition(".conllu")[0].rpartition("-")[2]
        if part in found:
            raise ValueError(
                f"{folder} has two files of the part {part!r}, {found[part].name} and {path.name}; "
                "give a folder of one treebank, or one file"
            )
        found[part] = path
    return found


def parse_trees(lines: Iterable[str], name: str = "line") -> Iterator[Tree]:
    """The sentences of these lines.

    The text is put together again: a blank behind every token but where SpaceAfter=No stands. A
    token of several words ("3-4 don't") stands in the text once; where its words are its letters
    ("do", "n't") each has its own, else each has all of them. Empty nodes ("8.1") are no words.

    Args:
      lines: of a file in CoNLL-U, with their ends or without.
      name: of the file, for errors.

    Raises:
      ValueError: while it is read, at a line that is not of the format, or a sentence whose words
        are not numbered 1, 2, 3, ... or depend on a word that is not there.

    >>> rows = ["1-2 don't", "1 do 3 aux", "2 n't 3 advmod", "3 go 0 root", "3.1 home"]
    >>> cells = (row.split() + ["_"] * 3 for row in rows)
    >>> lines = ["\\t".join([a, b, *"____", c, d, *"__"]) for a, b, c, d, *_ in cells]
    >>> tree = next(parse_trees(lines))
    >>> tree.text, tree.spans.tolist(), tree.heads.tolist()
    ("don't go", [[0, 2], [2, 5], [6, 8]], [2, 2, -1])
    """
    rows: list[list[str]] = []
    number = 0
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r\n")
        if line and not line.startswith("#"):
            rows.append(line.split("\t"))
            if len(rows[-1]) != COLUMNS or not NUMBER.fullmatch(rows[-1][0]):
                raise ValueError(
                    f"{name}:{number}: no line of CoNLL-U, which has {COLUMNS} columns with tabs "
                    "between them and the number of the word in the first"
                )
        elif not line and rows:
            yield _tree(rows, f"{name}:{number}")
            rows = []
    if rows:
        yield _tree(rows, f"{name}:{number}")


def _tree(rows: list[list[str]], where: str) -> Tree:
    """One sentence; `where` it ends."""
    text, gap = "", ""
    until, inside = 0, (0, 0)  # the last word of the token that we are in, and where it stands
    found: list[tuple[str, tuple[int, int], str, str]] = []
    for number, form, *_, head, label, _, misc in rows:
        first, _, last = number.partition("-")
        if "." in number:
            continue
        if int(first) > until:
            text, start = text + gap + form, len(text + gap)
            gap = "" if "SpaceAfter=No" in misc.split("|") else " "
            until, inside = int(last or first), (start, len(text))
        if not last:
            found.append((form, inside, head, label))
    counted = [int(row[0]) for row in rows if row[0].isdecimal()]
    if not counted or counted != list(range(1, len(found) + 1)):
        shown = ", ".join(map(str, counted[:9])) + ", ..." * (len(counted) > 9)
        raise ValueError(
            f"the sentence before {where}: the numbers of its words are [{shown}], not 1, 2, 3, "
            "...; an empty line ends a sentence"
        )
    words, spans, heads, labels = zip(*found, strict=True)
    if not all(head.isdecimal() and int(head) <= len(words) for head in heads):
        raise ValueError(
            f"the sentence before {where}: a word depends on one that is not there; heads are 0 "
            "(the root) to the number of words"
        )
    apart = _letters(words, spans, text)
    return Tree(text, words, apart, np.array(heads, np.int32) - 1, labels)


def _letters(words: Sequence[str], spans: Sequence[tuple[int, int]], text: str) -> np.ndarray:
    """[W, 2]: words that share a token have its letters to themselves where they are its parts."""
    found: list[tuple[int, int]] = []
    for (start, end), token in itertools.groupby(zip(spans, words, strict=True), lambda w: w[0]):
        forms = [word for _, word in token]
        if "".join(forms) == text[start:end]:
            ends = list(itertools.accumulate(map(len, forms), initial=start))
            found += itertools.pairwise(ends)
        else:
            found += [(start, end)] * len(forms)
    return np.array(found, np.int32).reshape(-1, 2)
