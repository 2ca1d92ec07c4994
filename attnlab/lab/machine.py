"""What the numbers of a run depend on besides its spec: processor, threads, versions, the commit;
and the cache of compiled programs."""

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import jax

from attnlab.atomic import write_atomic

PACKAGES = ("attnlab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
CACHE_SIZE = 2 << 30
PROVENANCE = "provenance.json"
"""In the folder of a run."""
RESOURCES = "resources.json"
"""In a workdir: the threads of its runs on a CPU, since last bits depend on them."""


def cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads() -> int:
    """Threads that XLA computes with on a CPU.

    Long sums are divided among them, so the last bits depend on their number; whether they run on
    as many cores or share one changes no bit.
    """
    return int(os.environ.get("NPROC") or 0) or len(cores())


def use_threads(count: int | None) -> None:
    """Sets `threads`, before JAX has looked for devices; None leaves one for each core."""
    if count:
        os.environ["NPROC"] = str(count)


def read_threads(workdir: Path) -> int | None:
    """The threads that the runs of a workdir have; None where that is open."""
    path = workdir / RESOURCES
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return found.get("threads")


def write_threads(workdir: Path, count: int) -> None:
    """Keeps them for the next start; the workdir exists."""
    if read_threads(workdir) != count:
        write_atomic(workdir / RESOURCES, json.dumps({"threads": count}).encode())


def processor() -> str:
    """The name of the processor, or its architecture where that is not known."""
    return _processor().get("model name") or platform.processor() or platform.machine()


def environment() -> dict[str, str]:
    """Device, machine and versions, which numbers depend on."""
    device = jax.devices()[0]
    found = {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "machine": processor(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }
    return found | ({"threads": str(threads())} if device.platform == "cpu" else {})


def keep_compiled() -> None:
    """Keeps compiled programs in the user's cache folder, for the next process to load.

    A program belongs to a CPU with all its features, to versions of jax and jaxlib and to a number
    of threads: each has a folder of its own, so a home on many machines is safe. JAX's own keys
    know programs and flags, not CPUs. Options of JAX win: --jax_compilation_cache_dir is another
    place, --jax_enable_compilation_cache=false none. None are kept either without the package
    filelock (which bounds the folder to 2 GiB and lets processes share it), where the folder cannot
    be written, and on systems other than Linux, where loading was seen to crash.
    """
    options = jax.config.values
    is_set = options["jax_compilation_cache_dir"] or not options["jax_enable_compilation_cache"]
    if is_set or sys.platform != "linux":
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = [metadata.version(name) for name in ("jax", "jaxlib")]
    key = [platform.machine(), _processor(), *versions, threads()]
    folder = home / "attnlab" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    try:
        import filelock  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError):
        return
    if not os.access(folder, os.W_OK):
        return
    # A process that waits too long for the lock of the folder compiles by itself: only slower.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_SIZE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _processor() -> dict[str, str]:
    """What Linux reports of the first core: its name and its features."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    rows = [line.partition(":") for line in first.splitlines()]
    return {name.strip(): value.strip() for name, _, value in rows if name.strip() in _FIELDS}


# On x86, then on Arm.
_FIELDS = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
}  # fmt: skip


def write_provenance(folder: Path) -> None:
    """Writes `provenance.json` into the folder of a run, and `changes.diff` of `git diff HEAD`
    where there are changes.

    The JSON has of this process "argv", "directory", "python", "platform", "git" (commit, branch
    and files that differ from it; None outside a repository) and "packages" (name -> version of all
    installed distributions). Files that git does not know are named in "git" alone.
    """
    here = Path.cwd()
    commit, git = _git(here, "rev-parse", "HEAD"), None
    if commit:
        branch = _git(here, "rev-parse", "--abbrev-ref", "HEAD")
        changed = _git(here, "status", "--porcelain").splitlines()
        git = {"commit": commit.strip(), "branch": branch.strip(), "changed": changed}
        if changes := _git(here, "diff", "HEAD"):
            write_atomic(folder / "changes.diff", changes.encode(errors="surrogateescape"))
    about = {
        "argv": sys.argv, "directory": str(here), "python": platform.python_version(),
        "platform": platform.platform(), "git": git, "packages": dict(_packages()),
    }  # fmt: skip
    content = json.dumps(about, indent=1, default=str) + "\n"
    write_atomic(folder / PROVENANCE, content.encode())


def code_commit(root: Path) -> str:
    """The commit of a clone of this code, with "+changes" where files differ from it; "unknown"
    outside a git repository."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    changed = commit and _git(root, "status", "--porcelain", "attnlab", "experiments")
    return (commit or "unknown") + ("+changes" if changed else "")


@functools.cache
def _packages() -> tuple[tuple[str, str], ...]:
    """Names and versions; reading them takes a second, so a process does it once."""
    return tuple(sorted((d.name, d.version) for d in metadata.distributions() if d.name))


def _git(directory: Path, *words: str) -> str:
    """What git prints; "" where it fails. Bytes that are no text become surrogates."""
    command = ["git", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")
