"""Dataset `text`: a text, cut into windows of tokens."""

import dataclasses
import functools
import gzip
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.data.batching import random_starts, window_starts
from attnlab.data.dataset import BYTES, Baselines, Batch, BatchShapes, Dataset, DataSizes
from attnlab.data.files import bucket, check_path, read_bytes, visible_files
from attnlab.data.tokenizer import (
    FILE,
    Encoded,
    Tokenizer,
    make_tokenizer,
    num_tokens,
    text_of_bytes,
)
from attnlab.fields import Spec, bounded

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text split into training, held-out and perhaps validation part, as bytes."""

    name: str
    train: np.ndarray = dataclasses.field(compare=False)
    heldout: np.ndarray = dataclasses.field(compare=False)
    sha256: str
    """Of the whole text in its own order, and of the split where that is chosen."""
    validation: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        parts = (self.train, self.heldout, self.validation)
        return sum(len(part) for part in parts if part is not None)

    def with_validation(self, share: float) -> "Corpus":
        """With this share of the training part, at its end, as validation part."""
        if not share:
            return self
        end = int(len(self.train) * (1 - share))
        sha256 = hashlib.sha256(f"{self.sha256} {share}".encode()).hexdigest()
        train, validation = self.train[:end], self.train[end:]
        return dataclasses.replace(self, sha256=sha256, train=train, validation=validation)


PATH_ADVICE = "leave data.path empty for the default corpus"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Spec, prefix="data."):
    """A text, to be predicted token by token; losses are reported in bits per byte.

    Of the default text, the standard library of the running interpreter, whole files are held out:
    those whose relative path hashes to 0 modulo 10. Of any other text the last 10 % are held out.

    Attributes:
      path: a file, or a folder whose files are read in the order of their paths, hidden ones left
        out; `.gz` is decompressed, a byte-order mark dropped, and other packed or binary files are
        refused. "": the standard library of the running interpreter.
      tokenizer: "bytes", "bpe:N" (learnt from the training part) or the path of a tokenizer.json;
        all but bytes need UTF-8, and leave out the rest of a character that the split cuts.
      validation: the share of the training part, at its end, that is scored for learning curves and
        for choosing learning rates, in place of the held-out part; 0: there is none.

    Raises:
      ValueError: `validation` is not at least 0 and below 1.

    >>> dataset = Text().load(64)
    >>> dataset.batches(0, 1, 8, slice(0, 2))["tokens"].shape
    (2, 65)
    """

    path: str = ""
    tokenizer: str = "bytes"
    validation: float = bounded(0.0, least=0.0, below=1.0)

    def sizes(self) -> DataSizes:
        """The tokens."""
        check_path(self.path, "text", PATH_ADVICE)
        return DataSizes(num_tokens(self.tokenizer))

    def shapes(self, length: int) -> BatchShapes:
        """Windows of `length` + 1 tokens."""
        return {"tokens": jax.ShapeDtypeStruct((1, length + 1), np.int32)}

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Windows of `length` + 1 tokens.

        Args:
          length: targets of a window.
          folder: where a tokenizer that was learnt before is found; None: it is learnt.

        Raises:
          FileNotFoundError: there is nothing at `path`, or no such tokenizer.json.
          ValueError: a file cannot be read, or is packed or binary; there is no text, or a part is
            shorter than one window; a text that is to be tokenised is not UTF-8, with file and
            line; or `make_tokenizer` raises it.
          ModuleNotFoundError: a tokenizer other than "bytes" without the package tokenizers.
        """
        check_path(self.path, "text", PATH_ADVICE)
        corpus = load_corpus(self.path, utf8=self.tokenizer != "bytes")
        corpus = corpus.with_validation(self.validation)
        dataset = dataset_of_corpus(corpus, length)
        if self.tokenizer != "bytes":
            dataset = _tokenized(dataset, corpus, length, self.tokenizer, folder)
        for part in ("training", "validation", "held-out"):
            count = dataset.facts.get(f"{part} tokens", length + 1)
            if isinstance(count, int) and count <= length:
                raise ValueError(
                    f"{corpus.name}: the {part} text has {count} tokens, too short for one window "
                    f"of {length} + 1; give a longer text or a smaller length"
                )
        return dataset


