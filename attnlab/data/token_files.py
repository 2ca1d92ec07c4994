"""Dataset `tokens`: files of token ids that are read from the disk window by window."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from attnlab.data.batching import dataset_of_windows
from attnlab.data.dataset import Baselines, BatchShapes, Dataset, DataSizes, join_tokens
from attnlab.data.files import Arrays, check_path, kept, last_name, stamp
from attnlab.data.packing import segments_until
from attnlab.data.tokenizer import FILE, ByteTokenizer, Tokenizer, load_tokenizer, token_sizes
from attnlab.fields import Spec, bounded

INDEX = "index.json"
HELDOUT_NAMES = ("val", "heldout", "test")
"""Beginnings of the names of files that are held out, in a folder without an index."""
CHUNK = 1 << 22
"""Tokens that are read at a time where all are."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of token ids, one after the other, little-endian; its sha256 is that of the file."""

    file: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Index:
    """`index.json` of a folder that `prepare` wrote.

    Attributes:
      dtype: of the ids.
      vocab_size: with the token that ends a document, `end_of_document`.
      tokenizer: "bytes", or what the folder's tokenizer.json was asked for as.
      token_bytes: 0: each token stands for the bytes that the tokenizer says; else the mean.
      train, heldout: the files of both parts.
      documents: how many there are in the training and in the held-out part.
      text_bytes: of all documents.
    """

    dtype: str
    vocab_size: int
    end_of_document: int
    tokenizer: str = ""
    token_bytes: float = 0.0
    train: tuple[Shard, ...] = ()
    heldout: tuple[Shard, ...] = ()
    documents: tuple[int, int] = (0, 0)
    text_bytes: int = 0
    version: int = 1

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """The index of a folder; raises ValueError where it cannot be read."""
        try:
            fields: dict[str, Any] = json.loads((folder / INDEX).read_text())
            parts = {n: tuple(Shard(**one) for one in fields[n]) for n in ("train", "heldout")}
            index = cls(**fields | parts | {"documents": tuple(fields["documents"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / INDEX} is no index of token files: {error}") from None
        if index.version != 1:
            raise ValueError(f"{folder / INDEX} has version {index.version}, this attnlab reads 1")
        return index

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


class TokenFile(NamedTuple):
    """Where a file has its tokens; `offset` are the bytes before the first."""

    path: Path
    dtype: str
    offset: int
    tokens: int

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on."""
        first = self.offset + start * np.dtype(self.dtype).itemsize
        tokens = np.fromfile(self.path, self.dtype, count, offset=first)
        if len(tokens) != count:
            raise ValueError(f"{self.path} became shorter during the run; restore the whole file")
        return tokens


class TokenStream:
    """Tokens of several files, one file after the other; a part [start, end) of them.

    Windows are read from the file and not through a memory map, since the pages of a map that were
    touched, and those that the system maps around them, are memory of the process: random windows
    of a map have soon all of a file resident.
    """

    def __init__(self, files: Sequence[TokenFile], start: int = 0, end: int | None = None) -> None:
        self._files = list(files)
        self._ends = np.cumsum([file.tokens for file in files], dtype=np.int64)
        total = int(self._ends[-1]) if files else 0
        self._start, self._end = start, total if end is None else end

    def __len__(self) -> int:
        return self._end - self._start

    def part(self, start: int, end: int) -> "TokenStream":
        """The tokens [start, end) of these."""
        return TokenStream(self._files, self._start + start, self._start + end)

    def read(self, starts: np.ndarray, size: int) -> np.ndarray:
        """[W, size]: the tokens from each start on; zeros after the last token."""
        rows = np.zeros((len(starts), size), np.int32)
        for row, start in zip(rows, starts.tolist(), strict=True):
            at, end = self._start + start, min(self._start + start + size, self._end)
            while at < end:
                number = int(np.searchsorted(self._ends, at, "right"))
                file, last = self._files[number], int(self._ends[number])
                count = min(last, end) - at
                row[:count] = file.read(at - last + file.tokens, count)
                row, at = row[count:], at + count
        return rows

    def chunks(self) -> Iterator[np.ndarray]:
        """All tokens, a few million at a time."""
        for start in range(0, len(self), CHUNK):
            yield self.read(np.array([start]), min(CHUNK, len(self) - start))[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFiles(Spec, prefix="data."):
    """Token ids on the disk, to be predicted one by one; no more than the windows of a batch, or
    those that are scored, are in memory.

    Losses are in bits per byte of the text. Files without an index are read once, for their digest;
    the digests of an index are believed.

    The windows of a training batch start at random positions, drawn uniformly with replacement from
    (seed, step), as those of `text`: a run reads no position twice in a batch but by chance, and
    keeps no state. Windows go over the ends of files and documents: unless `pack` is true, tokens
    of an earlier document are attended to. The token that ends a document is a target of 0 bytes,
    or of the mean where that is all that is known. Every training window is whole. If all of a part
    is scored, each token but the first is a target once, and the last window is filled with zeros
    that do not count.

    Attributes:
      path: a folder that `prepare` wrote; or a file, or a folder of files, of token ids: `.bin`
        (nothing but ids of `dtype`, as nanoGPT writes them) or `.npy` (a vector of uint16 or
        uint32). In a folder without an index the files whose names begin with "val", "heldout" or
        "test" are held out.
      dtype: of the ids in `.bin` files without an index.
      vocab_size: more than the largest id; files without an index need it, with one it is not used.
      heldout: the share of all tokens, at the end, that is held out where no file is.
      bytes_per_token: mean number of bytes of a token, for bits per byte; with 1 they are bits per
        token. 0: as the index or `tokenizer.json` in the folder says.
      pack: batches have `segments`, the number of each token's document within its window: no
        document attends to another or predicts its first token.
      end_of_document: the token that ends a document, for `pack` of files without an index.

    Raises:
      ValueError: another dtype, a negative number, or `heldout` that is not between 0 and 1.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(100, dtype=np.uint16).tofile(Path(folder, "ids.bin"))
    ...     data = TokenFiles(path=folder, vocab_size=100, bytes_per_token=1.0)
    ...     data.load(8).heldout(0)["tokens"].tolist()  # of the last 10 %
    [[90, 91, 92, 93, 94, 95, 96, 97, 98], [98, 99, 0, 0, 0, 0, 0, 0, 0]]
    """

    path: str = ""
    dtype: Literal["uint16", "uint32"] = "uint16"
    vocab_size: int = bounded(0, least=0)
    heldout: float = bounded(0.1, above=0.0, below=1.0)
    bytes_per_token: float = bounded(0.0, least=0.0)
    pack: bool = False
    end_of_document: int = bounded(-1, least=-1)

    @property
    def index(self) -> Index:
        """`index.json` of the folder, or for files without one the fields of this config."""
        folder = Path(self.path)
        if self.path and (folder / INDEX).exists():
            return Index.read(folder)
        return Index(self.dtype, self.vocab_size, self.end_of_document)

    def sizes(self) -> DataSizes:
        """The tokens."""
        check_path(self.path, "token files", "give data.path")
        size = self.index.vocab_size
        if not size:
            raise ValueError(f"{self.path or 'data.path'} has no index; give data.vocab_size")
        return DataSizes(size)

    @property
    def tokenizer(self) -> str:
        """`bytes`, or empty: a run keeps the tokenizer.json of any other."""
        return "bytes" if self.index.tokenizer == "bytes" else ""

    def shapes(self, length: int) -> BatchShapes:
        """Windows of `length` + 1 tokens."""
        names = ("tokens", "segments") if self.pack else ("tokens",)
        return dict.fromkeys(names, jax.ShapeDtypeStruct((1, length + 1), np.int32))

    def load(self, length: int, folder: Path | None = None) -> Dataset:
        """Windows of `length` + 1 tokens. `folder` is not used.

        Raises:
          FileNotFoundError: there is nothing at `path`, or not a file that the index names.
          ValueError: there is no `path`, no file of token ids, or no vocabulary size; a part is
            shorter than one window; a file is not as long as its index says; without an index, a
            token is not below the vocabulary size, or `pack` has no `end_of_document`; it is not
            known for how many bytes tokens stand.
          ModuleNotFoundError: a tokenizer.json without the package tokenizers.
        """
        index, size = self.index, self.sizes().vocab_size
        train, heldout, digest = self._parts(index)
        path = Path(self.path) / FILE
        tokenizer: Tokenizer | None = ByteTokenizer() if index.tokenizer == "bytes" else None
        if path.exists():
            tokenizer = load_tokenizer(path)
        sizes = self._token_bytes(index, tokenizer)
        segments = None
        if self.pack:
            end = index.end_of_document
            if not 0 <= end < size:
                raise ValueError(
                    f"{self.path} has no index; to pack it give data.end_of_document, the token "
                    f"below {size} that ends a document, not {end}"
                )
            segments = functools.partial(segments_until, end=end)
            digest = hashlib.sha256(f"{digest} packed, {end}".encode()).hexdigest()

        def decode(tokens: Sequence[int]) -> str:
            if tokenizer is None:
                return join_tokens(tokens)
            return tokenizer.line([t for t in tokens if t < tokenizer.size])

        def baselines() -> Baselines:
            each = (np.bincount(chunk, minlength=size) for chunk in heldout.chunks())
            counts = functools.reduce(np.add, each)
            share = counts[counts > 0] / len(heldout)
            bits = -float(np.sum(share * np.log2(share))) * len(heldout)
            known = {"unigram entropy of the tokens": bits / float(counts @ sizes)}
            return {"bits_per_byte": known}

        counts = {"training tokens": len(train), "held-out tokens": len(heldout)}
        documents = {"documents": sum(index.documents)} if index.train else {}
        return dataset_of_windows(
            {"train": train, "heldout": heldout},
            length,
            self.path,
            lambda part, count, tokens: {"bytes": sizes[tokens[:, 1:]]},
            segments,
            name=last_name(self.path),
            digest=digest,
            sizes=DataSizes(size),
            decode=decode,
            baselines=baselines,
            files=tokenizer.files if tokenizer else {},
            facts={**counts, "tokenizer": index.tokenizer or "of the files", **documents},
        )

    def _parts(self, index: Index) -> tuple[TokenStream, TokenStream, str]:
        """Training part, held-out part and digest."""
        if not self.path:
            raise ValueError("the dataset tokens needs data.path: a file or folder of token ids")
        if index.train:
            folder = Path(self.path)
            parts = [
                [_token_file(folder / shard.file, index.dtype, shard.tokens) for shard in part]
                for part in (index.train, index.heldout)
            ]
            digests = [shard.sha256 for shard in (*index.train, *index.heldout)]
        else:
            parts = self._found()
            digests = [_digest(file, index.vocab_size) for part in parts for file in part]
        train, heldout = map(TokenStream, parts)
        how = f"{len(parts[0])} files"
        if not parts[1]:
            end, how = int(len(train) * (1 - self.heldout)), f"share {self.heldout}"
            train, heldout = train.part(0, end), train.part(end, len(train))
        whole = " ".join([index.dtype, how, *digests])
        return train, heldout, hashlib.sha256(whole.encode()).hexdigest()

    def _found(self) -> list[list[TokenFile]]:
        """The files of the training and of the held-out part, in the order of their names."""
        path = Path(self.path)
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        paths = [p for p in paths if p.suffix in (".bin", ".npy") and not p.name.startswith(".")]
        if not paths:
            raise ValueError(f"{path} has no .bin or .npy file; write one with experiments.prepare")
        held = [p for p in paths if p.name.startswith(HELDOUT_NAMES) and path.is_dir()]
        train = [p for p in paths if p not in held]
        return [[_token_file(p, self.dtype) for p in part] for part in (train, held)]

    def _token_bytes(self, index: Index, tokenizer: Tokenizer | None) -> np.ndarray:
        """For how many bytes each token stands [vocab_size]."""
        if mean := self.bytes_per_token or index.token_bytes:
            return np.full(index.vocab_size, mean, np.float32)
        known = token_sizes(tokenizer) if tokenizer else None
        if known is None:
            raise ValueError(
                f"bits per byte need a tokenizer.json of bytes in {self.path}, or "
                "data.bytes_per_token: the mean number of bytes of a token (1: bits per token)"
            )
        sizes = np.zeros(index.vocab_size, np.float32)  # the end of a document stands for none
        sizes[: len(known)] = known[: len(sizes)]
        return sizes


def _token_file(path: Path, dtype: str, tokens: int | None = None) -> TokenFile:
    """The file, which must have so many tokens if they are known."""
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{path} is no .npy file: {error}") from None
        if array.ndim != 1 or array.dtype not in (np.dtype("<u2"), np.dtype("<u4")):
            given = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{path} is {given}, not a little-endian vector of uint16 or uint32")
        return TokenFile(path, array.dtype.name, array.offset, len(array))
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(f"{path} has {size} bytes, no multiple of {width}: it is not {dtype}")
    if tokens not in (None, size // width):
        given = f"{path} has {size // width:,} tokens, {INDEX} says {tokens:,}"
        raise ValueError(f"{given}; prepare the folder again")
    return TokenFile(path, dtype, 0, size // width)


def _digest(file: TokenFile, limit: int) -> str:
    """sha256 of the ids; raises ValueError where one is not below `limit`."""

    def make() -> Arrays:
        whole = hashlib.sha256()
        for chunk in TokenStream([file]).chunks():
            if (most := int(chunk.view(np.uint32).max())) >= limit:
                given = f"{file.path} has the token {most}, data.vocab_size is {limit}"
                raise ValueError(f"{given}; raise it, or give data.dtype for ids of another width")
            whole.update(chunk.astype(file.dtype).tobytes())
        return {"sha256": np.array(whole.hexdigest())}

    return str(kept(("token ids", *file, limit, stamp(file.path)), make)["sha256"])
