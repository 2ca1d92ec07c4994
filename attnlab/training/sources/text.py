"""The row `text`: a text, cut into windows of tokens."""

import dataclasses
import functools
import gzip
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab.tokenizer import (
    FILE,
    Encoded,
    Tokenizer,
    make_tokenizer,
    num_tokens,
)
from attnlab.training.sources.source import BYTES, Batch, Sizes, Source

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text split into what is trained on and what is held out, as bytes."""

    name: str
    train: np.ndarray = dataclasses.field(compare=False)
    heldout: np.ndarray = dataclasses.field(compare=False)
    sha256: str
    """Of the whole text in its own order, and of how it is split where that is told."""
    validation: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        parts = (self.train, self.heldout, self.validation)
        return sum(len(part) for part in parts if part is not None)

    def validated(self, share: float) -> "Corpus":
        """With the end of the training part kept for choices that are not to be made on what is
        held out."""
        if not share:
            return self
        cut = int(len(self.train) * (1 - share))
        told = hashlib.sha256(f"{self.sha256} {share}".encode()).hexdigest()
        train, validation = self.train[:cut], self.train[cut:]
        return dataclasses.replace(self, sha256=told, train=train, validation=validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text, to be predicted token by token; losses are told in bits per byte.

    `path` is a file, a folder of them, or "" for the standard library of the running interpreter,
    which holds out whole files: those whose relative path hashes to 0 modulo 10. Any other text
    (gzip is unpacked) holds out its last 10 %.

    `tokenizer` is "bytes", "bpe:N" (learnt from the training part) or the path of a tokenizer.json;
    all but the bytes need UTF-8, and leave out the rest of a character that the split cuts.

    `validation` is the share of the training part, at its end, that curves are drawn on in place
    of what is held out, and learning rates chosen by.

    >>> source = Text().load(64)
    >>> source.batch(0, 1, 8, slice(0, 2))["tokens"].shape
    (2, 65)
    """

    path: str = ""
    tokenizer: str = "bytes"
    validation: float = 0.0

    def __post_init__(self):
        if not 0 <= self.validation < 1:
            raise ValueError(
                f"data.validation {self.validation} is a share of the training text: less than 1"
            )
        if self.path and not Path(self.path).exists():
            raise FileNotFoundError(
                f"no text at {self.path}; leave data.path empty for the default corpus"
            )
        num_tokens(self.tokenizer)

    def sizes(self) -> Sizes:
        """The tokens."""
        return Sizes(num_tokens(self.tokenizer))

    def shapes(self, length: int) -> Batch:
        """Windows of `length` + 1 tokens."""
        return {"tokens": jax.ShapeDtypeStruct((1, length + 1), np.int32)}

    def load(self, length: int, folder: Path | None = None) -> Source:
        """Windows of `length` + 1 tokens; raises ValueError where a part is shorter than one, and
        naming file and line where a text that is to be tokenised is not UTF-8.
        """
        corpus = load_corpus(self.path, utf8=self.tokenizer != "bytes")
        corpus = corpus.validated(self.validation)
        source = source_of(corpus, length)
        if self.tokenizer != "bytes":
            source = _tokenised(source, corpus, length, self.tokenizer, folder)
        for part in ("training", "validation", "held-out"):
            count = f"{part} tokens"
            if source.facts.get(count, length + 1) <= length:
                raise ValueError(
                    f"{corpus.name}: the {part} text has {source.facts[count]} tokens, too short "
                    f"for one window of {length} + 1; give a longer text or a smaller length"
                )
        return source


def load_corpus(path: str = "", *, utf8: bool = False) -> Corpus:
    """The text at `path`, whole, split as `Text` says; with `utf8` refused where it is none."""
    return _text(Path(path), utf8) if path else _standard_library(utf8)


