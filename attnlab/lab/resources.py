"""The threads of a run on a CPU, kept in the workdir: last bits depend on them."""

import json
from pathlib import Path

from attnlab.atomic import write_atomic

FILE = "resources.json"


def read_threads(workdir: Path) -> int | None:
    """The threads that the runs of a workdir have; None where that is open."""
    path = workdir / FILE
    if not path.exists():
        return None
    threads: int = json.loads(path.read_text())["threads"]
    return threads


def write_threads(workdir: Path, threads: int) -> None:
    """Keeps them for the next start."""
    if read_threads(workdir) != threads:
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomic(workdir / FILE, json.dumps({"threads": threads}).encode())