def load_corpus(path: str = "", *, utf8: bool = False) -> Corpus:
    """The text at `path`, split as `Text` says; with `utf8` a ValueError unless it is UTF-8."""
    return _read_text(Path(path), utf8) if path else _standard_library(utf8)


def dataset_of_corpus(corpus: Corpus, length: int) -> Dataset:
    """The windows of a text, byte by byte."""
    validation = corpus.validation

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        return {"tokens": sample(corpus.train, length, size, seed=seed, step=step, shard=shard)}

    def scored(text: np.ndarray, count: int) -> Batch:
        tokens, valid = windows(text, length, count)
        return {"tokens": tokens, "valid": valid}

    def baselines() -> Baselines:
        bits = {"unigram entropy": unigram_bits(corpus.heldout)}
        return {"bits_per_byte": bits | {"gzip -9": gzip_bits(corpus.heldout)}}

    return Dataset(
        name=corpus.name,
        digest=corpus.sha256,
        sizes=BYTES,
        row_tokens=length,
        batches=batch,
        heldout=functools.partial(scored, corpus.heldout),
        validation=functools.partial(scored, validation) if validation is not None else None,
        train=functools.partial(scored, corpus.train),
        decode=decode_bytes,
        baselines=baselines,
        facts={
            "bytes": corpus.num_bytes,
            "held-out bytes": len(corpus.heldout),
            "training tokens": len(corpus.train),
            **({} if validation is None else {"validation tokens": len(validation)}),
            "held-out tokens": len(corpus.heldout),
        },
    )


def _tokenized(
    plain: Dataset, corpus: Corpus, length: int, name: str, folder: Path | None
) -> Dataset:
    """The same text in the tokens of a tokenizer, with the bytes that each target stands for."""
    is_kept = folder is not None and (folder / FILE).exists()
    text = _tokenize(corpus, name, folder if is_kept else None)
    tokenizer = text.tokenizer

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        tokens = text.train.tokens
        return {"tokens": sample(tokens, length, size, seed=seed, step=step, shard=shard)}

    def scored(encoded: Encoded, count: int) -> Batch:
        tokens, valid = windows(encoded.tokens, length, count)
        sizes, _ = windows(encoded.sizes, length, count)
        return {"tokens": tokens, "valid": valid, "bytes": sizes[:, 1:].astype(np.float32)}

    def baselines() -> Baselines:
        tokens, sizes = text.heldout
        entropy = float(unigram_bits(tokens) * len(tokens) / sizes.sum())
        known = plain.baselines()["bits_per_byte"]
        return {"bits_per_byte": known | {"unigram entropy of the tokens": entropy}}

    lossy = (
        "" if text.exact else " (it loses some of the text: the bits are those of what it keeps)"
    )
    validation = len(text.validation.tokens)
    return dataclasses.replace(
        plain,
        digest=hashlib.sha256(f"{corpus.sha256} {tokenizer.digest}".encode()).hexdigest(),
        sizes=DataSizes(tokenizer.size),
        batches=batch,
        heldout=functools.partial(scored, text.heldout),
        validation=functools.partial(scored, text.validation) if validation else None,
        train=functools.partial(scored, text.train),
        decode=lambda tokens: repr(tokenizer.decode(tokens))[1:-1],
        baselines=baselines,
        files=tokenizer.files,
        facts=plain.facts
        | {
            "training tokens": len(text.train.tokens),
            **({"validation tokens": validation} if validation else {}),
            "held-out tokens": len(text.heldout.tokens),
            "tokenizer": name + lossy,
            "its sha256": tokenizer.digest[:12],
        },
    )


PIECE = 1 << 16
"""Bytes that are tokenised at a time, up to the end of a line: many pieces keep all cores busy."""


def _pieces(text: np.ndarray) -> list[str]:
    """The text without incomplete characters at its ends, cut after line ends."""
    data = text.astype(np.uint8).tobytes()
    whole = data.decode("utf-8", "ignore").encode()  # only the ends can be incomplete
    pieces, start = [], 0
    while start < len(whole):
        end = whole.find(b"\n", start + PIECE) + 1 or len(whole)
        pieces.append(whole[start:end].decode())
        start = end
    return pieces


