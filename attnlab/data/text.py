"""Dataset `text`: a text, cut into windows of tokens."""

import dataclasses
import functools
import gzip
import hashlib
import io
import sysconfig
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnlab.data import batching, files
from attnlab.data.batching import WORDS
from attnlab.data.dataset import Baselines, Batch, BatchShapes, Dataset, DataSizes, Fact
from attnlab.data.packing import packed_rows
from attnlab.data.prepare import next_piece, read_pieces
from attnlab.data.tokenizer import (
    FILE,
    ByteTokenizer,
    Tokenizer,
    make_tokenizer,
    num_tokens,
    read_tokenizer,
)
from attnlab.fields import Spec, bounded

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text split into training, held-out and perhaps validation part, as bytes.

    Attributes:
      name: for people.
      train, heldout, validation: a number for each byte.
      sha256: of the whole text in its own order, and of the split where that is chosen.
      ends: where documents end: name of a part -> positions in it; None: they are not known.
    """

    name: str
    train: np.ndarray = dataclasses.field(compare=False)
    heldout: np.ndarray = dataclasses.field(compare=False)
    sha256: str
    validation: np.ndarray | None = dataclasses.field(default=None, compare=False)
    ends: dict[str, np.ndarray] | None = dataclasses.field(default=None, compare=False)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Name -> the bytes of each part that there is."""
        middle = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, **middle, "heldout": self.heldout}

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
        train, validation, ends = self.train[:end], self.train[end:], self.ends
        if ends:
            ends = ends | dict(zip(("train", "validation"), _cut(ends["train"], end), strict=True))
        return Corpus(self.name, train, self.heldout, sha256, validation, ends)


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
      pack: windows hold whole documents, as many as fit, in place of random pieces of the text;
        none attends to another (`packing.packed_rows`). A document is a file, or a row of a
        `.jsonl` or `.parquet` file (its "text"); the split cuts one in two.
      separator: with `pack`, what ends a document within a file, and is left out, such as
        "<|endoftext|>".

    Raises:
      ValueError: `validation` is not at least 0 and below 1; or there is a `separator` without
        `pack`.

    >>> dataset = Text().load(64)
    >>> dataset.batches(0, 1, 8, slice(0, 2))["tokens"].shape
    (2, 65)
    """

    path: str = ""
    tokenizer: str = "bytes"
    validation: float = bounded(0.0, least=0.0, below=1.0)
    pack: bool = False
    separator: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator and not self.pack:
            raise ValueError(f"data.separator {self.separator!r} needs data.pack=True")

    def sizes(self) -> DataSizes:
        """The tokens."""
        files.check_path(self.path, "text", "leave data.path empty for the default corpus")
        return DataSizes(num_tokens(self.tokenizer))

    def shapes(self, length: int) -> BatchShapes:
        """Windows of `length` + 1 tokens."""
        names = ("tokens", "segments") if self.pack else ("tokens",)
        shapes = dict.fromkeys(names, jax.ShapeDtypeStruct((1, length + 1), np.int32))
        if self.pack and self.tokenizer != "bytes":
            shapes["bytes"] = jax.ShapeDtypeStruct((1, length), np.float32)
        return shapes

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
        corpus = load_corpus(
            self.path, utf8=self.tokenizer != "bytes", pack=self.pack, separator=self.separator
        )
        corpus = corpus.with_validation(self.validation)
        if self.tokenizer == "bytes":
            return dataset_of_corpus(corpus, length)
        return dataset_of_corpus(corpus, length, _tokenize(corpus, self.tokenizer, folder))


def dataset_of_corpus(corpus: Corpus, length: int, tokens: files.Arrays | None = None) -> Dataset:
    """The windows of a corpus, in the tokens of `_tokenize` or byte by byte; packed ones where it
    says where documents end.

    Raises ValueError where a part is shorter than one window, or has no document to predict.
    """
    tokenizer: Tokenizer = ByteTokenizer()
    digest, ends = corpus.sha256, corpus.ends
    parts = {name: {"tokens": a} for name, a in corpus.parts.items()}
    if tokens:
        tokenizer = read_tokenizer(tokens["tokenizer"].tobytes(), int(tokens["size"]))
        digest = hashlib.sha256(f"{digest} {tokenizer.digest}".encode()).hexdigest()
        parts = {part: {n: tokens[f"{part} {n}"] for n in ("tokens", "bytes")} for part in parts}
        ends = ends and {part: tokens[f"{part} ends"] for part in parts}
    facts: dict[str, Fact] = {"bytes": corpus.num_bytes, "held-out bytes": len(corpus.heldout)}
    facts |= {f"{WORDS[name]} tokens": len(arrays["tokens"]) for name, arrays in parts.items()}
    if tokens:
        facts |= {"tokenizer": str(tokens["name"]), "its sha256": tokenizer.digest[:12]}
    fields: dict[str, Any] = {
        "name": corpus.name,
        "digest": digest,
        "sizes": DataSizes(tokenizer.size),
        "decode": tokenizer.line,
        "baselines": functools.partial(_baselines, corpus.heldout, parts["heldout"]),
        "files": tokenizer.files,
        "facts": facts,
    }
    if ends is not None:
        rows = {name: packed_rows(arrays, ends[name], length) for name, arrays in parts.items()}
        for name, (count, _) in rows.items():
            if not count:
                part = WORDS[name]
                raise ValueError(f"{corpus.name}: no document of the {part} part has 2 tokens")
            facts |= {f"{WORDS[name]} documents": len(ends[name]), f"{WORDS[name]} windows": count}
        return batching.dataset_of_rows(rows, row_tokens=length, **fields)

    def token_bytes(part: str, count: int, rows: np.ndarray) -> Batch:
        if not tokens:
            return {}
        sizes, _ = batching.windows(batching.TokenArray(parts[part]["bytes"]), length, count)
        return {"bytes": sizes[:, 1:].astype(np.float32)}

    streams = {name: batching.TokenArray(arrays["tokens"]) for name, arrays in parts.items()}
    return batching.dataset_of_windows(streams, length, corpus.name, token_bytes, **fields)


def _baselines(heldout: np.ndarray, part: Batch) -> Baselines:
    """Of the held-out bytes and their tokens."""
    known = {"unigram entropy": unigram_bits(heldout), "gzip -9": gzip_bits(heldout)}
    if "bytes" in part:
        tokens, sizes = part["tokens"], part["bytes"]
        bits = float(unigram_bits(tokens) * len(tokens) / sizes.sum())
        known["unigram entropy of the tokens"] = bits
    return {"bits_per_byte": known}


def _tokenize(corpus: Corpus, name: str, folder: Path | None) -> files.Arrays:
    """A corpus in the tokens of `make_tokenizer(name, its training part, folder)`: of each part its
    tokens, for how many bytes each stands, and where documents end."""
    path = folder / FILE if folder and (folder / FILE).exists() else Path(name)
    given = path.read_bytes() if path.is_file() else b""
    return files.kept(
        ("tokens of parts", corpus.sha256, name, given), lambda: _encode(corpus, name, folder)
    )


def _encode(corpus: Corpus, name: str, folder: Path | None) -> files.Arrays:
    ends = corpus.ends or {part: np.array([len(a)]) for part, a in corpus.parts.items()}
    documents = {
        part: [_pieces(one) for one in np.split(content, ends[part][:-1])]
        for part, content in corpus.parts.items()
    }
    pieces = {part: list(chain(*each)) for part, each in documents.items()}
    tokenizer = make_tokenizer(name, pieces["train"], folder)
    arrays = {
        "tokenizer": np.frombuffer(tokenizer.content, np.uint8),
        "size": np.array(num_tokens(name)),
    }
    for part, texts in pieces.items():
        encoded = tokenizer.encode(texts)
        tokens, sizes = zip(*encoded, strict=True) if encoded else ((), ())
        counts = np.cumsum([0, *map(len, tokens)])
        arrays[f"{part} ends"] = counts[np.cumsum([len(each) for each in documents[part]])]
        arrays[f"{part} tokens"] = np.concatenate([np.zeros(0, np.int32), *tokens])
        arrays[f"{part} bytes"] = np.concatenate([np.zeros(0, np.int32), *sizes])
    decoded = [tokenizer.decode(one.tokens.tolist()) for one in encoded]  # of the held-out part
    lost = " (it loses some of the text: the bits are those of what it keeps)"
    return arrays | {"name": np.array(name if decoded == texts else name + lost)}


def _pieces(text: np.ndarray) -> list[str]:
    """The text without incomplete characters at its ends, cut after line ends: many pieces keep all
    cores busy."""
    data = text.astype(np.uint8).tobytes()
    whole = io.BytesIO(data.decode("utf-8", "ignore").encode())  # only the ends can be incomplete
    return [piece.decode() for piece in iter(lambda: next_piece(whole), b"")]


def unigram_bits(text: np.ndarray) -> float:
    """Entropy of the frequencies of tokens, bits each: what a model without context can reach."""
    p = np.bincount(text) / len(text)
    p = p[p > 0]
    return float(-np.sum(p * np.log2(p)))


def gzip_bits(text: np.ndarray) -> float:
    """Size under gzip -9, bits per byte."""
    data = text.astype(np.uint8).tobytes()
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def load_corpus(
    path: str = "", *, utf8: bool = False, pack: bool = False, separator: str = ""
) -> Corpus:
    """The text at `path`, split as `Text` says; with `utf8` a ValueError unless it is UTF-8, with
    `pack` the ends of its documents."""
    found = {str(p): p for p in files.visible_files(Path(path))} if path else _standard_library()

    def documents(file: Path) -> list[bytes]:
        """The documents of a file, or with `pack` false its content."""
        if pack and file.name.removesuffix(".gz").endswith((".jsonl", ".parquet")):
            return [piece.text.encode() for piece in read_pieces(file, file)]
        text = files.read_bytes(file) if path else file.read_bytes()
        if utf8:
            files.split_lines(text, file)  # raises ValueError
        return text.split(separator.encode()) if separator else [text]

    key = "text", path, files.stamp(*found.values()), utf8, pack, separator
    arrays = files.kept(key, lambda: _read({n: documents(f) for n, f in found.items()}, path, pack))
    default = f"Python {sysconfig.get_python_version()} standard library"
    ends = {part: arrays[f"{part} ends"] for part in ("train", "heldout")} if pack else None
    name, sha256 = files.last_name(path) if path else default, str(arrays["sha256"])
    return Corpus(name, arrays["train"], arrays["heldout"], sha256, ends=ends)


def _standard_library() -> dict[str, Path]:
    """Path within the library -> its file, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return {n: root / n for n in names if not SKIPPED_FOLDERS & set(n.split("/")[:-1])}


