"""Long-lived worker processes of one thread each, for many runs on one machine."""

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

STOPPED = "stopped"
TRIES = 2
"""A job whose worker died is started again so often."""


class WorkerFailed(RuntimeError):
    """A job raised, or its worker died twice."""


@dataclasses.dataclass
class _Worker(Generic[Job]):
    process: BaseProcess
    pipe: Connection
    job: Job | None = None


def _serve(run: Callable[[Job], Result], core: int, pipe: Connection) -> None:
    """The main loop of a worker: jobs in, (job's result or None, message) out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the parent
        os.sched_setaffinity(0, {core})
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = run(job), ""
        except Exception as error:
            stopped = type(error).__name__ == "Stopped"
            answer = None, STOPPED if stopped else traceback.format_exc()  # type: ignore[assignment]
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
        if answer[1] == STOPPED:
            return


class LocalExecutor(Generic[Job, Result]):
    """Runs `run(job)` in `count` processes of one thread, each pinned to one core.

    Use as a context manager. Processes are spawned, so `run` and jobs must be picklable, and a
    process imports and compiles once for all its jobs. SIGTERM or SIGINT to this process stops all:
    every worker gets SIGTERM, saves its run and ends, and `results` returns.
    """

    def __init__(self, run: Callable[[Job], Result], count: int):
        self._run, self._count = run, count
        self._workers: list[_Worker[Job]] = []
        self.stopped = False

    def __enter__(self) -> "LocalExecutor[Job, Result]":
        os.environ["NPROC"] = "1"  # threads of XLA; before a worker imports JAX
        for number in range(self._count):
            self._workers.append(self._start(number))
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            if worker.job is not None and worker.process.pid and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGTERM)
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join()

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
        """(job, result) as they end; jobs start in their order. Raises WorkerFailed."""
        waiting, tries = list(jobs), dict.fromkeys(range(self._count), 0)
        while True:
            for worker in self._workers:
                if worker.job is None and waiting and not self.stopped:
                    worker.job = waiting.pop(0)
                    worker.pipe.send(worker.job)
            busy = {w.pipe: w for w in self._workers if w.job is not None}
            if not busy:
                return
            for pipe in wait(list(busy), timeout=1.0):
                worker = busy[pipe]  # type: ignore[index]
                job, worker.job = worker.job, None
                assert job is not None
                number = self._workers.index(worker)
                try:
                    result, message = worker.pipe.recv()
                except (EOFError, ConnectionResetError):  # reset: it died with its job unread
                    result, message = None, ""
                if message and message != STOPPED:
                    raise WorkerFailed(f"{job}: {message}")
                if result is not None:
                    tries[number] = 0
                    yield job, result
                elif not self.stopped:
                    tries[number] += 1
                    if tries[number] >= TRIES:
                        raise WorkerFailed(f"{job}: its process died {TRIES} times")
                    worker.process.join()
                    self._workers[number] = self._start(number)
                    waiting.insert(0, job)

    def _start(self, number: int) -> _Worker[Job]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [0]
        core = cores[number % len(cores)]
        process = context.Process(target=_serve, args=(self._run, core, theirs))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = True
        for worker in self._workers:
            if worker.process.pid and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGTERM)
