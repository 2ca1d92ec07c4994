"""The row `text`: a text, cut into windows of tokens."""

import dataclasses
import gzip
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from attnlab.training.sources.source import BYTES, Batch, Sizes, Source

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus(NamedTuple):
    """A text split into what is trained on and what is held out, as bytes."""

    name: str
    train: np.ndarray
    heldout: np.ndarray
    sha256: str
    """Of the whole text in its own order."""

    @property
    def num_bytes(self) -> int:
        """Both parts together."""
        return len(self.train) + len(self.heldout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text, to be predicted byte by byte.

    `path` is a file, a folder of them, or "" for the standard library of the running interpreter,
    which holds out whole files: those whose relative path hashes to 0 modulo 10. Any other text
    (gzip is unpacked) holds out its last 10 %.

    >>> source = Text().load(64)
    >>> source.batch(0, 1, 8, slice(0, 2))["tokens"].shape
    (2, 65)
    """

    path: str = ""

    def __post_init__(self):
        if self.path and not Path(self.path).exists():
            raise FileNotFoundError(
                f"no text at {self.path}; leave data.path empty for the default corpus"
            )

    def sizes(self) -> Sizes:
        """The bytes."""
        return BYTES

    def shapes(self, length: int) -> Batch:
        """Windows of `length` + 1 bytes."""
        return {"tokens": jax.ShapeDtypeStruct((1, length + 1), np.int32)}

    def load(self, length: int, folder: Path | None = None) -> Source:
        """Windows of `length` + 1 bytes; raises ValueError where a part is shorter than one."""
        corpus = load_corpus(self.path)
        for part, text in (("training", corpus.train), ("held-out", corpus.heldout)):
            if len(text) <= length:
                raise ValueError(
                    f"{corpus.name}: the {part} text has {len(text)} bytes, too short for one "
                    f"window of {length} + 1; give a longer text or a smaller length"
                )
        return source_of(corpus, length)


def load_corpus(path: str = "") -> Corpus:
    """The text at `path`, whole, split as `Text` says."""
    return _text(Path(path)) if path else _standard_library()


def source_of(corpus: Corpus, length: int) -> Source:
    """The windows of a text."""

    def batch(seed: int, step: int, size: int, part: slice) -> Batch:
        return {"tokens": sample(corpus.train, length, size, seed=seed, step=step, part=part)}

    def scored(text: np.ndarray, count: int) -> Batch:
        tokens, valid = windows(text, length, count)
        return {"tokens": tokens, "valid": valid}

    return Source(
        name=corpus.name,
        digest=corpus.sha256,
        row_tokens=length,
        batch=batch,
        heldout=lambda count: scored(corpus.heldout, count),
        train=lambda count: scored(corpus.train, count),
        sizes=BYTES,
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
        },
    )


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
    """Entropy of the byte frequencies, bits per byte: what a model without context can reach."""
    p = np.bincount(text, minlength=BYTES.vocab_size) / len(text)
    p = p[p > 0]
    return float(-np.sum(p * np.log2(p)))


def gzip_bits(text: np.ndarray) -> float:
    """Size under gzip -9, bits per byte."""
    data = text.astype(np.uint8).tobytes()
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def _tokens(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).astype(np.int32)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.py")}
    train: list[bytes] = []
    heldout: list[bytes] = []
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        if not SKIPPED_FOLDERS & set(Path(name).parts[:-1]):
            text = path.read_bytes()
            whole.update(text)
            bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
            (train if bucket else heldout).append(text)
    name = f"Python {sysconfig.get_python_version()} standard library"
    return Corpus(name, _tokens(b"".join(train)), _tokens(b"".join(heldout)), whole.hexdigest())


def _text(path: Path) -> Corpus:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    parts = []
    for file in files:
        try:
            data = file.read_bytes()
            parts.append(gzip.decompress(data) if file.suffix == ".gz" else data)
        except (OSError, EOFError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
    text = b"".join(parts)
    if not text:
        raise ValueError(f"{path} holds no text; give a text file or a folder of them")
    cut, digest = int(len(text) * 0.9), hashlib.sha256(text).hexdigest()
    return Corpus(path.name, _tokens(text[:cut]), _tokens(text[cut:]), digest)
