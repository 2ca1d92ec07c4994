"""What a workdir holds, and when a run may use it: nothing of an earlier run is ever lost."""

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

CONFIG = "config.json"
RESULT = "result.json"
PACKAGES = ("attnlab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class WorkdirError(ValueError):
    """A folder that this run must not or cannot write to."""


def claim(folder: Path, record: dict[str, Any], *, room: int = 0) -> list[str]:
    """Makes `folder` this record's own, or raises WorkdirError without changing anything.

    A folder is free when it is missing or empty, and ours when its config.json holds the same
    record apart from "environment". `room` is the free bytes that the run will need.
    Returns what differs in the environment since the run began (to warn of).
    """
    record = json.loads(json.dumps(record))
    found = folder / CONFIG
    if found.exists():
        old = read_json(found)
        old_environment, new_environment = old.pop("environment"), record["environment"]
        new = {k: v for k, v in record.items() if k != "environment"}
        if old != new:
            raise WorkdirError(
                f"{folder} holds another run:\n{_difference(old, new)}\n"
                "use another --workdir, or give the same config"
            )
        changed = _flat_difference(old_environment, new_environment)
        return [f"{name} was {a}, is {b}" for name, a, b in changed]
    try:
        if folder.exists() and any(folder.iterdir()):
            some = sorted(p.name for p in folder.iterdir())[:3]
            raise WorkdirError(
                f"{folder} is not empty and is no run of attnlab (it holds {', '.join(some)}); "
                "use an empty or new --workdir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < room:
            raise WorkdirError(
                f"{folder}: the disk has {free >> 20} MiB left, this run needs {room >> 20} MiB"
            )
        write_json(found, record)
    except OSError as error:
        raise WorkdirError(f"cannot write to {folder}: {error.strerror or error}") from error
    return []


def read_json(path: Path) -> Any:
    """The content of a JSON file; WorkdirError where it is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{path} is not readable: {error}; use another --workdir") from error


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, path)


def environment() -> dict[str, Any]:
    """Machine and versions that numbers depend on."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _commit(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def _commit() -> str:
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], stderr=-3)
        dirty = subprocess.check_output([*git, "status", "--porcelain", "."], stderr=-3)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.decode().strip() + (" with changes" if dirty else "")


def _difference(old: Any, new: Any) -> str:
    rows = _flat_difference(old, new)
    return "\n".join(f"  {name}: there {a!r}, here {b!r}" for name, a, b in rows)


def _flat_difference(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    old, new = _flat(old), _flat(new)
    names = sorted(old.keys() | new.keys())
    return [(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat
