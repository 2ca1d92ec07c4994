"""Files of data, read whole; errors name file and line."""

import codecs
import contextlib
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeAlias

import numpy as np

from attnlab.atomic import SUFFIX, naming_full_disk


def check_path(path: str, what: str, advice: str, *, folder: bool = False) -> None:
    """Raises FileNotFoundError where `path` is given and there is nothing (or no folder) there.

    Args:
      path: a file or folder; "": none is given.
      what, advice: of the message: no `what` at `path`; `advice`.
      folder: it must be a folder.
    """
    if path and not (Path(path).is_dir() if folder else Path(path).exists()):
        raise FileNotFoundError(f"no {what} at {path}; {advice}")


def last_name(path: str) -> str:
    """The name of a file or folder, for people; that of "." is the name of the working folder."""
    return os.path.basename(os.path.abspath(path)) or path


def visible_files(path: Path, pattern: str = "*") -> list[Path]:
    """The files in a folder and in all folders in it, sorted; those whose name, or that of a folder
    on the way, begins with a dot (.git, .ipynb_checkpoints, .DS_Store) are left out. A file is the
    only one in itself."""
    if path.is_file():
        return [path] if path.match(pattern) else []
    found = sorted(path.rglob(pattern))
    seen = [p for p in found if not any(n.startswith(".") for n in p.relative_to(path).parts)]
    return [p for p in seen if p.is_file()]


SIGNATURES = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"%PDF-")
"""First bytes of zip, gzip, bzip2, xz, Zstandard and PDF."""


def check_text(data: bytes, name: object) -> bytes:
    """`data` without a UTF-8 byte-order mark, the first bytes of a text or all of them.

    Raises ValueError where it is packed or binary: it begins as `SIGNATURES` do, or has a zero byte
    among the first 8,000 (as Git decides).
    """
    if data.startswith(SIGNATURES) or b"\0" in data[:8000]:
        raise ValueError(
            f"{name} is packed or binary, not text; unpack or convert it to UTF-8 (gzip is read "
            "where the name ends with .gz), or take it out of the folder"
        )
    return data.removeprefix(codecs.BOM_UTF8)


def read_bytes(path: Path) -> bytes:
    """The content of a text, without a byte-order mark; `.gz` is decompressed.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file cannot be read, or is packed or binary (`check_text`).
    """
    if not path.exists():
        raise FileNotFoundError(f"no file {path}")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    return check_text(data, path)


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


def stamp(*paths: Path) -> Stamp:
    """Name, size and time of change of each file, and of each visible file in a folder."""
    found = ((str(file), file.stat()) for path in paths for file in visible_files(path))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


Arrays: TypeAlias = dict[str, np.ndarray]
_folder: ContextVar[Path | None] = ContextVar("folder of keep_in", default=None)


@contextlib.contextmanager
def keep_in(folder: Path) -> Iterator[None]:
    """Inside, what datasets read and tokenize is stored in `folder`, and is mapped from there when
    it is there: the runs of a sweep read and hash one text once.

    >>> with tempfile.TemporaryDirectory() as folder, keep_in(Path(folder)):
    ...     one = kept(("numbers", 3), lambda: {"numbers": np.arange(3)})
    ...     two = kept(("numbers", 3), lambda: print("not called"))
    >>> two
    {'numbers': array([0, 1, 2])}
    """
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def kept(key: tuple[object, ...], make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns; it is called once for a key and folder of `keep_in`, else every time.

    Args:
      key: everything that the arrays depend on, as values with a repr of their own: of files their
        `stamp`.
      make: returns named arrays.
    """
    if (folder := _folder.get()) is None:
        return make()
    place = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    if not place.exists():
        arrays = make()
        folder.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder, prefix=".", suffix=SUFFIX))
        for name, array in arrays.items():
            with naming_full_disk(place), (new / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # another process was first
            new.rename(place)
        shutil.rmtree(new, ignore_errors=True)
    return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in place.iterdir()}


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
    # A name of a file that is not UTF-8 is its bytes.
    text = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return int(hashlib.sha256(text).hexdigest(), 16) % count
