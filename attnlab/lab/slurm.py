"""The runs of a sweep as an array of SLURM jobs: one script in the workdir, to be read and edited.

Each task of the array is a worker, which runs what no other one has or has finished. Submitting the
script again, by hand too, goes on with what is left.
"""

import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attnlab.atomic import write_atomic
from attnlab.extras import extra
from attnlab.fields import check_choice, check_field
from attnlab.lab.executors import LOGS, Queued, worker_command
from attnlab.lab.machine import write_threads
from attnlab.lab.run import RunOptions

SCRIPT = "sweep.sbatch"
"""In the workdir."""
ASK_SECONDS, PATIENCE_SECONDS = 20.0, 600.0
"""Between two questions to squeue, and for how long its last answer counts while it fails."""
MOST_JOBS = 1000
"""Tasks of an array: SLURM numbers them to 1000, where nobody sets MaxArraySize."""


class SlurmExecutor:
    """An array of SLURM jobs, each one worker; the script is `workdir/sweep.sbatch`.

    Args:
      jobs: size of the array; None: one for each run.
      options: of sbatch: {"time": "2:00:00", "gres": "gpu:1"}, or the line "--time=2:00:00".
      setup: shell lines before the worker, as those that activate an environment.
      run_options, environment: as of `LocalExecutor`.
      threads: of each run, on CPUs; None: those of the workdir, or the cores of the job.
      mode: "wait" for the workers; "submit" them, so that `start` raises Queued; or "write" the
        script alone, so that `start` raises Queued.

    Raises:
      ValueError: `jobs` or `threads` is below 1, or an unknown `mode`.

    Twenty jobs of one GPU each. To read the script before anything is submitted, use mode="write".

        executor = lab.SlurmExecutor(20, {"time": "2:00:00", "gres": "gpu:1"}, "source env.sh")
        lab.sweep(specs, "runs/big", executor=executor)
    """

    def __init__(
        self,
        jobs: int | None = None,
        options: Mapping[str, str] | str = "",
        setup: str = "",
        *,
        run_options: RunOptions = RunOptions(),  # noqa: B008
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        mode: Literal["wait", "submit", "write"] = "wait",
    ) -> None:
        if not isinstance(options, str):
            options = " ".join(f"--{name}={value}" for name, value in options.items())
        check_choice("mode", mode, ["wait", "submit", "write"])
        self.jobs = check_field("jobs", jobs, int | None, least=1)
        self.threads = check_field("threads", threads, int | None, least=1)
        self.options, self.setup, self.mode = options, setup, mode
        self.run_options, self.environment = run_options, dict(environment or {})
        self._workdir, self._tasks = Path(), list[str]()
        self._asked = self._answered = -math.inf

    def script(self, workdir: Path, count: int) -> str:
        """The text of the script for `count` runs in an absolute `workdir`.

        >>> text = SlurmExecutor(4, {"time": "1:00:00"}).script(Path("/runs/a"), 9)
        >>> [line for line in text.splitlines() if "array" in line or "time=" in line][:2]
        ['#SBATCH --array=0-3', '#SBATCH --time=1:00:00']
        """
        jobs = min(self.jobs or count, count, MOST_JOBS)
        log = str(workdir / LOGS).replace("%", "%%")  # of which SLURM makes numbers
        with extra("lab"):
            import jinja2
        template = jinja2.Template(
            (Path(__file__).parent / "templates/sweep.sbatch.jinja").read_text(encoding="utf-8"),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        text = template.render(
            workdir=workdir,
            script=shlex.quote(str(workdir / SCRIPT)),
            name=shlex.quote(workdir.name),
            array=f"0-{jobs - 1}" if jobs > 1 else "0",
            here=shlex.quote(str(Path.cwd())),
            log=shlex.quote(f"{log}/%A_%a.log"),
            options=self.options,
            bin=shlex.quote(str(Path(sys.executable).parent)),
            environment={name: shlex.quote(value) for name, value in self.environment.items()},
            setup=self.setup,
            workdir_quoted=shlex.quote(str(workdir)),
            command=shlex.join(["python", *worker_command(workdir, self.run_options)[1:]]),
        )
        return f"{text}\n"

    def start(self, workdir: Path, count: int) -> None:
        """Submits the array, unless some of it is in the queue: a worker takes what is left.

        Raises:
          ValueError: there is no sbatch, or it refuses the script.
          Queued: unless `mode` is "wait".
        """
        self._workdir = workdir = workdir.absolute()
        if self.mode != "write" and not shutil.which("sbatch"):
            raise ValueError(
                "no sbatch on this machine; run this on a login node of the cluster, or "
                "write the script with --print_only and submit it there"
            )
        if self.threads:
            write_threads(workdir, self.threads)
        (workdir / LOGS).mkdir(exist_ok=True)
        script = workdir / SCRIPT
        write_atomic(script, self.script(workdir, count).encode())
        done = f"submit them with: sbatch {shlex.quote(str(script))}"
        if self.mode != "write":
            done = "workers are in the queue"
            if not self._queue():
                job = _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]
                self._tasks, done = [job], f"workers are submitted as job {job}"
        if self.mode != "wait":
            raise Queued(
                f"{count} runs in {workdir} are left: {done}. Every node must see this folder and "
                "the current folder under the same paths. When the queue is empty, repeat the "
                "command: it submits what is not complete, or writes the report"
            )

    def _queue(self, patience: float = 0.0) -> list[str]:
        """The tasks of the workdir that wait or run, submitted by this executor or by hand; while
        squeue fails, for so many seconds, those of its last answer. Raises ValueError."""
        self._asked, script = time.monotonic(), (self._workdir / SCRIPT).resolve()
        try:
            listed = _ask("squeue", "--me", "--array", "--noheader", "--format=%F_%K %o")
        except ValueError:
            if self._asked - self._answered > patience:
                raise
            return self._tasks
        rows = [row.partition(" ") for row in listed.splitlines() if row.partition(" ")[2].strip()]
        self._tasks = [task for task, _, path in rows if Path(path.strip()).resolve() == script]
        self._answered = self._asked
        return self._tasks

    def running(self) -> bool:
        """Is a worker waiting or running? squeue is asked every 20 seconds; it may fail for 10
        minutes. Raises ValueError where it fails for longer."""
        if time.monotonic() - self._asked >= ASK_SECONDS:
            self._queue(PATIENCE_SECONDS)
        return bool(self._tasks)

    def stop(self) -> None:
        """Cancels the workers, where squeue fails those of its last answer; their runs save and
        end, which is not waited for."""
        for task in self._queue(math.inf):
            subprocess.run(["scancel", "--signal=TERM", "--full", task], check=False)


def _ask(*words: str) -> str:
    """What a command of SLURM prints; nothing where it is not installed. Raises ValueError."""
    if not shutil.which(words[0]):
        return ""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{shlex.join(words)} fails: {done.stderr.strip()}")
    return done.stdout
