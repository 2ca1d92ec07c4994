"""What the numbers of a run depend on besides its spec, and the cache of compiled programs."""

import hashlib
import json
import os
import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path

import jax

from attnlab.atomic import write_atomic

PACKAGES = ("attnlab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
CACHE_SIZE = 2 << 30
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
    return int(os.environ.get("NPROC", 0)) or len(cores())


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
    """Keeps them for the next start."""
    if read_threads(workdir) != count:
        workdir.mkdir(parents=True, exist_ok=True)
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


def keep_compiled() -> Path | None:
    """Keeps compiled programs in the user's cache folder, for the next process to load.

    A program belongs to a CPU with all its features, to versions of jax and jaxlib and to a number
    of threads: each has a folder of its own, so a home on many machines is safe. JAX's own keys
    know programs and flags, not CPUs. Options of JAX win: --jax_compilation_cache_dir is another
    place, --jax_enable_compilation_cache=false none.

    Returns:
      The folder. None where programs are not kept: there, without the package filelock (which
      bounds the folder to 2 GiB and lets processes share it), where it cannot be written, and on
      systems other than Linux, where loading was seen to crash.
    """
    options = jax.config.values
    if options["jax_compilation_cache_dir"] or not options["jax_enable_compilation_cache"]:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = [metadata.version(name) for name in ("jax", "jaxlib")]
    key = [platform.machine(), _processor(), *versions, threads()]
    folder = home / "attnlab" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    try:
        import filelock  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError):
        return None
    if sys.platform != "linux" or not os.access(folder, os.W_OK):
        return None
    # A process that waits too long for the lock of the folder compiles by itself: only slower.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_SIZE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder


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
