"""`prepare`: texts -> files of token ids that `TokenFiles` reads, with an index and digests."""

import dataclasses
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data.files import bucket, check_text
from attnlab.data.token_files import INDEX, Index, Shard
from attnlab.data.tokenizer import FILE, Tokenizer, make_tokenizer, num_tokens, token_sizes
from attnlab.extras import extra
from attnlab.fields import Spec, bounded, check_choice

PIECE, PIECES = 1 << 16, 256
"""Bytes of a piece of a text, up to the end of a line, and pieces of this size that are tokenized
together."""
LEARN_BYTES = 1 << 26
"""Of training documents that a tokenizer is learnt from, at most."""
BUCKETS = 10_000
SHARD = re.compile(r"(train|heldout)_\d+\.bin")
"""Names of the files of token ids."""


class Piece(NamedTuple):
    """A part of a document, whose name is a path, and a row in a table."""

    document: str
    text: str
    is_last: bool


@dataclasses.dataclass(frozen=True)
class PreparePlan(Spec):
    """What `prepare` makes of its texts.

    Attributes:
      tokenizer: as in the dataset `text`: "bytes", "bpe:N" or the path of a tokenizer.json.
      heldout: the share of documents that are held out.
      end_of_document: the special token of a tokenizer.json that ends a document; "": a new token,
        after those of the tokenizer.
      shard_tokens: tokens of a file, at most.
      column: of a table or of an object of JSON lines that holds the text.

    Raises:
      ValueError: a share or a number of tokens out of range.

    >>> PreparePlan(tokenizer="bpe:4096").shard_tokens  # as uint16 a file of 256 MiB
    134217728
    """

    tokenizer: str = "bytes"
    heldout: float = bounded(0.05, least=0.0, below=1.0)
    end_of_document: str = ""
    shard_tokens: int = bounded(1 << 27, least=1)
    column: str = "text"


def prepare(
    paths: Sequence[Path], out: Path, plan: PreparePlan = PreparePlan(), *, progress: bool = False
) -> Index:
    """Tokenizes texts and writes `index.json`, `tokenizer.json` and shards of token ids to `out`.

    A document is a text file (UTF-8, perhaps `.gz`), a line of a `.jsonl` file, a row of a
    `.parquet` file or of a folder of the package datasets (`save_to_disk`). Whole documents are
    held out, chosen by a hash of their name, so the split does not depend on their order or number;
    of so few documents that one part has none, none is, and `TokenFiles` holds out the end. A
    tokenizer is learnt from at most 64 MB of training documents. The tokens of a document are
    followed by the token that ends it. Long texts are cut after line ends, as in `text`, and
    tokenized on all cores. Memory: a few hundred MB, where texts have line ends.

    Args:
      paths: files, and folders that are read with all folders in them, in the order of their names.
      out: a new or empty folder. What a killed call leaves there is overwritten.
      plan: tokenizer, split and sizes.
      progress: print on standard error how far it is.

    Returns the index, which is written last.

    Raises:
      FileNotFoundError: there is no such file, or no such tokenizer.json.
      ValueError: `out` is already prepared or holds other files; `plan` names no tokenizer or no
        special token of it; there is no text; a file cannot be read or has no such column; a folder
        of the package datasets holds several splits; or a text is not UTF-8.
      ModuleNotFoundError: a package of the extra `data` is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = Path(folder, "text.txt")
    ...     _ = text.write_text("to be or not to be")
    ...     index = prepare([text], Path(folder, "tokens"))
    >>> index.train[0].file, index.train[0].tokens  # the last token ends the document
    ('train_00000.bin', 19)
    """
    if (out / INDEX).exists():
        raise ValueError(f"{out} exists and is prepared already; delete it, or name another folder")
    names = {path.name for path in out.glob("[!.]*")}
    shards = {name for name in names if SHARD.fullmatch(name)}
    if others := names - shards - ({FILE} if shards else set()):  # the tokenizer comes after them
        raise ValueError(f"{out} holds other files, such as {min(others)}; name a new folder")
    roots = [(file, root) for root in paths for file in _files(root)]
    each = chain(*(file.rglob("*") if file.is_dir() else [file] for file, _ in roots))
    total = sum(path.stat().st_size for path in each)

    def pieces() -> Iterator[Piece]:
        return chain.from_iterable(read_pieces(file, root, plan.column) for file, root in roots)

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer(plan, pieces)
    index = _write(pieces(), out, plan, tokenizer, total if progress else 0)
    if not index.text_bytes:
        raise ValueError(f"{', '.join(map(str, paths))}: no text; give text files")
    for name, content in tokenizer.files.items():
        write_atomic(out / name, content)
    write_atomic(out / INDEX, index.to_json().encode())
    return index


