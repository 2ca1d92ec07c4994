"""SLURM: the script as people read it, what is asked of the cluster, and how a task ends."""

import os
import re
import signal
import subprocess
import time

import pytest
from small_experiment import wait_for

from attnlab import lab
from attnlab.lab import slurm
from attnlab.lab.machine import read_threads
from attnlab.lab.slurm import SCRIPT

SAYS = """#!/bin/bash
echo "$@" >> {log}
cat {says} 2> /dev/null
exit $(cat {code} 2> /dev/null || echo 0)
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stubs for the commands of SLURM that note what is asked and say what a file holds."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        parts = {part: folder / f"{name}.{part}" for part in ("log", "says", "code")}
        (folder / name).write_text(SAYS.format(**parts))
        (folder / name).chmod(0o755)
    (folder / "sbatch.says").write_text("17\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def asked_of(cluster, name):
    path = cluster / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


def test_an_array_is_submitted_once(cluster, tmp_path):
    executor = lab.SlurmExecutor(3, "--time=1:00:00 --partition=gpu", mode="submit", threads=2)
    with pytest.raises(lab.Queued, match="job 17"):
        executor.start(tmp_path, 9)
    text = (tmp_path / SCRIPT).read_text()
    assert "#SBATCH --array=0-2\n" in text
    assert "#SBATCH --time=1:00:00 --partition=gpu\n" in text
    assert read_threads(tmp_path) == 2
    assert re.search(rf"command=\(python -m attnlab.lab {tmp_path}\)", text)
    assert subprocess.run(["bash", "-n", tmp_path / SCRIPT], check=False).returncode == 0
    (cluster / "squeue.says").write_text("".join(f"17_{i} {tmp_path / SCRIPT}\n" for i in range(3)))
    with pytest.raises(lab.Queued, match="in the queue"):
        executor.start(tmp_path, 9)
    with pytest.raises(lab.Queued, match="submit them with: sbatch"):
        lab.SlurmExecutor(mode="write").start(tmp_path, 3)
    assert len(asked_of(cluster, "sbatch")) == 1
    assert executor.running()
    executor.stop()
    assert asked_of(cluster, "scancel") == [f"--signal=TERM --full 17_{i}" for i in range(3)]


def test_a_sweep_leaves_its_workers_in_the_queue(cluster, tmp_path):
    """They are submitted and not cancelled when the sweep returns."""
    (cluster / "sbatch").write_text(
        f"#!/bin/bash\necho '17_0 {tmp_path / SCRIPT}' > {cluster}/squeue.says; echo 17\n"
    )
    with pytest.raises(lab.Queued, match="job 17"):
        lab.sweep(lab.product(seeds=[0]), tmp_path, executor=lab.SlurmExecutor(mode="submit"))
    assert asked_of(cluster, "squeue")
    assert asked_of(cluster, "scancel") == []


def test_a_queue_that_is_asked_seldom_and_may_fail(cluster, tmp_path, monkeypatch):
    """Its last answer counts for some minutes, and for what is cancelled."""
    executor = lab.SlurmExecutor(2)
    executor.start(tmp_path, 2)
    assert all(executor.running() for _ in range(9))
    assert len(asked_of(cluster, "squeue")) == 1
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.0)
    (cluster / "squeue.says").write_text(f"17_1 {tmp_path / slurm.SCRIPT}\n")
    assert executor.running()
    (cluster / "squeue.code").write_text("1")
    assert executor.running()
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"squeue .* fails"):
        executor.running()
    executor.stop()
    assert asked_of(cluster, "scancel") == ["--signal=TERM --full 17_1"]


def test_no_sbatch_or_one_that_refuses(cluster, tmp_path, monkeypatch):
    (cluster / "sbatch.code").write_text("1")
    with pytest.raises(ValueError, match=r"sbatch .* fails"):
        lab.SlurmExecutor().start(tmp_path, 3)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no sbatch on this machine"):
        lab.SlurmExecutor().start(tmp_path, 3)


WORKER = """
mkdir -p {workdir}/runs/a/checkpoints; touch {workdir}/began
trap '{saves} exit {code}' TERM
for i in $(seq 600); do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("number", "saves", "code", "requeued"),
    [
        (signal.SIGUSR1, "mkdir -p {workdir}/runs/a/checkpoints/5;", 75, True),
        (signal.SIGUSR1, "", 75, False),
        (signal.SIGTERM, "mkdir -p {workdir}/runs/a/checkpoints/5;", 75, False),
        (signal.SIGUSR1, "mkdir -p {workdir}/runs/a/checkpoints/5;", 3, False),
    ],
)
def test_a_task_is_queued_again_where_its_time_was_up_and_something_saved(
    cluster, tmp_path, number, saves, code, requeued
):
    workdir = tmp_path / "w"
    workdir.mkdir()
    stub = tmp_path / "stub.sh"
    stub.write_text(WORKER.format(workdir=workdir, saves=saves.format(workdir=workdir), code=code))
    text = lab.SlurmExecutor().script(workdir, 1)
    text = re.sub(r"command=\(.*\)", f"command=(bash {stub})", text)
    script = tmp_path / "script.sh"
    script.write_text(text)
    tasks = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}
    task = subprocess.Popen(["bash", script], env=os.environ | tasks, stderr=subprocess.PIPE)
    wait_for((workdir / "began").exists)
    time.sleep(0.2)  # the trap of the stub
    task.send_signal(number)
    said = task.communicate(timeout=60)[1].decode()
    assert task.returncode == code
    assert ("requeue 17_0" in asked_of(cluster, "scontrol")) == requeued
    assert ("ask for more --time" in said) == (number == signal.SIGUSR1 and not saves)
