"""Where the runs of a sweep are computed: this process, or processes of this machine."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from attnlab.fields import check_field
from attnlab.lab.machine import cores, read_threads, use_threads, write_threads
from attnlab.lab.run import RunOptions
from attnlab.lab.text_table import counted
from attnlab.lab.workdir import last_process
from attnlab.lab.worker import ERROR, STOPPED, work
from attnlab.load import RUNS
from attnlab.names import module_reference
from attnlab.training.interrupts import Stopped, stop_signals
from attnlab.training.loggers import LOGGERS

LOGS, TPU = "logs", "tpu"
POLL_SECONDS = 0.5
T = TypeVar("T")


class Queued(Exception):
    """Runs are in a queue, or on their way there, and go on without this process.

    Later the same call reads their results:

        try:
            results = lab.sweep(specs, workdir, executor=lab.SlurmExecutor(mode="submit"))
        except lab.Queued as message:
            print(message)
    """


@runtime_checkable
class Executor(Protocol):
    """Starts workers on a workdir. A worker runs what no other one has or has finished.

    >>> class NoWorkers:  # any class with these methods; it may start them on another machine
    ...     def start(self, workdir, count): pass
    ...     def running(self): return False
    ...     def stop(self): pass
    >>> isinstance(NoWorkers(), Executor)
    True
    """

    def start(self, workdir: Path, count: int) -> None:
        """Starts the workers for `count` runs. Raises Queued where they are left to a queue."""

    def running(self) -> bool:
        """Is a worker at work?"""

    def stop(self) -> None:
        """Asks all workers to save and end, and waits for them."""


class InProcess:
    """Runs one after the other in this process, before `start` returns.

    Args:
      options: of `run_one`.

    Use it to debug a run, or in a notebook for a sweep of seconds: no process is started.

        lab.sweep(specs, "runs/tiny", executor=lab.InProcess())
    """

    def __init__(self, options: RunOptions = RunOptions(speaks=False)) -> None:  # noqa: B008
        self.options = options

    def start(self, workdir: Path, count: int) -> None:
        """Runs all. Raises Stopped after a signal."""
        use_threads(read_threads(workdir))
        if work(workdir, self.options) == STOPPED:
            raise Stopped("stopped and saved; to resume, run the same again")

    def running(self) -> bool:
        """False: `start` has done all."""
        return False

    def stop(self) -> None:
        """Nothing: Ctrl-C ends the run itself."""


def divide(
    runs: int, jobs: int | None, threads: int | None, num_cores: int, num_gpus: int = 0
) -> tuple[int, int | None]:
    """How many workers run at once, and threads of each (None where the CPU does not compute). What
    is given is taken, the rest chosen.

    On CPUs each run has cores // runs threads, at least one, whatever `jobs` is, so that no number
    depends on how many run at once; as many run at once as there are cores for their threads. On
    GPUs one run a GPU.

    >>> divide(6, None, None, num_cores=2), divide(3, None, None, num_cores=16)
    ((2, 1), (3, 5))
    >>> divide(6, 8, None, num_cores=96, num_gpus=4)
    (8, None)
    """
    if num_gpus:
        return jobs or min(runs, num_gpus), None
    threads = threads or max(1, num_cores // runs)
    return jobs or max(1, min(runs, num_cores // threads)), threads


def share(things: Sequence[T], count: int, index: int) -> Sequence[T]:
    """What part `index` of `count` gets of `things`: consecutive ones, and at least one.

    >>> [share("abcdefg", 3, i) for i in range(3)], [share("ab", 3, i) for i in range(3)]
    (['ab', 'cd', 'efg'], ['a', 'a', 'b'])
    """
    first = index * len(things) // count
    return things[first : max(first + 1, (index + 1) * len(things) // count)]


class LocalExecutor:
    """Processes on this machine, between which its GPUs or its cores are divided.

    The threads of a run do not depend on how many run at once; they are kept in the workdir, so a
    sweep that goes on has the same numbers.

    Args:
      jobs: processes, each with GPUs // jobs of the GPUs, at least one; None: one for each GPU, or
        without one as many as there are cores for.
      threads: of each run, on CPUs; None: those of the workdir, or cores // runs.
      options: `loggers` and `profile` of all runs.
      environment: further variables of the environment of the workers.

    Raises:
      ValueError: `jobs` or `threads` is below 1.

    Two runs at a time, with four threads each:

        executor = lab.LocalExecutor(jobs=2, threads=4)
        lab.sweep(specs, "runs/layouts", executor=executor)
    """

    def __init__(
        self,
        jobs: int | None = None,
        threads: int | None = None,
        options: RunOptions = RunOptions(),  # noqa: B008
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.jobs = check_field("jobs", jobs, int | None, least=1)
        self.threads = check_field("threads", threads, int | None, least=1)
        self.options = options
        self.environment = dict(environment or {})
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def start(self, workdir: Path, count: int) -> None:
        """Starts at most `count` workers; what they print is in `workdir/logs`.

        Raises ValueError where a TPU, which belongs to one process, is to have several.
        """
        variables = {**os.environ, **self.environment}
        threads, self._gpus = self.threads or read_threads(workdir), accelerators(variables)
        if self.jobs not in (None, 1) and self._gpus == [TPU]:
            raise ValueError(f"a TPU can be used by one process only; set jobs=1, not {self.jobs}")
        self._workdir, self._stopping = workdir, False
        self._jobs, threads = divide(count, self.jobs, threads, len(cores()), len(self._gpus))
        if threads:
            write_threads(workdir, threads)  # for the workers
        (workdir / LOGS).mkdir(exist_ok=True)
        for index in range(min(self._jobs, count)):
            self._start_worker(index)

    def _start_worker(self, index: int) -> None:
        mine = ",".join(map(str, share(cores(), self._jobs, index)))
        command = [*worker_command(self._workdir, self.options), f"--cores={mine}", "--follow"]
        environment = {**os.environ, **self.environment}
        if self._gpus:
            count = max(1, len(self._gpus) // (self.jobs or len(self._gpus)))
            first = index * count % len(self._gpus)
            # As many for each run, also for the last ones of a sweep.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[first : first + count])
            if self._jobs > len(self._gpus):  # each has its part of the 75 % that JAX takes
                fraction = 0.75 / math.ceil(self._jobs / len(self._gpus))
                environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{fraction:.3f}")
        with (self._workdir / LOGS / f"worker{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C comes to this process alone
            )

    def running(self) -> bool:
        """Is a worker alive? One that was killed is replaced; its run is not tried again."""
        for index, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[index]
                if code < 0 and not self._stopping and self._note_killed(index, process.pid, code):
                    self._start_worker(index)
        return bool(self._processes)

    def _note_killed(self, index: int, process: int, code: int) -> bool:
        """Writes why a process was killed to its log and to error.txt of its run; False where it
        had none."""
        reason = f"killed by {signal.Signals(-code).name}"
        reason += " (out of memory?)" if code == -signal.SIGKILL else ""
        with (self._workdir / LOGS / f"worker{index}.log").open("a") as log:
            log.write(f"{reason}\n")
        for folder in (self._workdir / RUNS).glob("*"):
            if last_process(folder) == process and not (folder / ERROR).exists():
                (folder / ERROR).write_text(f"{reason}\n")
                return True
        return False

    def stop(self) -> None:
        """SIGTERM to all, which save and end; again at the next Ctrl-C. One more kills them."""
        self._stopping, asked = True, 0
        with stop_signals() as requests:
            before = requests()
            try:
                while alive := [p for p in self._processes.values() if p.poll() is None]:
                    if requests() - before >= asked:
                        asked += 1
                        workers = counted(len(alive), "worker")
                        more = "Ctrl-C asks again, once more ends them at once"
                        print(f"waiting for {workers} to save and stop; {more}", file=sys.stderr)
                        for process in alive:
                            process.send_signal(signal.SIGTERM)
                    time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                for process in self._processes.values():
                    process.kill()
                    process.wait()
                raise
        self._processes = {}


def worker_command(workdir: Path, options: RunOptions = RunOptions()) -> list[str]:  # noqa: B008
    """The command of a worker. It imports the modules of loggers; those of the runs are in their
    specs."""
    command = [sys.executable, "-m", "attnlab.lab", str(workdir)]
    for name in options.loggers:
        module = sys.modules[LOGGERS[name].__module__]
        if not module.__name__.startswith("attnlab."):
            command.append(f"--import={module_reference(module)}")
    command += [f"--loggers={','.join(options.loggers)}"] if options.loggers else []
    command += [f"--model_parallel={options.model_parallel}"] if options.model_parallel > 1 else []
    command += ["--shard_state"] if options.shard_state else []
    return command + ([f"--profile={options.profile}"] if options.profile else [])


def accelerators(variables: Mapping[str, str]) -> list[str]:
    """What a process with this environment may use, without starting JAX: NVIDIA GPUs as
    `CUDA_VISIBLE_DEVICES` names them; "tpu" once for all TPUs, which belong to one process.

    >>> accelerators({"CUDA_VISIBLE_DEVICES": "2,3", "JAX_PLATFORMS": "cuda"})
    ['2', '3']
    """
    platform = variables.get("JAX_PLATFORMS", "").partition(",")[0]
    if platform in ("", "tpu") and any(Path("/dev").glob("accel[0-9]*")):
        return [TPU]
    if platform == "cpu":
        return []
    if (visible := variables.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one for one in visible.split(",") if one not in ("", "-1")]
    # CUDA counts from 0, also where a container has but /dev/nvidia3.
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