def source_of(corpus: Corpus, length: int) -> Source:
    """The windows of a text, byte by byte."""
    kept = corpus.validation

    def batch(seed: int, step: int, size: int, part: slice) -> Batch:
        return {"tokens": sample(corpus.train, length, size, seed=seed, step=step, part=part)}

    def scored(text: np.ndarray, count: int) -> Batch:
        tokens, valid = windows(text, length, count)
        return {"tokens": tokens, "valid": valid}

    return Source(
        name=corpus.name,
        digest=corpus.sha256,
        sizes=BYTES,
        row_tokens=length,
        batch=batch,
        heldout=lambda count: scored(corpus.heldout, count),
        validation=functools.partial(scored, kept) if kept is not None else None,
        train=lambda count: scored(corpus.train, count),
        write=write_bytes,
        yardsticks=lambda: {
            "bits_per_byte": {
                "unigram entropy": unigram_bits(corpus.heldout),
                "gzip -9": gzip_bits(corpus.heldout),
            }
        },
        facts={
            "bytes": corpus.num_bytes,
            "held-out bytes": len(corpus.heldout),
            "training tokens": len(corpus.train),
            **({} if kept is None else {"validation tokens": len(kept)}),
            "held-out tokens": len(corpus.heldout),
        },
    )


def _tokenised(
    plain: Source, corpus: Corpus, length: int, name: str, folder: Path | None
) -> Source:
    """The same text in the tokens of a tokenizer. A target says how many bytes it stands for."""
    kept = folder is not None and (folder / FILE).exists()
    tokenizer, train, heldout, validation, exact = _tokenise(corpus, name, folder if kept else None)

    def batch(seed: int, step: int, size: int, part: slice) -> Batch:
        return {"tokens": sample(train.tokens, length, size, seed=seed, step=step, part=part)}

    def scored(text: Encoded, count: int) -> Batch:
        tokens, valid = windows(text.tokens, length, count)
        sizes, _ = windows(text.sizes, length, count)
        return {"tokens": tokens, "valid": valid, "bytes": sizes[:, 1:].astype(np.float32)}

    def yardsticks() -> dict[str, dict[str, float]]:
        entropy = unigram_bits(heldout.tokens) * len(heldout.tokens) / heldout.sizes.sum()
        known = plain.yardsticks()["bits_per_byte"]
        return {"bits_per_byte": known | {"unigram entropy of the tokens": float(entropy)}}

    lossy = "" if exact else " (it loses some of the text: the bits are those of what it keeps)"
    return dataclasses.replace(
        plain,
        digest=hashlib.sha256(f"{corpus.sha256} {tokenizer.digest}".encode()).hexdigest(),
        sizes=Sizes(tokenizer.size),
        batch=batch,
        heldout=lambda count: scored(heldout, count),
        validation=functools.partial(scored, validation) if len(validation.tokens) else None,
        train=lambda count: scored(train, count),
        write=lambda tokens: repr(tokenizer.decode(tokens))[1:-1],
        yardsticks=yardsticks,
        files={FILE: tokenizer.content},
        facts=plain.facts
        | {
            "training tokens": len(train.tokens),
            **({"validation tokens": n} if (n := len(validation.tokens)) else {}),
            "held-out tokens": len(heldout.tokens),
            "tokenizer": name + lossy,
            "its sha256": tokenizer.digest[:12],
        },
    )


PIECE = 1 << 16
"""Bytes that are tokenised at a time, up to the end of a line: many pieces keep all cores busy."""


def _pieces(text: np.ndarray) -> list[str]:
    """The text without what is left of a character at its ends, cut behind line ends."""
    data = text.astype(np.uint8).tobytes()
    whole = data.decode("utf-8", "ignore").encode()  # only the ends can be broken
    pieces, start = [], 0
    while start < len(whole):
        end = whole.find(b"\n", start + PIECE) + 1 or len(whole)
        pieces.append(whole[start:end].decode())
        start = end
    return pieces


