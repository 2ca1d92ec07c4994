"""Workers: results of all jobs, errors with their job, one more try after a death."""

import math
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.studies.study3.executor import LocalExecutor, WorkerFailed

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from experiments.studies.study3.executor import LocalExecutor

def job(path):
    path = Path(path)
    if path.name == "dies" and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if path.name == "waits":
        print("waits", flush=True)
        time.sleep(60)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

if __name__ == "__main__":
    with LocalExecutor(job, 2) as executor:
        for path, cores in executor.results(sys.argv[1:]):
            print(Path(path).name, cores, flush=True)
        print("stopped", executor.stopped, flush=True)
"""


@pytest.fixture
def signals():
    """Handlers as they were before the test."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = os.environ.get("NPROC")
    yield
    for s, handler in before.items():
        signal.signal(s, handler)
    if threads is None:
        os.environ.pop("NPROC", None)


def start(tmp_path, *names):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *(str(tmp_path / n) for n in names)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def test_results_of_all_jobs(signals):
    with LocalExecutor(math.sqrt, 2) as executor:
        assert sorted(executor.results([4.0, 9.0, 16.0])) == [(4, 2), (9, 3), (16, 4)]


@pytest.mark.slow
def test_an_error_names_its_job(signals):
    with LocalExecutor(math.sqrt, 1) as executor, pytest.raises(WorkerFailed, match=r"-1\.0: .*"):
        list(executor.results([-1.0]))


@pytest.mark.slow
def test_a_worker_that_died_is_started_again(tmp_path):
    process = start(tmp_path, "dies", "other")
    out = process.communicate(timeout=60)[0].splitlines()
    assert sorted(out) == ["dies 1", "other 1", "stopped False"]


@pytest.mark.slow
def test_sigterm_stops_all(tmp_path):
    process = start(tmp_path, "waits")
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "stopped True\n"
