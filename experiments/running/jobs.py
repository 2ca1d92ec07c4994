"""Many arms, each in a process of its own, side by side on the cores or devices of one machine.

An arm computes with the same number of threads however many run at once, so no number depends on
how many: the last bits of a sum depend on the threads that it is cut among, not on the cores that
run them.
"""

import collections
import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from attnlab.training.fit import Stopped
from experiments.running import arm, launch, lock, machine, workdir
from experiments.running.display import Display

TICK, LOOK = 0.1, 2.0
"""Seconds between looks at what runs, and at an arm that another process runs."""
LAST_LINES = 10
"""Of an arm that failed."""
LEFT = "left to another process"
ARM = [sys.executable, "-m", "experiments.running.jobs"]
"""The command that runs one arm, told which on standard input."""


class Room(NamedTuple):
    """How many arms run at once, and on what."""

    jobs: int
    """0: another decides."""
    threads: int | None
    """Of each arm; None where the CPU does not compute."""
    cores: list[int]
    gpus: list[str]
    """As `CUDA_VISIBLE_DEVICES` names them."""


def divide(arms: int, jobs: int | None = None, threads: int | None = None) -> Room:
    """This machine, divided among `arms` arms. What is given is taken, the rest chosen.

    On CPUs an arm has cores // arms threads, at least one, whatever `jobs` is, and as many arms run
    at once as there are cores for their threads. On GPUs one arm a GPU; on a TPU, which belongs to
    one process, one.
    """
    backend, count = _devices()
    cores = machine.cores()
    if backend == "cpu":
        threads = threads or max(1, len(cores) // arms)
        return Room(jobs or max(1, min(arms, len(cores) // threads)), threads, cores, [])
    if backend == "tpu":
        if (jobs or 1) > 1:
            raise ValueError(f"a TPU belongs to one process: --jobs=1, not {jobs}")
        return Room(1, None, cores, [])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(count)]
    return Room(jobs or min(arms, count), None, cores, gpus)


def share(things: Sequence[Any], count: int, index: int) -> Sequence[Any]:
    """What part `index` of `count` gets of `things`: neighbours, and never nothing.

    >>> [share("abcdefg", 3, i) for i in range(3)], [share("ab", 3, i) for i in range(3)]
    (['ab', 'cd', 'efg'], ['a', 'a', 'b'])
    """
    first = index * len(things) // count
    return things[first : max(first + 1, (index + 1) * len(things) // count)]


def run(
    configs: dict[str, ConfigDict], folder: Path, room: Room, *, waits: bool = True
) -> dict[str, str]:
    """Runs every arm in its folder below `folder`; returns how each ended, in words.

    arm.COMPLETE and arm.DIVERGED are those of result.json. An arm that another process runs is put
    off until no other is left, and then waited for; unless `waits` it is left to it. One that fails
    is told with its last lines, and the others go on. A signal is handed on: every arm saves and
    ends, then this raises training.Stopped.
    """
    ends: dict[str, str] = {}
    number = {name: f"arm {i}/{len(configs)}" for i, name in enumerate(configs, 1)}
    began = time.monotonic()
    complete = {name for name in configs if (folder / name / workdir.RESULT).exists()}
    running: dict[int, _Job] = {}
    with Display(configs, folder) as display, _signals() as signals:
        queue = _Queue(configs, folder, waits, display.say)
        stopped = False
        try:
            while queue.left or running:
                if signals:
                    signals.clear()
                    stopped = True
                    queue.left.clear()
                    for job in running.values():
                        job.stop()
                for slot in sorted(set(range(room.jobs)) - running.keys()):
                    if name := queue.next(ends):
                        if name not in complete:
                            display.say(name, f"{number[name]} begins")
                        running[slot] = _Job(name, configs[name], folder, room, slot, display.say)
                for slot, job in list(running.items()):
                    if (code := job.ended()) is None:
                        continue
                    del running[slot]
                    if code == launch.AGAIN and not stopped and lock.holder(folder / job.name):
                        queue.left.append(job.name)
                        continue
                    ends[job.name] = end = job.end(code)
                    if job.name not in complete:
                        minutes = (time.monotonic() - began) / 60
                        ended = f"{len(ends)} of {len(configs)} have ended in {minutes:.1f} minutes"
                        display.say(job.name, f"{number[job.name]}: {end}; {ended}")
                    if end not in (arm.COMPLETE, arm.DIVERGED) and not stopped:
                        display.say(job.name, "its last lines:\n" + "\n".join(job.last))
                display.show([job.name for job in running.values()], len(ends))
                time.sleep(TICK)
        finally:
            for job in running.values():
                job.stop()
    if stopped:
        done = sum(end == arm.COMPLETE for end in ends.values())
        raise Stopped(
            f"stopped; {done} of {len(configs)} arms are complete, the others go on from their "
            "last checkpoint with the same command"
        )
    return ends


class _Queue:
    """Arms that wait to begin."""

    def __init__(
        self, names: Iterable[str], folder: Path, waits: bool, say: Callable[[str, str], None]
    ):
        self.left = collections.deque(names)
        self._folder, self._waits, self._say = folder, waits, say
        self._put_off: dict[str, float] = {}

    def next(self, ends: dict[str, str]) -> str | None:
        """The next arm that nobody runs. Without `waits` one that another process runs ends here,
        in `ends`."""
        for name in list(self.left):
            if time.monotonic() < self._put_off.get(name, 0):
                continue
            who = lock.holder(self._folder / name)
            if not who:
                self.left.remove(name)
                return name
            if name not in self._put_off or not self._waits:
                self._say(name, f"in use by {who}: {'put off' if self._waits else 'left to it'}")
            if not self._waits:
                self.left.remove(name)
                ends[name] = LEFT
            self._put_off[name] = time.monotonic() + LOOK
        return None


class _Job:
    """One arm in a process of its own."""

    def __init__(
        self,
        name: str,
        config: ConfigDict,
        folder: Path,
        room: Room,
        slot: int,
        say: Callable[[str, str], None],
    ):
        self.name, self._folder, self._say = name, folder / name, say
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        asked = {
            "config": config.to_dict(),
            "folder": self._folder,
            "name": name,
            "cores": share(room.cores, room.jobs, slot) if room.threads else None,
            "threads": room.threads,
        }
        self._process = subprocess.Popen(
            ARM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone, and we hand it on
            env={**os.environ, **jax_flags(), **_of_gpu(room, slot)},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last lines say why
            self._process.stdin.write(pickle.dumps(asked))
            self._process.stdin.flush()  # and left open: its end tells the arm that we are no more
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip().removeprefix(f"[{self.name}] ")
            self.last.append(line)
            self._say(self.name, line)

    def stop(self) -> None:
        """Asks it to save and end."""
        self._process.terminate()

    def ended(self) -> int | None:
        """The exit code, once the process is no more and all that it said is shown."""
        code = self._process.poll()
        if code is not None:
            self._reader.join()
        return code

    def end(self, code: int) -> str:
        """How it ended, in words."""
        if code == 0:
            return workdir.read_json(self._folder / workdir.RESULT)["status"]
        if code == -signal.SIGKILL:
            return "killed by SIGKILL (out of memory?)"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return "stopped" if code == launch.AGAIN else f"ended with exit code {code}"


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Within, SIGTERM and SIGINT are put into the list in place of ending the process."""
    came: list[int] = []
    both = (signal.SIGTERM, signal.SIGINT)
    before = {s: signal.signal(s, lambda number, frame: came.append(number)) for s in both}
    try:
        yield came
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def jax_flags() -> dict[str, str]:
    """The --jax_ flags of this command, as variables of the environment: JAX reads both."""
    given = [f for f in map(flags.FLAGS.__getitem__, flags.FLAGS) if f.name.startswith("jax_")]
    return {f.name.upper(): str(f.value) for f in given if f.present}


def _of_gpu(room: Room, slot: int) -> dict[str, str]:
    """Which GPUs an arm sees; where several share one, each has its part of JAX's 75 % of it."""
    if not room.gpus:
        return {}
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(share(room.gpus, room.jobs, slot))}
    together = math.ceil(room.jobs / len(room.gpus))
    if together > 1 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        seen["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.75 / together:.3f}"
    return seen


def _devices() -> tuple[str, int]:
    """What an arm will find. Asked in a process of its own: who asks holds the devices."""
    code = "import jax; print(jax.default_backend(), jax.local_device_count())"
    environment = {**os.environ, **jax_flags()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    if done.returncode:
        raise ValueError(f"JAX finds no device: {done.stderr.decode(errors='replace').strip()}")
    backend, count = done.stdout.split()[-2:]
    return backend.decode(), int(count)


def main() -> None:
    """The arm that `_Job` asks for on standard input."""
    asked = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_follow, daemon=True).start()
    if asked["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked["cores"])
    machine.compute_with(asked["threads"])
    machine.keep_compiled()
    arm.run(ConfigDict(asked["config"]), asked["folder"], asked["name"])


def _follow() -> None:
    """Stops this process when the one that started it is no more."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    launch.start(main)
