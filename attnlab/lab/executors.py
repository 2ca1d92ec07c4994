"""Where the runs of a sweep are computed: this process, processes of this machine, or SLURM."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from attnlab.lab.worker import work


@runtime_checkable
class Executor(Protocol):
    """Starts workers on a workdir. A worker runs what no other one has or has finished."""

    def start(self, workdir: Path, count: int) -> None:
        """Starts the workers for `count` runs."""

    def running(self) -> bool:
        """Is a worker at work?"""

    def stop(self) -> None:
        """Asks all workers to save and end, and waits for them."""


class InProcess:
    """Runs one after the other in this process, before `start` returns."""

    def start(self, workdir: Path, count: int) -> None:
        """Runs all."""
        work(workdir)

    def running(self) -> bool:
        """False: `start` has done all."""
        return False

    def stop(self) -> None:
        """Nothing: Ctrl-C ends the run itself."""


class LocalExecutor:
    """Processes on this machine, between which its GPUs or its cores are divided.

    Args:
      jobs: processes; None: one for each GPU, or without one for each core.
      imports: modules that a worker imports first, as those that register layouts.
    """

    def __init__(self, jobs: int | None = None, imports: Sequence[str] = ()) -> None:
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs must be 1 or more, not {jobs}")
        self.jobs, self.imports = jobs, tuple(imports)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, workdir: Path, count: int) -> None:
        """Starts at most `count` workers; what they print is in `workdir/logs`."""
        gpus, cores = _gpus(), _cores()
        jobs = min(self.jobs or len(gpus) or len(cores), count)
        logs = workdir / "logs"
        logs.mkdir(exist_ok=True)
        for number in range(jobs):
            command = worker_command(workdir, self.imports)
            environment = dict(os.environ)
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
                if jobs > len(gpus):
                    share = 0.9 / -(-jobs // len(gpus))
                    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
            mine = cores[number::jobs] or [cores[number % len(cores)]]
            command += [f"--cores={','.join(map(str, mine))}", "--follow"]
            environment["NPROC"] = str(len(mine))  # threads of XLA
            with (logs / f"worker{number}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                )

    def running(self) -> bool:
        """Is a process alive?"""
        return any(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        """SIGTERM to all, which save and end."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait()


class SlurmExecutor:
    """An array of SLURM jobs, each one worker; the script is `workdir/sweep.sbatch`.

    Args:
      jobs: size of the array; None: one for each run.
      options: of sbatch: {"time": "2:00:00", "gres": "gpu:1"}.
      setup: shell lines before the worker, as those that activate an environment.
      imports: as of `LocalExecutor`.
    """

    def __init__(
        self,
        jobs: int | None = None,
        options: Mapping[str, str] | None = None,
        setup: str = "",
        imports: Sequence[str] = (),
    ) -> None:
        self.jobs, self.options, self.setup = jobs, dict(options or {}), setup
        self.imports, self._id = tuple(imports), ""

    def script(self, workdir: Path, count: int) -> str:
        """The text of the script for `count` runs.

        >>> print(SlurmExecutor(4, {"time": "1:00:00"}).script(Path("/runs/a"), 9))
        #!/bin/bash
        #SBATCH --job-name=a
        #SBATCH --array=0-3
        #SBATCH --output=/runs/a/logs/%A_%a.log
        #SBATCH --signal=TERM@90
        #SBATCH --time=1:00:00
        <BLANKLINE>
        exec python -m attnlab.lab /runs/a
        <BLANKLINE>
        """
        jobs = min(self.jobs or count, count)
        lines = {
            "job-name": workdir.name, "array": f"0-{jobs - 1}",
            "output": f"{workdir}/logs/%A_%a.log", "signal": "TERM@90", **self.options,
        }  # fmt: skip
        command = ["python", *worker_command(workdir, self.imports)[1:]]
        head = "\n".join(f"#SBATCH --{name}={value}" for name, value in lines.items())
        return f"#!/bin/bash\n{head}\n{self.setup}\nexec {shlex.join(command)}\n"

    def start(self, workdir: Path, count: int) -> None:
        """Submits the array. Raises OSError where there is no sbatch, CalledProcessError where it
        refuses the script."""
        workdir = workdir.resolve()
        (workdir / "logs").mkdir(exist_ok=True)
        path = workdir / "sweep.sbatch"
        path.write_text(self.script(workdir, count))
        submitted = subprocess.check_output(["sbatch", "--parsable", str(path)], text=True)
        self._id = submitted.strip().partition(";")[0]

    def running(self) -> bool:
        """Is a job of the array waiting or running?"""
        queue = subprocess.run(
            ["squeue", "-h", "-j", self._id], capture_output=True, text=True, check=False
        )
        return bool(queue.stdout.strip())

    def stop(self) -> None:
        """Cancels the array; its runs save and end."""
        subprocess.run(["scancel", "--signal=TERM", "--full", self._id], check=False)


def worker_command(workdir: Path, imports: Sequence[str]) -> list[str]:
    """The command of a worker."""
    more = [f"--import={module}" for module in imports]
    return [sys.executable, "-m", "attnlab.lab", str(workdir), *more]


def _cores() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, without starting JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one for one in visible.split(",") if one]
    if os.environ.get("JAX_PLATFORMS", "cuda").partition(",")[0] == "cpu":
        return []
    return [p.name.removeprefix("nvidia") for p in sorted(Path("/dev").glob("nvidia[0-9]*"))]