@functools.lru_cache(maxsize=1)  # the arms of a sweep read one text
def _tokenise(
    corpus: Corpus, name: str, kept: Path | None
) -> tuple[Tokenizer, Encoded, Encoded, Encoded, bool]:
    """The tokenizer, the parts in its tokens (training, held out, validation), and whether it gives
    the held-out part back."""
    empty = np.zeros(0, np.int32)
    validation = empty if corpus.validation is None else corpus.validation
    train, heldout, valid = map(_pieces, (corpus.train, corpus.heldout, validation))
    tokenizer = make_tokenizer(name, train, kept)
    pieces = [tokenizer.encode(texts) if texts else [] for texts in (train, heldout, valid)]
    exact = all(
        tokenizer.decode(one.tokens.tolist()) == text
        for one, text in zip(pieces[1], heldout, strict=True)
    )
    of_none = [Encoded(empty, empty)]
    join = lambda some: Encoded(*map(np.concatenate, zip(*(some or of_none), strict=True)))
    return tokenizer, join(pieces[0]), join(pieces[1]), join(pieces[2]), exact


def write_bytes(tokens: Sequence[int]) -> str:
    r"""Bytes as text on one line.

    >>> write_bytes(b"a\nb")
    'a\\nb'
    """
    return repr(bytes(tokens).decode("utf-8", "replace"))[1:-1]


def windows(text: np.ndarray, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` evenly spaced windows [W, length + 1], or with count 0 the whole text once.

    The second array [W, length] is True where a target counts. In the whole text every byte but
    the first is a target exactly once; the last window is filled up with zeros that do not count.
    """
    if count:
        starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    else:
        starts = np.arange(0, len(text) - 1, length)
    index = starts[:, None] + np.arange(length + 1)
    valid = index < len(text)
    return np.where(valid, text[np.minimum(index, len(text) - 1)], 0), valid[:, 1:]


def sample(
    text: np.ndarray,
    length: int,
    size: int,
    *,
    seed: int,
    step: int,
    part: slice = slice(None),
) -> np.ndarray:
    """Rows `part` of the batch of `step`: random windows [of `size`, length + 1]."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(text) - length, size=size)[part]
    return text[starts[:, None] + np.arange(length + 1)]


def unigram_bits(text: np.ndarray) -> float:
    """Entropy of the frequencies of tokens, bits each: what a model without context can reach."""
    p = np.bincount(text) / len(text)
    p = p[p > 0]
    return float(-np.sum(p * np.log2(p)))


def gzip_bits(text: np.ndarray) -> float:
    """Size under gzip -9, bits per byte."""
    data = text.astype(np.uint8).tobytes()
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def _tokens(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).astype(np.int32)


def _standard_library(utf8: bool) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    train: list[bytes] = []
    heldout: list[bytes] = []
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        if not SKIPPED_FOLDERS & set(Path(name).parts[:-1]):
            text = path.read_bytes()
            _check(path, text, utf8)
            whole.update(text)
            bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
            (train if bucket else heldout).append(text)
    name = f"Python {sysconfig.get_python_version()} standard library"
    return Corpus(name, _tokens(b"".join(train)), _tokens(b"".join(heldout)), whole.hexdigest())


def _text(path: Path, utf8: bool) -> Corpus:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    parts = []
    for file in files:
        try:
            data = file.read_bytes()
            data = gzip.decompress(data) if file.suffix == ".gz" else data
        except (OSError, EOFError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
        _check(file, data, utf8)
        parts.append(data)
    text = b"".join(parts)
    if not text:
        raise ValueError(f"{path} holds no text; give a text file or a folder of them")
    cut, digest = int(len(text) * 0.9), hashlib.sha256(text).hexdigest()
    return Corpus(path.name, _tokens(text[:cut]), _tokens(text[cut:]), digest)


def _check(file: Path, data: bytes, utf8: bool) -> None:
    try:
        data.decode() if utf8 else None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, or "
            "read it as bytes (data.tokenizer=bytes)"
        ) from None