def _write(
    pieces: Iterator[Piece], out: Path, plan: PreparePlan, tokenizer: Tokenizer, total_bytes: int
) -> Index:
    """Writes the shards; returns their index. Prints how many of `total_bytes` are done; 0: not."""
    end = tokenizer.special_token(plan.end_of_document) if plan.end_of_document else tokenizer.size
    size = max(tokenizer.size, end + 1)
    dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
    parts = [_Part(out, name, dtype, plan.shard_tokens) for name in ("train", "heldout")]
    sizes, exact, text_bytes = token_sizes(tokenizer), True, 0
    for group in _groups(pieces):
        encoded = tokenizer.ids([piece.text for piece in group])
        count = sum(len(piece.text.encode()) for piece in group)
        exact = exact and sizes is not None and count == sum(sizes[a].sum() for a in encoded)
        added: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for piece, tokens in zip(group, encoded, strict=True):
            is_held = _is_held_out(piece.document, plan.heldout)
            added[is_held].append(np.append(tokens, end) if piece.is_last else tokens)
            parts[is_held].documents += piece.is_last
        for part, arrays in zip(parts, added, strict=True):
            part.add(np.concatenate([np.zeros(0, np.int32), *arrays]))
        text_bytes += count
        if total_bytes:
            print(f"{text_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB", file=sys.stderr)
    if not parts[0].shards:  # the only documents are held out
        parts.reverse()
    train, heldout = parts
    total = sum(shard.tokens for shard in train.shards + heldout.shards)
    known = plan.tokenizer == "bytes" or plan.tokenizer.startswith("bpe:")
    return Index(
        dtype=dtype.name,
        vocab_size=size,
        end_of_document=end,
        tokenizer=plan.tokenizer if known else FILE,
        token_bytes=0.0 if exact else text_bytes / total,
        train=tuple(train.shards),
        heldout=tuple(heldout.shards),
        documents=(train.documents, heldout.documents),
        text_bytes=text_bytes,
    )


def read_pieces(file: Path, root: Path, column: str = "text") -> Iterator[Piece]:
    """The documents of a file in pieces; their names are relative to `root`.

    Raises:
      ValueError: the file cannot be read, a text is not UTF-8, a line no JSON, or the column is
        missing.
    """
    name = file.relative_to(root).as_posix() if file != root else file.name
    kind = file.name.removesuffix(".gz").rpartition(".")[2]
    try:
        if not file.is_dir() and kind not in ("parquet", "jsonl"):
            yield from _pieces_of_text(file, name)
            return
        rows = _json_rows(file, column) if kind == "jsonl" else _table_rows(file, column)
        for number, text in enumerate(rows):
            if not isinstance(text, str):
                raise ValueError(f"{file}: {column!r} is {type(text).__name__}, not a text")
            yield Piece(f"{name}:{number}", text, is_last=True)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error}); convert the file") from None


def _open(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.GzipFile(file) if file.suffix == ".gz" else file.open("rb")


def _pieces_of_text(file: Path, name: str) -> Iterator[Piece]:
    with _open(file) as opened:
        piece = check_text(next_piece(opened), file)
        while piece:
            more = next_piece(opened)
            yield Piece(name, piece.decode(), is_last=not more)
            piece = more


def next_piece(file: BinaryIO | gzip.GzipFile) -> bytes:
    """The next 64 KiB of a text, up to the end of a line; b"" at its end."""
    data = file.read(PIECE)
    return data + file.readline() if data else b""


def _json_rows(file: Path, column: str) -> Iterator[object]:
    with _open(file) as opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
                str(text).encode()  # JSON may hold half of a surrogate pair
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{file}:{number}: no JSON object with a text in {column!r} ({error})"
                ) from None
            yield text


