"""The folders of a sweep and of its runs: who holds one, and what it says of its run.

A folder has one holder: a lock that ends with its process and names who holds it.

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
import dataclasses
import fcntl
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

import jax

from attnlab.atomic import is_partial, write_atomic
from attnlab.data import Dataset
from attnlab.lab.machine import PROVENANCE, environment, write_provenance
from attnlab.lab.result import FILE as RESULT
from attnlab.lab.result import RunResult, data_info, read_result
from attnlab.lab.spec import RunSpec, check_unique, read_specs, write_specs
from attnlab.load import IMPORTS, RUNS, SPEC, SPECS
from attnlab.models import ModelConfig, num_parameters
from attnlab.nested import JSON, SHOWN, differences, field_path, naming_file
from attnlab.training import sharding
from attnlab.training.checkpoint import check_longer
from attnlab.training.config import TrainConfig

LOCK = "lock.json"
SHARED = "shared"
"""Folder of a workdir for what its runs share."""
TOUCH_SECONDS, DEAD_SECONDS = 10.0, 60.0
"""Between touches, and after which a file that nobody touches has no holder."""


class RunInUse(RuntimeError):
    """Another process holds the folder.

    Attributes:
      holder: in words.

    The lock ends with its process, however that ends. Only on some network file systems a process
    that was killed keeps the folder for a minute (`attnlab.lab.workdir`).
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
    path, until, pause = folder / LOCK, time.monotonic() + patience, 0.02
    while isinstance(file := _take(path, "a+"), str):
        if time.monotonic() > until:  # else it may be no more than a call of `holder`
            raise RunInUse(folder, file)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)  # who waits for minutes should not keep a shared disk busy
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


@contextlib.contextmanager
def waiting(folder: Path) -> Iterator[None]:
    """Holds `folder`, made where it is missing, as soon as nobody else does."""
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, math.inf):
        yield


def holder(folder: Path) -> str | None:
    """Who holds `folder`, in words, or None."""
    try:
        found = _take(folder / LOCK, "r+")
    except FileNotFoundError:
        return None
    if isinstance(found, str):
        return found
    found.close()
    return None


def last_process(folder: Path) -> int | None:
    """The process that the lock file names, also one that was killed; None without a file."""
    with contextlib.suppress(OSError), (folder / LOCK).open() as file:
        found: int | None = _read(file).get("process")
        return found
    return None


def _take(path: Path, mode: str) -> IO[str] | str:
    """The lock file, open and locked; or in words who has it."""
    while True:
        with contextlib.ExitStack() as closes:
            file = closes.enter_context(path.open(mode))
            found, locked = _read(file), True
            name = "process {process} on {host} since {since}".format_map(found) if found else ""
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return name or "another process"  # which has not written yet
            except OSError:  # a file system without locks
                locked = False
            certain = locked and found.get("kernel") == _ourselves()["kernel"]
            with contextlib.suppress(FileNotFoundError):
                if found and not certain and _age(path) < DEAD_SECONDS:
                    return name
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


