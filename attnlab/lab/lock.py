"""One holder of a folder: a lock that ends with its process and names who holds it.

`flock` on FOLDER/lock.json, which the holder fills with its host, process and start, touches every
10 seconds and removes at its end. The kernel releases the lock when a process ends, however it
ends: on one machine a killed holder is gone at once.

Network file systems differ. NFS passes the lock on to the server (Linux since 2.6.12), so does
Lustre mounted with `flock`; mounted with `nolock`, `local_lock` or `localflock` they lock within a
host only, and some file systems do not lock at all. So where the lock is not enough, since the
holder was on another host or the file system has none, the age of the file decides: a holder that
touched it within a minute is alive. There a holder that was killed keeps the folder for a minute,
and of two that start in the same moment both may get it.
"""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from attnlab.nested import JSON

FILE = "lock.json"
TOUCH_SECONDS, DEAD_SECONDS = 10.0, 60.0
"""Between touches, and after which a file that nobody touches has no holder."""


class RunInUse(RuntimeError):
    """Another process holds the folder.

    Attributes:
      holder: in words.

    The lock ends with its process, however that ends. Only on some network file systems a process
    that was killed keeps the folder for a minute (`attnlab.lab.lock`).
    """

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(
            f"{folder} is in use by {holder}; wait for it, end it, or use another --workdir"
        )
        self.holder = holder


@contextlib.contextmanager
def hold(folder: Path, patience: float = 0.3) -> Iterator[None]:
    """Holds `folder`, which must exist, until the block or the process ends.

    Raises:
      RunInUse: another process, or another `hold` of this one, has it for `patience` seconds.
    """
    path, until = folder / FILE, time.monotonic() + patience
    while True:
        try:
            file = _take(path, "a+")
            break
        except RunInUse:  # which may be no more than a call of `holder`
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
    with file:
        file.truncate(0)
        file.write(json.dumps(_ourselves()) + "\n")
        file.flush()
        done = threading.Event()
        threading.Thread(target=_touch, args=(path, done), daemon=True).start()
        try:
            yield
        finally:
            done.set()
            path.unlink(missing_ok=True)


def holder(folder: Path) -> str | None:
    """Who holds `folder`, in words, or None."""
    try:
        _take(folder / FILE, "r+").close()
    except FileNotFoundError:
        pass
    except RunInUse as error:
        return error.holder
    return None


def last_process(folder: Path) -> int | None:
    """The process that the lock file names, also one that was killed; None without a file."""
    try:
        found: int | None = json.loads((folder / FILE).read_text())["process"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _take(path: Path, mode: str) -> IO[str]:
    """The lock file, open and locked. Raises RunInUse."""
    while True:
        with contextlib.ExitStack() as closes:
            file = closes.enter_context(path.open(mode))
            found, locked = _read(file), True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUse(path.parent, _in_words(found)) from None
            except OSError:  # a file system without locks
                locked = False
            certain = locked and found.get("kernel") == _ourselves()["kernel"]
            with contextlib.suppress(FileNotFoundError):
                if found and not certain and _age(path) < DEAD_SECONDS:
                    raise RunInUse(path.parent, _in_words(found))
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    closes.pop_all()
                    return file
            # Its holder removed it in between: the lock is on a file that has no name.


def _ourselves() -> JSON:
    """What a holder writes. Locks hold among the processes of one kernel, containers or not."""
    host = socket.gethostname()
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = host
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"host": host, "process": os.getpid(), "since": now, "kernel": kernel}


def _in_words(found: JSON) -> str:
    if not found:  # it has not written yet
        return "another process"
    return f"process {found['process']} on {found['host']} since {found['since']}"


def _read(file: IO[str]) -> JSON:
    file.seek(0)
    try:
        found: JSON = json.loads(file.read())
    except ValueError:
        return {}
    return found


def _age(path: Path) -> float:
    """Seconds since the last touch, by the clock of the file system."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)