def _table_rows(path: Path, column: str) -> Iterator[object]:
    """Of a Parquet file, or of a folder of the package datasets."""
    with extra("data"):
        import datasets
        import pyarrow.parquet
    if path.is_dir():
        table = datasets.load_from_disk(str(path))
        if not isinstance(table, datasets.Dataset):
            raise ValueError(f"{path} holds splits {list(table)}; give the folder of one split")
        known, batches = table.column_names, table.with_format("arrow").iter(1024)
    else:
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"cannot read {path}: {error}") from None
        known, batches = file.schema_arrow.names, file.iter_batches(1024, columns=[column])
    check_choice(f"column of {path}", column, known)
    for batch in batches:
        yield from batch.column(column).to_pylist()


def _files(root: Path) -> list[Path]:
    """Files and tables in a folder, in the order of their names, or the one that `root` is."""
    if not root.exists():
        problem = "is a broken link; delete it" if root.is_symlink() else "is not there"
        raise FileNotFoundError(f"{root} {problem}")
    is_table = (root / "state.json").exists() and (root / "dataset_info.json").exists()
    is_table = is_table or (root / "dataset_dict.json").exists()  # which `_table_rows` refuses
    if root.is_file() or is_table:
        return [root]
    found = [path for path in sorted(root.iterdir()) if not path.name.startswith(".")]
    return [file for path in found for file in _files(path)]


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are tokenized together: rows of a table may be of any length."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= PIECE * PIECES or len(group) >= PIECE:  # rows may be short, too
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_held_out(document: str, share: float) -> bool:
    return bucket(document, BUCKETS) < round(share * BUCKETS)


def _make_tokenizer(plan: PreparePlan, pieces: Callable[[], Iterator[Piece]]) -> Tokenizer:
    """Learnt from training documents; from all where there are no others."""
    if not plan.tokenizer.startswith("bpe:"):
        return make_tokenizer(plan.tokenizer, [])
    num_tokens(plan.tokenizer)
    total = sum(len(piece.text.encode()) for piece in pieces())  # files may be compressed
    share = min(1.0, LEARN_BYTES / max(total, 1))
    texts: dict[bool, list[str]] = {True: [], False: []}
    for number, piece in enumerate(pieces()):
        if bucket(f"{number} {piece.document}", BUCKETS) < share * BUCKETS:
            texts[_is_held_out(piece.document, plan.heldout)].append(piece.text)
    chosen = texts[False] or texts[True]
    if not chosen:  # as may be of a few long ones
        chosen = [piece.text for piece in islice(pieces(), 1)]
    return make_tokenizer(plan.tokenizer, chosen)


@dataclasses.dataclass
class _Part:
    """Writes the shards of the training or held-out part."""

    folder: Path
    name: str
    dtype: np.dtype[Any]
    limit: int
    documents: int = 0
    shards: list[Shard] = dataclasses.field(default_factory=list)

    def add(self, tokens: np.ndarray) -> None:
        """Appends tokens, which are then on the disk; begins a new shard where one is full."""
        while len(tokens):
            if not self.shards or self.shards[-1].tokens == self.limit:
                self.shards.append(Shard(f"{self.name}_{len(self.shards):05d}.bin", 0, ""))
                self.sha256 = hashlib.sha256()
            last = self.shards[-1]
            piece, tokens = np.split(tokens, [self.limit - last.tokens])
            content = piece.astype(self.dtype).tobytes()
            self.sha256.update(content)
            with (self.folder / last.file).open("ab" if last.tokens else "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            size = last.tokens + len(piece)
            self.shards[-1] = Shard(last.file, size, self.sha256.hexdigest())
