"""`prepare`: texts -> files of token ids that `TokenFiles` reads, with an index and digests."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from attnlab.atomic import write_atomic
from attnlab.data.files import bucket, check_text
from attnlab.data.token_files import INDEX, Index, Shard
from attnlab.data.tokenizer import FILE, Tokenizer, make_tokenizer, num_tokens, token_sizes
from attnlab.extras import extra

PIECE, PIECES = 1 << 16, 256
"""Bytes of a piece of a text, up to the end of a line, and pieces that are tokenized together."""
LEARN_BYTES = 1 << 26
"""Of training documents that a tokenizer is learnt from, at most."""
SHARD_TOKENS = 1 << 27
BUCKETS = 10_000


class Piece(NamedTuple):
    """A part of a document."""

    document: str
    """Its name: path, and row in a table."""
    text: str
    is_last: bool


class PreparePlan(NamedTuple):
    """What `prepare` makes of its texts.

    Attributes:
      tokenizer: as in the dataset `text`: "bytes", "bpe:N" or the path of a tokenizer.json.
      heldout: the share of documents that are held out.
      end_of_document: the special token of a tokenizer.json that ends a document; "": a new token,
        after those of the tokenizer.
      shard_tokens: tokens of a file, at most.
      column: of a table or of an object of JSON lines that holds the text.

    >>> PreparePlan(tokenizer="bpe:4096").shard_tokens  # as uint16 a file of 256 MiB
    134217728
    """

    tokenizer: str = "bytes"
    heldout: float = 0.05
    end_of_document: str = ""
    shard_tokens: int = SHARD_TOKENS
    column: str = "text"


def prepare(
    paths: Sequence[Path],
    out: Path,
    plan: PreparePlan = PreparePlan(),  # noqa: B008
    *,
    progress: bool = False,
) -> Index:
    """Tokenizes texts and writes `index.json`, `tokenizer.json` and shards of token ids to `out`.

    A document is a text file (UTF-8, perhaps `.gz`), a line of a `.jsonl` file, a row of a
    `.parquet` file or of a folder of the package datasets (`save_to_disk`). Whole documents are
    held out, chosen by a hash of their name, so the split does not depend on their order or number;
    of so few documents that one part has none, none is, and `TokenFiles` holds out the end. A
    tokenizer is learnt from at most 64 MB of training documents. The tokens of a document are
    followed by the token that ends it. Long texts are cut after line ends, as in `text`, and
    tokenized on all cores. Memory: a few hundred MB, whatever the size.

    Args:
      paths: files, and folders that are read with all folders in them, in the order of their names.
      out: a new folder. What a killed call leaves there is overwritten; an index is not.
      plan: tokenizer, split and sizes.
      progress: show a progress bar on standard error.

    Returns the index, which is written last.

    Raises:
      FileNotFoundError: there is no such file, or no such tokenizer.json.
      ValueError: `out` is already prepared; a field of `plan` is out of its range, or names no
        tokenizer or no special token of it; there is no text; a file cannot be read or has no such
        column; or a text is not UTF-8.
      ModuleNotFoundError: a package of the extra `train` (the progress bar) or `data` is missing.

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
    if not 0 <= plan.heldout < 1:
        raise ValueError(f"heldout must be a share below 1, not {plan.heldout}")
    if plan.shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, not {plan.shard_tokens}")
    roots = [(file, root) for root in paths for file in _files(root)]
    total = sum(_size(file) for file, _ in roots)

    def pieces() -> Iterator[Piece]:
        for file, root in roots:
            try:
                yield from read_pieces(file, root, plan.column)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"cannot read {file}: {error}") from error

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer(plan, pieces(), total)
    with _progress(total, shown=progress) as advance:
        index = _write(pieces(), out, plan, tokenizer, advance)
    if not index.text_bytes:
        raise ValueError(f"{', '.join(map(str, paths))}: no text; give text files")
    for name, content in tokenizer.files.items():
        write_atomic(out / name, content)
    write_atomic(out / INDEX, index.to_json().encode())
    return index