def _read(texts: dict[str, list[bytes]], path: str, pack: bool) -> files.Arrays:
    """The parts of the documents of each file, and with `pack` where each document ends."""
    sha256 = hashlib.sha256(b"".join(chain(*texts.values()))).hexdigest()
    held = {n for n in texts if not path and files.bucket(n, 10) == 0}
    arrays: files.Arrays = {}
    ends: files.Arrays = {}
    for part, of in (("train", texts.keys() - held), ("heldout", held)):
        documents = list(chain(*(texts[name] for name in texts if name in of)))
        arrays[part] = np.frombuffer(b"".join(documents), np.uint8).astype(np.int32)
        ends[part] = np.cumsum(list(map(len, documents)), dtype=np.int64)
    if path:
        whole = arrays["train"]
        if not len(whole):
            raise ValueError(f"{path} holds no text; give a text file or a folder of them")
        end = int(len(whole) * 0.9)
        arrays = {"train": whole[:end], "heldout": whole[end:]}
        ends = dict(zip(ends, _cut(ends["train"], end), strict=True))
    if pack:
        arrays |= {f"{part} ends": a for part, a in ends.items()}
        sha256 = files.digest([sha256.encode(), *(a.tobytes() for a in ends.values())])
    return arrays | {"sha256": np.array(sha256)}


def _cut(ends: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents end in the text before and after a cut, which may be inside of one."""
    return np.append(ends[ends < at], at), ends[ends > at] - at
