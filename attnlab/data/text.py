"""Dataset `text`: a text, cut into windows of tokens."""

import dataclasses
import functools
import gzip
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from attnlab.data.batching import random_starts, window_starts
from attnlab.data.dataset import BYTES, Baselines, Batch, BatchShapes, Dataset, DataSizes, Fact
from attnlab.data.files import (
    Arrays,
    bucket,
    check_path,
    kept,
    read_bytes,
    split_lines,
    stamp,
    visible_files,
)
from attnlab.data.tokenizer import (
    FILE,
    Tokenizer,
    make_tokenizer,
    num_tokens,
    read_tokenizer,
    text_of_bytes,
)
from attnlab.fields import Spec, bounded

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Tokens: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""A part of a text in tokens, and the bytes that each stands for; None: one."""


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
    def parts(self) -> dict[str, np.ndarray]:
        """Name -> the bytes of each part that there is."""
        middle = {} if self.validation is None else {"validation": self.validation}
        return {"training": self.train, **middle, "held-out": self.heldout}

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(map(len, self.parts.values()))

    def with_validation(self, share: float) -> "Corpus":
        """With this share of the training part, at its end, as validation part."""
        if not share:
            return self
        end = int(len(self.train) * (1 - share))
        sha256 = hashlib.sha256(f"{self.sha256} {share}".encode()).hexdigest()
        train, validation = self.train[:end], self.train[end:]
        return dataclasses.replace(self, sha256=sha256, train=train, validation=validation)


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
        check_path(self.path, "text", "leave data.path empty for the default corpus")
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
        self.sizes()
        corpus = load_corpus(self.path, utf8=self.tokenizer != "bytes")
        corpus = corpus.with_validation(self.validation)
        if self.tokenizer == "bytes":
            return dataset_of_corpus(corpus, length)
        is_kept = folder is not None and (folder / FILE).exists()
        text = _tokenize(corpus, self.tokenizer, folder if is_kept else None)
        return dataset_of_corpus(corpus, length, text)


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """The parts of a corpus in tokens."""

    name: str
    """Of the tokenizer, as it is asked for."""
    tokenizer: Tokenizer
    parts: dict[str, Tokens]
    is_exact: bool
    """Does decoding give the held-out part back?"""

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text on one line."""
        return repr(self.tokenizer.decode(tokens))[1:-1]