def _write(
    pieces: Iterator[Piece],
    out: Path,
    plan: PreparePlan,
    tokenizer: Tokenizer,
    advance: Callable[[int], None],
) -> Index:
    """Writes the shards; returns their index."""
    end = _end_of_document(tokenizer, plan.end_of_document)
    size = max(tokenizer.size, end + 1)
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    writers = [_Writer(out, part, dtype, plan.shard_tokens) for part in ("train", "heldout")]
    sizes, exact, text_bytes = token_sizes(tokenizer), True, 0
    for group in _groups(pieces):
        encoded = tokenizer.ids([piece.text for piece in group])
        count = sum(len(piece.text.encode()) for piece in group)
        exact = exact and sizes is not None and count == sum(sizes[a].sum() for a in encoded)
        for piece, tokens in zip(group, encoded, strict=True):
            writer = writers[_is_held_out(piece.document, plan.heldout)]
            writer.add(tokens)
            if piece.is_last:
                writer.add(np.array([end]))
                writer.documents += 1
        text_bytes += count
        advance(count)
    parts = [writer.close() for writer in writers]
    if not parts[0]:  # the only documents are held out
        parts.reverse()
        writers.reverse()
    total = sum(shard.tokens for part in parts for shard in part)
    known = plan.tokenizer == "bytes" or plan.tokenizer.startswith("bpe:")
    return Index(
        dtype=dtype,
        vocab_size=size,
        end_of_document=end,
        tokenizer=plan.tokenizer if known else FILE,
        token_bytes=0.0 if exact else text_bytes / total,
        train=parts[0],
        heldout=parts[1],
        documents=(writers[0].documents, writers[1].documents),
        text_bytes=text_bytes,
    )


def read_pieces(file: Path, root: Path, column: str = "text") -> Iterator[Piece]:
    """The documents of a file in pieces; their names are relative to `root`.

    Raises:
      ValueError: a text is not UTF-8, a line no JSON, or the column is missing.
    """
    name = file.relative_to(root).as_posix() if file != root else file.name
    rows = _rows(file, column)
    if rows is not None:
        for number, text in enumerate(rows):
            yield Piece(f"{name}:{number}", text, is_last=True)
        return
    with _open(file) as opened:
        piece, more = check_text(_piece(opened), file), b""
        while piece:
            more = _piece(opened)
            try:
                yield Piece(name, piece.decode(), is_last=not more)
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 ({error}); convert the file") from None
            piece = more


def _open(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.GzipFile(file) if file.suffix == ".gz" else file.open("rb")


def _piece(file: BinaryIO | gzip.GzipFile) -> bytes:
    data = file.read(PIECE)
    return data + file.readline() if data else b""


def _rows(file: Path, column: str) -> Iterable[str] | None:
    """The texts of a table, one a row; None for a text file."""
    if file.is_dir():
        return _table_rows(file, column)
    name = file.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet_rows(file, column)
    return _json_rows(file, column) if name.endswith(".jsonl") else None


def _json_rows(file: Path, column: str) -> Iterator[str]:
    with _open(file) as opened:
        for number, line in enumerate(opened, 1):
            try:
                text = json.loads(line)[column]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}:{number}: no JSON object with {column!r}") from None
            yield _text(text, file, column)


def _parquet_rows(file: Path, column: str) -> Iterator[str]:
    with extra("data"):
        import pyarrow.parquet
    table = pyarrow.parquet.ParquetFile(file)
    if column not in table.schema_arrow.names:
        raise ValueError(f"{file} has no column {column!r}; columns {table.schema_arrow.names}")
    for batch in table.iter_batches(1024, columns=[column]):
        for text in batch.column(0).to_pylist():
            yield _text(text, file, column)


