"""Dataset `pairs`: two aligned files; line n of one is the translation of line n of the other."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.data.batching import epoch_indices, pad_rows, scored_rows, select_rows
from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes
from attnlab.data.files import bucket, check_path, digest, read_lines
from attnlab.data.text import gzip_bits, unigram_bits
from attnlab.data.tokenizer import Tokenizer, make_tokenizer, num_tokens

SPLITS = ("train", "valid", "test")
PATH_ADVICE = "set data.path to that of the files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
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
    {'source': (1, 9), 'target': (1, 9), 'bytes': (1, 10), 'valid': (1,)}
    """

    path: str = ""
    languages: str = "en-de"
    parts: str = "train,valid,test"
    tokenizer: str = "bytes"

    def sizes(self) -> DataSizes:
        """The tokens."""
        check_path(self.path, "folder", PATH_ADVICE, folder=True)
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
        check_path(self.path, "folder", PATH_ADVICE, folder=True)
        pairs = find_pairs(Path(self.path), self.languages.split("-"), self.parts.split(","))
        lines = [line for pair in pairs["train"] for line in pair]
        tokenizer = make_tokenizer(self.tokenizer, lines, folder)
        train, left_out = _rows(pairs["train"], tokenizer, length)
        if left_out == len(pairs["train"]):
            raise ValueError(
                f"every training pair has more than {length} tokens a side; raise train.length"
            )
        count = len(train["source"])

        def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
            return select_rows(train, epoch_indices(count, seed, step, size, shard))

        contents = (line.encode() for split in pairs.values() for pair in split for line in pair)
        return Dataset(
            name=f"{Path(self.path).name} {self.languages}",
            digest=digest([*contents, tokenizer.content, b"%d" % length]),
            sizes=self.sizes(),
            row_tokens=2 * length,
            batches=batch,
            heldout=functools.partial(scored_rows, _rows(pairs["test"], tokenizer, None)[0]),
            validation=functools.partial(scored_rows, _rows(pairs["valid"], tokenizer, None)[0]),
            train=functools.partial(scored_rows, train),
            decode=tokenizer.decode,
            files=tokenizer.files,
            baselines=functools.partial(_baselines, pairs["test"]),
            facts={
                **{f"{split} pairs": len(some) for split, some in pairs.items()},
                "training pairs left out as too long": left_out,
                "tokenizer": self.tokenizer,
            },
        )


def _rows(pairs: list["Pair"], tokenizer: Tokenizer, length: int | None) -> tuple[Batch, int]:
    """(both sides of the pairs with at most `length` tokens (None: all), how many have more)."""
    sides = [tokenizer.encode(side) for side in zip(*pairs, strict=True)]
    longest = np.array([max(len(e.tokens) for e in both) for both in zip(*sides, strict=True)])
    length = int(longest.max()) if length is None else length
    kept = np.flatnonzero(longest <= length)
    source, target = ([side[i] for i in kept] for side in sides)
    sizes = pad_rows([np.append(e.sizes, 1) for e in target], length + 1)
    rows = {
        "source": pad_rows([e.tokens for e in source], length),
        "target": pad_rows([e.tokens for e in target], length),
        # The end of a row stands for the end of the line, which is a byte too.
        "bytes": np.maximum(sizes, 0).astype(np.float32),
    }
    return rows, len(pairs) - len(kept)


def _baselines(pairs: list["Pair"]) -> Baselines:
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

    Raises ValueError that names file and line where the files have different numbers of lines,
    where a line is empty, and where one is not UTF-8.
    """
    sides = {path: read_lines(path) for path in (source, target)}
    (one, ours), (two, theirs) = sides.items()
    if len(ours) != len(theirs):
        short, other = (one, two) if len(ours) < len(theirs) else (two, one)
        raise ValueError(
            f"{short}:{len(sides[short])}: the file ends here, {other} has "
            f"{len(sides[other])} lines; give files that are aligned line by line"
        )
    for path, lines in sides.items():
        for number, line in enumerate(lines, 1):
            if not line.strip():
                raise ValueError(f"{path}:{number}: the line is empty; remove it from both files")
    return [Pair(*both) for both in zip(ours, theirs, strict=True)]


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
    read = [
        read_pairs(*(_file(folder, part, language) for language in languages)) for part in parts
    ]
    if len(read) == 1:
        split: dict[int, list[Pair]] = {0: [], 1: [], 2: []}
        for pair in read[0]:
            split[min(bucket(pair.source, 100), 2)].append(pair)
        read = [split[2], split[1], split[0]]
    found = dict(zip(SPLITS, read, strict=True))
    for part, pairs in found.items():
        if not pairs:
            raise ValueError(f"{folder}: no pair for the part {part!r}; give more lines")
    return found


def _file(folder: Path, stem: str, language: str) -> Path:
    names = [folder / f"{stem}.{language}{end}" for end in ("", ".gz")]
    found = [path for path in names if path.exists()]
    if not found:
        raise FileNotFoundError(
            f"there is no {names[0]} and no {names[1].name}; set data.path, data.parts and "
            "data.languages so that they name files"
        )
    return found[0]
