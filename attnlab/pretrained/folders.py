"""Write several files of a folder together: all of them or none."""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2(2)."""


def write_together(
    folder: Path, write: Callable[[Path], None], *, remove: Callable[[str], bool]
) -> None:
    """Add the files that `write` makes to `folder`, replacing those of the same names.

    `write(new)` writes into a new, empty folder beside `folder`. All is flushed to disk, the other
    files of `folder` are linked into the new one, and the two exchange their names in one system
    call. If anything fails before that, or the process is killed, `folder` is as it was, or not
    there. A killed process may leave the new folder behind, named ".NAME.*.new".

    Where two folders cannot be exchanged (other systems than Linux, some network file systems, a
    mount point, the working directory, a parent that is not writable) the files are replaced one
    by one. An error then restores the old files; a kill between two of them does not.

    Args:
      folder: made if missing, with its parents. A link to a folder is followed.
      write: makes files, not folders.
      remove: name -> whether a file in `folder` of that name, which `write` does not make, goes.

    Raises:
      ValueError: `folder` is a file.
      OSError: whatever went wrong in writing.
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{folder} is a file; pass a folder to save into")
    os.makedirs(target.parent, exist_ok=True)
    beside = not target.exists() or _has_free_name(target)
    place = target.parent if beside else target
    new = place / f".{target.name[:100]}.{uuid.uuid4().hex[:12]}.new"
    os.mkdir(new)
    try:
        write(new)
        names = sorted(os.listdir(new))
        present = os.listdir(target) if target.exists() else []
        stale = [name for name in present if remove(name) and name not in names]
        for path in (*(new / name for name in names), new):
            _flush(path)
        if not target.exists():
            os.rename(new, target)
        elif not (beside and _exchange_keeping(new, target, [*names, *stale])):
            _replace_each(new, target, names)
            for name in stale:
                os.unlink(target / name)
        _flush(target.parent if beside else target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _has_free_name(folder: Path) -> bool:
    """Whether another folder may take its name: it is no mount point and not in use as the working
    directory, and its parent is writable."""
    here = Path(os.path.realpath(os.curdir))
    used = folder == here or folder in here.parents
    return not used and not os.path.ismount(folder) and os.access(folder.parent, os.W_OK)


def _exchange_keeping(new: Path, target: Path, names: Iterable[str]) -> bool:
    """Exchange two folders after all of `target` but `names` is linked into `new`. Returns whether
    the system can."""
    top, gone = str(target), set(names)
    shutil.copytree(
        target,
        new,
        symlinks=True,
        ignore=lambda folder, found: gone.intersection(found) if str(folder) == top else (),
        copy_function=_link,
        dirs_exist_ok=True,
    )
    _flush(new)
    return _exchange(new, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once. Returns False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # an older C library
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EBUSY, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _replace_each(new: Path, target: Path, names: Iterable[str]) -> None:
    """Move files one by one; an error puts those that were replaced back."""
    old, moved = new / "old", list[str]()
    os.mkdir(old)
    for name in names:
        if os.path.lexists(target / name):
            _link(target / name, old / name)
    try:
        for name in names:
            os.replace(new / name, target / name)
            moved.append(name)
    except BaseException:
        for name in moved:
            if os.path.lexists(old / name):
                os.replace(old / name, target / name)
            else:
                os.unlink(target / name)
        raise


def _flush(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # Some file systems have no fsync of folders.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)
