"""A sweep on a real SLURM: runs killed, stopped at their time limit, the controller restarted."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, user_environment
from small_experiment import wait_for

from attnlab import lab

pytestmark = pytest.mark.slurm
HERE = ROOT / "tests/slurm"
KILLED = "wide-separate-seed0"
LIMIT = 900


@pytest.fixture
def cluster(tmp_path):
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [p for p in ("slurmctld", "slurmd", "munged") if not shutil.which(p, path=path)]:
        pytest.skip(f"no {' nor '.join(missing)}: apt-get install slurmctld slurmd munge")
    folder = tmp_path / "cluster"
    act = lambda what: subprocess.run([HERE / "cluster.sh", what, folder], check=True, timeout=60)
    try:
        act("start")
        yield act, {**user_environment(), "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        act("stop")


def table(folder):
    """Held-out scores of each run."""
    return {run.spec.id: dict(run.scores.heldout) for run in lab.load_results(folder)}


def test_twelve_runs(tmp_path, nine_letters, cluster):
    act, environment = cluster
    folder = tmp_path / "runs"

    def ask(*words):
        return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)

    def queue():
        listed = ask("squeue", "--me", "--array", "--noheader", "--format=%F_%K")
        assert listed.returncode == 0, listed.stderr
        return listed.stdout.split()

    def sweep(place, *words):
        said = [sys.executable, "-m", "experiments.sweep", f"--config={HERE}/twelve.py:tiny"]
        said += [f"--workdir={place}", f"--config.data.path={nine_letters}", "--threads=1"]
        done = ask(*said, *words)
        assert done.returncode == 0, done.stderr
        return done

    def trains(name):
        return (folder / "runs" / name / "metrics.jsonl").exists()

    # Five minutes less the two before which the worker is told, less the one by which SLURM may be
    # early: starting takes one where the machine is busy.
    on_slurm = ("--launcher=slurm", "--jobs=2", "--slurm=--time=5 --cpus-per-task=1")
    first = sweep(folder, *on_slurm)
    assert "workers are submitted as job 1" in first.stderr
    wait_for(lambda: trains(KILLED), LIMIT)
    holder = json.loads((folder / "runs" / KILLED / "lock.json").read_text())
    os.kill(holder["process"], signal.SIGKILL)
    act("controller")
    wait_for(lambda: len(queue()) < 2, LIMIT)  # the killed worker has ended
    again = sweep(folder, *on_slurm)
    assert "workers are in the queue" in again.stderr
    wait_for(lambda: not queue(), LIMIT)
    last = sweep(folder, *on_slurm)
    assert "submitted" not in last.stderr
    assert len(table(folder)) == 12
    logs = "".join(path.read_text() for path in (folder / "logs").glob("*.log"))
    assert re.search(r"stopped at step \d+ of \d+; the state is saved", logs)
    assert re.search(r"resuming at step [1-9]", logs)

    sweep(tmp_path / "serial", "--jobs=1")
    assert table(folder) == table(tmp_path / "serial")
