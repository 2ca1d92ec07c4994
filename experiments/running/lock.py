"""One owner of a folder: a lock that dies with its process and says who holds it.

`flock` on FOLDER/owner.json, which the owner fills with its host, process and start, touches every
10 seconds and removes at its end. The kernel lets go of the lock when a process ends, however it
ends: on one machine a killed owner is gone at once.

Network disks differ. NFS passes the lock on to the server (Linux since 2.6.12), so does Lustre
mounted with `flock`; mounted with `nolock`, `local_lock` or `localflock` they lock within a host
only, and some disks do not lock at all. So where the lock cannot tell, since the owner was on
another host or the disk has none, the age of the file does: who touched it within a minute is
alive. There an owner that was killed holds the folder for a minute, and of two that start in the
same moment both may get it.
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
from typing import IO, Any

OWNER = "owner.json"
BEAT, DEAD = 10.0, 60.0
"""Seconds between touches, and from which on a file that nobody touches has no owner."""


class Busy(ValueError):
    """Another process owns the folder: `who`, in words."""

    def __init__(self, folder: Path, who: str):
        super().__init__(
            f"{folder} is in use by {who}; wait for it, end it, or use another --workdir"
        )
        self.who = who


@contextlib.contextmanager
def own(folder: Path, patience: float = 0.3) -> Iterator[None]:
    """Holds `folder`, which must exist, until the block or the process ends.

    Raises Busy where another process, or another `own` of this one, has held it for `patience`
    seconds.
    """
    path, until = folder / OWNER, time.monotonic() + patience
    while True:
        try:
            file = _take(path, "a+")
            break
        except Busy:  # which may be no more than a look of `holder`
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
        _take(folder / OWNER, "r+").close()
    except FileNotFoundError:
        pass
    except Busy as busy:
        return busy.who
    return None


def _take(path: Path, mode: str) -> IO:
    """The owner's file, open and locked. Raises Busy."""
    while True:
        with contextlib.ExitStack() as closes:
            file = closes.enter_context(path.open(mode))
            owner, locked = _read(file), True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(path.parent, _in_words(owner)) from None
            except OSError:  # a disk without locks
                locked = False
            sure = locked and owner.get("kernel") == _ourselves()["kernel"]
            with contextlib.suppress(FileNotFoundError):
                if owner and not sure and _age(path) < DEAD:
                    raise Busy(path.parent, _in_words(owner))
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    closes.pop_all()
                    return file
            # Its owner removed it in between: the lock is on a file that has no name.


def _ourselves() -> dict[str, Any]:
    """What an owner writes. Locks hold among the processes of one kernel, containers or not."""
    host = socket.gethostname()
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = host
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"host": host, "process": os.getpid(), "since": now, "kernel": kernel}


def _in_words(owner: dict[str, Any]) -> str:
    if not owner:  # it has not written yet
        return "another process"
    return f"process {owner['process']} on {owner['host']} since {owner['since']}"


def _read(file: IO) -> dict[str, Any]:
    file.seek(0)
    try:
        return json.loads(file.read())
    except ValueError:
        return {}


def _age(path: Path) -> float:
    """Seconds since the last touch, by the clock of the disk."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)