def dataset_of_corpus(corpus: Corpus, length: int, text: TokenizedText | None = None) -> Dataset:
    """The windows of a text, byte by byte or in tokens.

    Raises ValueError where a part is shorter than one window.
    """
    parts = text.parts if text else {name: (part, None) for name, part in corpus.parts.items()}
    facts: dict[str, Fact] = {"bytes": corpus.num_bytes, "held-out bytes": len(corpus.heldout)}
    for name, (tokens, _) in parts.items():
        facts[f"{name} tokens"] = len(tokens)
        if len(tokens) <= length:
            few = f"the {name} text has {len(tokens)} tokens; a window needs {length} + 1"
            raise ValueError(f"{corpus.name}: {few}; give a longer text or a smaller length")

    def batch(seed: int, step: int, size: int, shard: slice) -> Batch:
        tokens, _ = parts["training"]
        return {"tokens": sample(tokens, length, size, seed=seed, step=step, shard=shard)}

    def scored(part: Tokens, count: int) -> Batch:
        tokens, sizes = part
        rows = dict(zip(("tokens", "valid"), windows(tokens, length, count), strict=True))
        if sizes is not None:
            rows["bytes"] = windows(sizes, length, count)[0][:, 1:].astype(np.float32)
        return rows

    def baselines() -> Baselines:
        text = corpus.heldout
        bits = {"unigram entropy": unigram_bits(text), "gzip -9": gzip_bits(text)}
        tokens, sizes = parts["held-out"]
        if sizes is not None:
            entropy = float(unigram_bits(tokens) * len(tokens) / sizes.sum())
            bits["unigram entropy of the tokens"] = entropy
        return {"bits_per_byte": bits}

    if text is not None:
        lost = (
            ""
            if text.is_exact
            else " (it loses some of the text: the bits are those of what it keeps)"
        )
        facts |= {"tokenizer": text.name + lost, "its sha256": text.tokenizer.digest[:12]}
        digest = hashlib.sha256(f"{corpus.sha256} {text.tokenizer.digest}".encode()).hexdigest()
    validation = parts.get("validation")
    return Dataset(
        name=corpus.name,
        digest=digest if text else corpus.sha256,
        sizes=DataSizes(text.tokenizer.size) if text else BYTES,
        row_tokens=length,
        batches=batch,
        heldout=functools.partial(scored, parts["held-out"]),
        validation=functools.partial(scored, validation) if validation else None,
        train=functools.partial(scored, parts["training"]),
        decode=text.decode if text else decode_bytes,
        baselines=baselines,
        files=text.tokenizer.files if text else {},
        facts=facts,
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


@functools.lru_cache(maxsize=1)  # the runs of a sweep read one text
def _tokenize(corpus: Corpus, name: str, folder: Path | None) -> TokenizedText:
    """With the tokenizer of `folder`, if one is given."""
    path = folder / FILE if folder else Path(name)
    given = path.read_bytes() if path.is_file() else b""

    def make() -> Arrays:
        pieces = {part: _pieces(content) for part, content in corpus.parts.items()}
        tokenizer = make_tokenizer(name, pieces["training"], folder)
        arrays = {"tokenizer": np.frombuffer(tokenizer.content, np.uint8)}
        for part, texts in pieces.items():
            encoded = tokenizer.encode(texts)
            for field in ("tokens", "sizes"):
                found = [np.zeros(0, np.int32), *(getattr(one, field) for one in encoded)]
                arrays[f"{part} {field}"] = np.concatenate(found)
        decoded = [tokenizer.decode(one.tokens.tolist()) for one in encoded]
        return arrays | {"is exact": np.array(decoded == texts)}

    arrays = kept(("tokens", corpus.sha256, name, given), make)
    tokenizer = read_tokenizer(arrays["tokenizer"].tobytes(), num_tokens(name))
    parts: dict[str, Tokens] = {
        part: (arrays[f"{part} tokens"], arrays[f"{part} sizes"]) for part in corpus.parts
    }
    return TokenizedText(name, tokenizer, parts, bool(arrays["is exact"]))


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


def load_corpus(path: str = "", *, utf8: bool = False) -> Corpus:
    """The text at `path`, split as `Text` says; with `utf8` a ValueError unless it is UTF-8."""
    root = Path(path)
    files = {str(p): p for p in visible_files(root)} if path else _standard_library()
    arrays = kept(("text", path, stamp(*files.values()), utf8), lambda: _read(files, path, utf8))
    name = root.name or f"Python {sysconfig.get_python_version()} standard library"
    return Corpus(name, arrays["train"], arrays["heldout"], str(arrays["sha256"]))


def _standard_library() -> dict[str, Path]:
    """Path within the library -> its file, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return {n: root / n for n in names if not SKIPPED_FOLDERS & set(n.split("/")[:-1])}


def _read(files: dict[str, Path], path: str, utf8: bool) -> Arrays:
    read = read_bytes if path else Path.read_bytes
    texts = {name: read(file) for name, file in files.items()}
    for name, text in texts.items() if utf8 else ():
        split_lines(text, files[name])  # raises ValueError
    whole = b"".join(texts.values())
    if not whole:
        raise ValueError(f"{path} holds no text; give a text file or a folder of them")
    if path:
        end = int(len(whole) * 0.9)
        train, heldout = whole[:end], whole[end:]
    else:
        held = {name for name in texts if bucket(name, 10) == 0}
        train = b"".join(text for name, text in texts.items() if name not in held)
        heldout = b"".join(text for name, text in texts.items() if name in held)
    sha256 = np.array(hashlib.sha256(whole).hexdigest())
    return {"train": _as_tokens(train), "heldout": _as_tokens(heldout), "sha256": sha256}


def _as_tokens(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).astype(np.int32)
