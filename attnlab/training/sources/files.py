"""Files of data, read whole; a bad line is refused by file and line before any work."""

import gzip
import hashlib
from collections.abc import Iterable
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """The content of a file; `.gz` is unpacked.

    Raises FileNotFoundError, or ValueError where the file cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def lines_of(data: bytes, name: object) -> list[str]:
    r"""The lines of a text in UTF-8, without their ends; a last line that is empty is none.

    Only "\n" and "\r\n" end a line: Unicode knows more line ends, which aligned files may hold
    within a line. Raises ValueError that names the file and line of a byte that is not UTF-8.

    >>> lines_of(b"one\ntwo\n", "a.txt")
    ['one', 'two']
    >>> lines_of(b"one\n\xff\n", "a.txt")
    Traceback (most recent call last):
        ...
    ValueError: a.txt:2: byte 0xff at column 1 is not UTF-8; convert the file
    """
    rows = data.split(b"\n")
    rows = rows[:-1] if rows[-1] == b"" else rows
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(row.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}:{number}: byte 0x{row[error.start]:02x} at column {error.start + 1} is "
                "not UTF-8; convert the file"
            ) from None
    return found


def read_lines(path: Path) -> list[str]:
    """`lines_of` a file."""
    return lines_of(read_bytes(path), path)


def digest(parts: Iterable[bytes]) -> str:
    """sha256 of the parts one after the other, each with its length before it."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.hexdigest()


def bucket(text: str | bytes, count: int) -> int:
    """A number below `count` that depends on the text alone: equal texts fall together.

    >>> bucket("the rock is destined to be", 10) == bucket(b"the rock is destined to be", 10)
    True
    """
    text = text.encode() if isinstance(text, str) else text
    return int(hashlib.sha256(text).hexdigest(), 16) % count
