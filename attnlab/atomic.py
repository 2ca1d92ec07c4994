"""Write a file so that a kill or a power failure leaves the old content or the new one."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
SUFFIX = ".partial"
"""Of the temporary file beside the one that is written; what a kill leaves may be deleted."""


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Where the disk is full: raises an OSError that names `path` and says what to do."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        if code not in FULL and os.strerror(errno.ENOSPC) not in str(error):  # of a library in C++
            raise
        code = code or errno.ENOSPC
        full = OSError(
            f"{path}: {os.strerror(code)}; free some space and repeat the command, which goes on "
            "from what was saved"
        )
        full.errno = code
        raise full from error


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` by a file with this content, and returns when it is on the disk.

    The content goes to a temporary file of a name of its own (`.NAME.RANDOM.partial`), which is
    renamed after an fsync. On an error it is deleted and `path` is as it was.

    Raises:
      OSError: the folder cannot be written, or the disk is full.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}{SUFFIX}")
    try:
        with naming_full_disk(path), new.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems have no fsync of folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_new_file(path: Path, flag: str) -> None:
    """Raises ValueError, naming the flag, unless a new file can be written to `path`."""
    if path.exists():
        raise ValueError(f"{path} exists already; name another file with --{flag}")
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} for --{flag}; create it or name another")


def is_partial(path: Path) -> bool:
    """Is it the temporary file of a `write_atomic` that was killed?

    >>> is_partial(Path("run/.config.json.k3x9.partial")), is_partial(Path("run/config.json"))
    (True, False)
    """
    return path.name.startswith(".") and path.name.endswith(SUFFIX)
