"""What a workdir holds, and when a run may use it: nothing of an earlier run is ever lost."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnlab.atomic import is_partial, write_atomic
from experiments.running import lock

CONFIG = "config.json"
RESULT = "result.json"
CALIBRATION = "calibration.json"
"""What a sweep measured before its first arm (see `running/clock.py`)."""
SHOWN = 5
"""Differences that a refusal lists."""


class WorkdirError(ValueError):
    """A folder that this run must not or cannot write to."""


@contextlib.contextmanager
def own(folder: Path, patience: float = 0.3) -> Iterator[None]:
    """Holds `folder`, made where it is missing, for this process alone until the block ends.

    Raises lock.Busy, which names host and process, where another one has held it for `patience`
    seconds, and WorkdirError,
    without changing anything, where it is no folder of ours or cannot be written.
    """
    with contextlib.ExitStack() as leaving:
        with _writing(folder):
            if not folder.exists():
                folder.mkdir(parents=True, exist_ok=True)
                leaving.callback(_remove_if_empty, folder)
            elif not (folder / CONFIG).exists():
                _refuse_strangers(folder)
            leaving.enter_context(lock.own(folder, patience))
        yield


def claim(folder: Path, record: dict[str, Any], *, room: int = 0) -> list[str]:
    """Makes `folder`, which we `own`, this record's, or raises WorkdirError and changes nothing.

    It is free when it holds no config.json, and ours when its config.json holds the same record
    apart from "environment". `room` is the free bytes that the run will need.
    Returns what differs in the environment since the run began (to warn of).
    """
    record = json.loads(json.dumps(record))
    found = folder / CONFIG
    if found.exists():
        old = read_json(found)
        if differ := differences(old, record):
            raise WorkdirError(f"{folder} holds {_told(old, record, differ)}")
        changed = _flat_difference(old["environment"], record["environment"])
        return [f"{name} was {a}, is {b}" for name, a, b in changed]
    with _writing(folder):
        free = shutil.disk_usage(folder).free
        if free < room:
            raise WorkdirError(
                f"{folder}: the disk has {free >> 20} MiB left, this run needs {room >> 20} MiB"
            )
        write_json(found, record)
    return []


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkdirError(f"cannot write to {folder}: {error.strerror or error}") from error


def _refuse_strangers(folder: Path) -> None:
    ours = {lock.OWNER, CALIBRATION}
    for left in filter(is_partial, list(folder.iterdir())):  # by a kill in the first write
        left.unlink(missing_ok=True)
    some = sorted(p.name for p in folder.iterdir() if p.name not in ours)[:3]
    if some:
        raise WorkdirError(
            f"{folder} is not empty and is no run of attnlab (it holds {', '.join(some)}); "
            "use an empty or new --workdir"
        )


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def began_with(folder: Path) -> dict[str, Any]:
    """The environment in which what `folder` holds began; empty where it holds nothing of ours."""
    try:
        return read_json(folder / CONFIG)["environment"]
    except (WorkdirError, KeyError, TypeError):  # `claim` says what is wrong
        return {}


def read_json(path: Path) -> Any:
    """The content of a JSON file; WorkdirError where it is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{path} is not readable: {error}; use another --workdir") from error


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    write_atomic(path, content)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, there, here) of every field in which two records differ, but for "environment"."""
    both = (json.loads(json.dumps(record)) | {"environment": None} for record in (old, new))
    return _flat_difference(*both)


def _told(old: dict[str, Any], new: dict[str, Any], differ: list[tuple[str, Any, Any]]) -> str:
    """What a record is, where we have another."""
    kinds = ["a sweep" if "arms" in record else "one run" for record in (old, new)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}, not {kinds[1]}; use another --workdir"
    rows = [f"  {name}: there {a!r}, here {b!r}" for name, a, b in differ]
    more = [f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    lines = "\n".join([*rows[:SHOWN], *more])
    return f"another run:\n{lines}\nuse another --workdir, or give the same config"


def _flat_difference(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(name, there, here) of every leaf that differs; of a branch that one side lacks, one row."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        below = [(f"{name}.{n}" if name else n, old.get(n), new.get(n)) for n in names]
        return [row for n, a, b in below for row in _flat_difference(a, b, n)]
    old, new = (f"{len(s)} fields" if isinstance(s, dict) else s for s in (old, new))
    return [(name, old, new)]