def run_folder(workdir: Path, spec: RunSpec) -> Path:
    """The folder of a run."""
    return workdir / RUNS / spec.id


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints of a run."""
    return [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]


def specs_in(workdir: Path) -> dict[str, RunSpec]:
    """The specs of a workdir by their ids. Raises ValueError, with the path, for a damaged file."""
    path = workdir / SPECS
    with naming_file(path):
        found = read_specs(path.read_text(encoding="utf-8")) if path.exists() else ()
    return {spec.id: spec for spec in found}


def add_specs(specs: Sequence[RunSpec], workdir: Path) -> None:
    """Writes the specs to the workdir, behind those that are there.

    Raises:
      ValueError: the workdir has another run of an id that has begun, and cannot be made longer; or
        a spec that other processes cannot read.
    """
    check_unique(specs)
    there = specs_in(workdir)
    if all(there.get(spec.id) == spec for spec in specs):
        return
    with waiting(workdir):
        there = specs_in(workdir)  # another sweep may have added some
        for spec in specs:
            old, folder = there.get(spec.id, spec), run_folder(workdir, spec)
            if old.digest != spec.digest and ((folder / SPEC).exists() or holder(folder)):
                check_goes_on(folder, old.to_dict(), spec.to_dict())
        text = write_specs(list((there | {spec.id: spec for spec in specs}).values()))
        read_specs(text)
        write_atomic(workdir / SPECS, text.encode())


def complete_result(workdir: Path, spec: RunSpec) -> RunResult | None:
    """The result of a run; None where there is none, or one of another number of steps."""
    found = read_result(run_folder(workdir, spec), spec)
    return found if found is not None and found.spec.digest == spec.digest else None


def check_goes_on(folder: Path, there: JSON, here: JSON) -> int:
    """Compares what a folder holds with a spec, both as JSON.

    Returns:
      0 for the same run; for the first steps of a longer one their number.

    Raises:
      ValueError: another run, with the differences; or a checkpoint after the last step up to which
        the shorter and the longer run have the same learning rates.
    """
    # The run has its own seed, and a module may move.
    free = ("environment", "tags", "config.train.seeds", f"config.{IMPORTS}")
    changed = [row for row in differences(there, here) if not row[0].startswith(free)]
    if not changed:
        return 0
    before = there["config"]["train"]["steps"]
    train = TrainConfig.from_dict(here["config"]["train"])
    if [row[0] for row in changed] == ["config.train.steps"] and before < train.steps:
        check_longer(folder, before, train, max(saved_steps(folder), default=0))
        return int(before)
    changed.sort(key=lambda row: row[0].startswith("source.facts"))  # they follow from the rest
    rows = [f"  {field_path(name)}: there {a!r}, here {b!r}" for name, a, b in changed[:SHOWN]]
    more = f"and {len(changed) - SHOWN} more; " if len(changed) > SHOWN else ""
    listed = "\n".join(rows)
    raise ValueError(
        f"{folder} holds another run of this id:\n{listed}\n"
        f"{more}use another --workdir or id, or give the same config"
    )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder of a run, made where it is missing, in process 0.

    Raises:
      RunInUse: another process has it.
      ValueError: it holds something else.
    """
    if jax.process_index() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SPEC).exists():
        ours = {LOCK, RESULT, PROVENANCE, "changes.diff", "error.txt", "tokenizer.json"}
        for path in sorted(folder.iterdir()):
            if path.name not in ours and not is_partial(path):  # of a kill in the first write
                raise ValueError(
                    f"{folder} is not empty and holds no run of attnlab (it holds {path.name}); "
                    "use an empty or new --workdir"
                )
    with hold(folder):
        yield


def claim(folder: Path, spec: RunSpec, dataset: Dataset, start: str | None) -> list[str]:
    """Writes spec.json, or checks that the one there is the same run, or the first steps of it.

    Args:
      folder: of the run, which this process holds.
      spec: the run.
      dataset: on which it trains; the folder keeps its files.
      start: digest of the parameters that it starts from.

    Returns:
      Lines for people: that it goes on for more steps, and what differs in the environment since it
      began.
    """
    lines = []
    if jax.process_index() == 0:
        begun = {"start": {"digest": start} if start else None, "environment": environment()}
        record = spec.to_dict() | {"source": dataclasses.asdict(data_info(dataset))} | begun
        record = json.loads(json.dumps(record, allow_nan=False))
        path = folder / SPEC
        if not path.exists():
            _check_disk(folder, spec.config.model)
            for name, content in dataset.files.items():
                write_atomic(folder / name, content)
            write_provenance(folder)
            write_atomic(path, json.dumps(record, indent=1).encode())
        there = json.loads(path.read_text(encoding="utf-8"))
        if before := check_goes_on(folder, there, record):
            longer = record | {"environment": there["environment"]}
            write_atomic(path, json.dumps(longer, indent=1).encode())
            (folder / RESULT).unlink(missing_ok=True)
            lines.append(f"{before} steps become {spec.config.train.steps}")
        lines += [
            f"since this run began, {name} changed from {old} to {new}: its numbers may differ in "
            "the last bits"
            for name, old, new in differences(there["environment"], record["environment"])
        ]
    sharding.wait_for_all("spec")
    return lines


def _check_disk(folder: Path, model: ModelConfig) -> None:
    """Raises OSError where the disk has no space for the checkpoints."""
    # Parameters and two moments in float32, for three checkpoints and the one being written.
    needed = 12 * 4 * num_parameters(model) + (64 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder}: the disk has {free >> 20} MiB left, this run needs {needed >> 20} MiB"
        )