def _table_rows(folder: Path, column: str) -> Iterator[str]:
    with extra("data"):
        import datasets
    table = datasets.load_from_disk(str(folder))
    if not isinstance(table, datasets.Dataset):
        raise ValueError(f"{folder} holds splits {list(table)}; give the folder of one split")
    if column not in table.column_names:
        raise ValueError(f"{folder} has no column {column!r}; columns {table.column_names}")
    for rows in table.select_columns([column]).iter(1024):
        for text in rows[column]:
            yield _text(text, folder, column)


def _text(value: object, file: Path, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{file}: {column!r} is {type(value).__name__}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may hold half of a pair
        raise ValueError(f"{file}: a text in {column!r} is not Unicode ({error})") from None
    return value


def _files(root: Path) -> list[Path]:
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {root}")
    if root.is_file() or _is_table(root):
        return [root]
    found = [p for p in sorted(root.iterdir()) if not p.name.startswith(".")]
    return [file for path in found for file in _files(path)]


def _is_table(folder: Path) -> bool:
    return (folder / "state.json").exists() and (folder / "dataset_info.json").exists()


def _size(file: Path) -> int:
    files = file.rglob("*") if file.is_dir() else [file]
    return sum(path.stat().st_size for path in files)


def _is_held_out(document: str, share: float) -> bool:
    return bucket(document, BUCKETS) < round(share * BUCKETS)


def _make_tokenizer(plan: PreparePlan, pieces: Iterable[Piece], total: int) -> Tokenizer:
    """Learnt from training documents; from all where there are no others."""
    if not plan.tokenizer.startswith("bpe:"):
        return make_tokenizer(plan.tokenizer, [])
    num_tokens(plan.tokenizer)
    share = min(1.0, LEARN_BYTES / max(total, 1))
    texts: dict[bool, list[str]] = {True: [], False: []}
    for number, piece in enumerate(pieces):
        if bucket(f"{number} {piece.document}", BUCKETS) < share * BUCKETS:
            texts[_is_held_out(piece.document, plan.heldout)].append(piece.text)
    return make_tokenizer(plan.tokenizer, texts[False] or texts[True])


def _end_of_document(tokenizer: Tokenizer, name: str) -> int:
    if not name:
        return tokenizer.size
    content = json.loads(tokenizer.content or b"{}")
    known = {added["content"]: int(added["id"]) for added in content.get("added_tokens") or []}
    if name not in known:
        raise ValueError(f"the tokenizer has no special token {name!r}; it has {sorted(known)}")
    return known[name]


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are tokenized together."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= PIECE * PIECES:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Writer:
    """The shards of a part."""

    def __init__(self, folder: Path, split: str, dtype: str, limit: int) -> None:
        self._folder, self._part, self._dtype, self._limit = folder, split, dtype, limit
        self._shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._tokens, self._hash = 0, hashlib.sha256()
        self.documents = 0

    def add(self, tokens: np.ndarray) -> None:
        """Appends tokens; begins a new shard where one is full."""
        while len(tokens):
            if self._file is None:
                self._name = f"{self._part}_{len(self._shards):05d}.bin"
                self._file = (self._folder / self._name).open("wb")
                self._tokens, self._hash = 0, hashlib.sha256()
            piece = tokens[: self._limit - self._tokens].astype(f"<{np.dtype(self._dtype).str[1:]}")
            self._file.write(piece.tobytes())
            self._hash.update(piece.tobytes())
            self._tokens += len(piece)
            tokens = tokens[len(piece) :]
            if self._tokens == self._limit:
                self._end()

    def close(self) -> tuple[Shard, ...]:
        """The shards, which are on the disk."""
        self._end()
        return tuple(self._shards)

    def _end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._shards.append(Shard(self._name, self._tokens, self._hash.hexdigest()))


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes. Yields advance(bytes)."""
    with extra("train"):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed
    columns = BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    with Progress(*columns, disable=not shown, console=Console(stderr=True)) as bar:
        row = bar.add_task("tokenizing", total=total)

        def advance(count: int) -> None:
            bar.update(row, advance=count)

        yield advance
