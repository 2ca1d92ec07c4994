"""Text -> batches of bytes. A batch is a function of (seed, step, process): no state to save."""

import gzip
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCAB_SIZE = 256
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


def load_corpus(path: str = "", *, length: int) -> Corpus:
    """The corpus at `path`: a text file, a folder of them, or "" for the standard library.

    The standard library of the running interpreter holds out whole files, those whose relative
    path hashes to 0 modulo 10; any other text (gzip is unpacked) holds out its last 10 %.
    Raises FileNotFoundError or ValueError, saying what is wrong, where no windows of `length` + 1
    bytes can be had from both parts.
    """
    corpus = _text(Path(path)) if path else _standard_library()
    for part, text in (("training", corpus.train), ("held-out", corpus.heldout)):
        if len(text) <= length:
            raise ValueError(
                f"{corpus.name}: the {part} text has {len(text)} bytes, too short for one window "
                f"of {length} + 1; give a longer text or a smaller length"
            )
    return corpus


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
    batch_size: int,
    *,
    seed: int,
    step: int,
    process: int = 0,
    num_processes: int = 1,
) -> np.ndarray:
    """This process's rows of the batch of `step`: random windows [batch_size / P, length + 1].

    The whole batch depends on (seed, step) alone, so it is the same for any number of processes.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(text) - length, size=batch_size)
    rows = batch_size // num_processes
    starts = starts[process * rows : (process + 1) * rows]
    return text[starts[:, None] + np.arange(length + 1)]


def unigram_bits(text: np.ndarray) -> float:
    """Entropy of the byte frequencies, bits per byte: what a model without context can reach."""
    p = np.bincount(text, minlength=VOCAB_SIZE) / len(text)
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
    if not path.exists():
        raise FileNotFoundError(f"no text at {path}; leave data.path empty for the default corpus")
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
