"""Files of data, read whole; errors name file and line."""

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias


def check_path(path: str, what: str, advice: str, *, folder: bool = False) -> None:
    """Raises FileNotFoundError where `path` is given and there is nothing (or no folder) there.

    Args:
      path: a file or folder; "": none is given.
      what, advice: of the message: no `what` at `path`; `advice`.
      folder: it must be a folder.
    """
    if path and not (Path(path).is_dir() if folder else Path(path).exists()):
        raise FileNotFoundError(f"no {what} at {path}; {advice}")


def read_bytes(path: Path) -> bytes:
    """The content of a file; `.gz` is decompressed.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file {path}")
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def split_lines(data: bytes, name: object) -> list[str]:
    r"""The lines of a text in UTF-8, without their ends; an empty last line is left out.

    Only "\n" and "\r\n" end a line: Unicode has more line ends, which aligned files may hold within
    a line. Raises ValueError that names the file and line of a byte that is not UTF-8.

    >>> split_lines(b"one\ntwo\n", "a.txt")
    ['one', 'two']
    >>> split_lines(b"one\n\xff\n", "a.txt")
    Traceback (most recent call last):
        ...
    ValueError: a.txt:2: byte 0xff at column 1 is not UTF-8; convert the file
    """
    rows = data.split(b"\n")
    rows = rows[:-1] if rows[-1] == b"" else rows
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(row.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}:{number}: byte 0x{row[error.start]:02x} at column {error.start + 1} is "
                "not UTF-8; convert the file"
            ) from None
    return lines


def read_lines(path: Path) -> list[str]:
    """`split_lines` of a file."""
    return split_lines(read_bytes(path), path)


Stamp: TypeAlias = tuple[tuple[str, int, int], ...]


def stamp(path: Path) -> Stamp:
    """Name, size and time of change of a file, or of each file in a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = ((str(file), file.stat()) for file in files if file.exists())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def digest(chunks: Iterable[bytes]) -> str:
    """sha256 of the chunks one after the other, each with its length before it."""
    whole = hashlib.sha256()
    for chunk in chunks:
        whole.update(b"%d:" % len(chunk))
        whole.update(chunk)
    return whole.hexdigest()


def bucket(text: str | bytes, count: int) -> int:
    """A number below `count` that depends on the text alone: equal texts get equal numbers.

    >>> bucket("the rock is destined to be", 10) == bucket(b"the rock is destined to be", 10)
    True
    """
    text = text.encode() if isinstance(text, str) else text
    return int(hashlib.sha256(text).hexdigest(), 16) % count