class _TokenizedText(NamedTuple):
    """The parts of a corpus in tokens."""

    tokenizer: Tokenizer
    train: Encoded
    heldout: Encoded
    validation: Encoded
    exact: bool
    """Does decoding give the held-out part back?"""


@functools.lru_cache(maxsize=1)  # the runs of a sweep read one text
def _tokenize(corpus: Corpus, name: str, folder: Path | None) -> _TokenizedText:
    validation = np.zeros(0, np.int32) if corpus.validation is None else corpus.validation
    parts = [_pieces(text) for text in (corpus.train, corpus.heldout, validation)]
    tokenizer = make_tokenizer(name, parts[0], folder)
    encoded = [tokenizer.encode(texts) if texts else [] for texts in parts]
    exact = all(
        tokenizer.decode(one.tokens.tolist()) == text
        for one, text in zip(encoded[1], parts[1], strict=True)
    )
    train, heldout, valid = map(_concatenate, encoded)
    return _TokenizedText(tokenizer, train, heldout, valid, exact)


def _concatenate(pieces: Sequence[Encoded]) -> Encoded:
    empty = np.zeros(0, np.int32)
    tokens, sizes = zip(*(pieces or [Encoded(empty, empty)]), strict=True)
    return Encoded(np.concatenate(tokens), np.concatenate(sizes))


def decode_bytes(tokens: Sequence[int]) -> str:
    r"""Bytes as text on one line; raises ValueError for what is no byte.

    >>> decode_bytes(b"a\nb")
    'a\\nb'
    """
    return repr(text_of_bytes(tokens))[1:-1]


def windows(text: np.ndarray, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` evenly spaced windows [W, length + 1], or with count 0 the whole text once.

    The second array [W, length] is True where a target counts. In the whole text every byte but
    the first is a target exactly once; the last window is filled up with zeros that do not count.
    """
    starts = window_starts(len(text), length, count)
    index = starts[:, None] + np.arange(length + 1)
    valid = index < len(text)
    return np.where(valid, text[np.minimum(index, len(text) - 1)], 0), valid[:, 1:]


def sample(
    text: np.ndarray, length: int, size: int, *, seed: int, step: int, shard: slice = slice(None)
) -> np.ndarray:
    """Rows `shard` of the batch of `step`: random windows [of `size`, length + 1]."""
    starts = random_starts(len(text), length, size, seed=seed, step=step, shard=shard)
    rows: np.ndarray = text[starts[:, None] + np.arange(length + 1)]
    return rows


def unigram_bits(text: np.ndarray) -> float:
    """Entropy of the frequencies of tokens, bits each: what a model without context can reach."""
    p = np.bincount(text) / len(text)
    p = p[p > 0]
    return float(-np.sum(p * np.log2(p)))


def gzip_bits(text: np.ndarray) -> float:
    """Size under gzip -9, bits per byte."""
    data = text.astype(np.uint8).tobytes()
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def _standard_library(utf8: bool) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        if not SKIPPED_FOLDERS & set(Path(name).parts[:-1]):
            text = path.read_bytes()
            _check_utf8(path, text, utf8)
            whole.update(text)
            parts[bucket(name, 10) == 0].append(text)
    name = f"Python {sysconfig.get_python_version()} standard library"
    train, heldout = (_as_tokens(b"".join(parts[held])) for held in (False, True))
    return Corpus(name, train, heldout, whole.hexdigest())


def _read_text(path: Path, utf8: bool) -> Corpus:
    files = visible_files(path) if path.is_dir() else [path]
    parts = []
    for file in files:
        data = read_bytes(file)
        _check_utf8(file, data, utf8)
        parts.append(data)
    text = b"".join(parts)
    if not text:
        raise ValueError(f"{path} holds no text; give a text file or a folder of them")
    end, sha256 = int(len(text) * 0.9), hashlib.sha256(text).hexdigest()
    return Corpus(path.name, _as_tokens(text[:end]), _as_tokens(text[end:]), sha256)


def _as_tokens(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).astype(np.int32)


def _check_utf8(file: Path, data: bytes, utf8: bool) -> None:
    try:
        data.decode() if utf8 else None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, or "
            "read it as bytes (data.tokenizer=bytes)"
        ) from None
