"""A sweep on a real SLURM: arms killed, cut at their time limit, the controller restarted."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, user_environment

pytestmark = pytest.mark.slurm
HERE = ROOT / "tests/slurm"
SPEEDS = ("tokens_per_second", "seconds")
KILLED, SIGNALLED = "wide-separate-lr0.001", "wide-albert-lr0.001"
LONG = "standard-separate-lr0.001"
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


def until(answer, what):
    """The answer, once it is one."""
    for _ in range(LIMIT * 5):
        if found := answer():
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited in vain for {what}")


def table(folder):
    """results.csv, less the two columns of speed."""
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: v for name, v in row.items() if name not in SPEEDS} for row in rows]


def test_twelve_arms(tmp_path, nine_letters, cluster):
    act, environment = cluster
    folder = tmp_path / "arms"

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

    # Five minutes less the two before which the arm is told, less the one by which SLURM may be
    # early: starting takes one where the machine is busy.
    on_slurm = ("--launcher=slurm", "--jobs=2", "--slurm=--time=5 --cpus-per-task=1")
    first = sweep(folder, *on_slurm)
    assert re.search(r"12 submitted as job 1, \d", first.stderr)  # of 8 and 4: MaxArraySize is 8
    numbers = {name: f"1_{i}" for i, name in enumerate(names_in(folder)[:8])}

    def train(name):
        return (folder / name / "metrics.jsonl").exists()

    until(lambda: train(KILLED), f"{KILLED} to train")
    owner = json.loads((folder / KILLED / "owner.json").read_text())
    os.kill(owner["process"], signal.SIGKILL)
    act("controller")
    until(lambda: train(SIGNALLED), f"{SIGNALLED} to train")
    assert ask("scancel", "--signal=KILL", "--full", numbers[SIGNALLED]).returncode == 0
    until(lambda: not {numbers[KILLED], numbers[SIGNALLED]} & set(queue()), "their ends")
    assert not (folder / KILLED / "result.json").exists()
    assert not (folder / SIGNALLED / "result.json").exists()

    again = sweep(folder, *on_slurm)
    assert "2 submitted as job" in again.stderr
    until(lambda: not queue(), "the end")
    last = sweep(folder, *on_slurm)
    assert "submitted" not in last.stderr
    assert len(list(folder.glob("*/result.json"))) == 12
    assert len(table(folder)) == 24

    logs = {path.name: path.read_text() for path in (folder / "slurm").glob("*.log")}
    ended = [name for text in logs.values() for name in ends(text)]
    assert sorted(ended) == sorted(names_in(folder))
    long = logs[f"{numbers[LONG]}.log"]
    assert re.search(r"stopped at step \d+ of \d+; the state is saved", long)
    assert re.search(r"resuming at step [1-9]", long)

    sweep(tmp_path / "serial", "--jobs=1")
    assert table(folder) == table(tmp_path / "serial")


def names_in(folder):
    return list(json.loads((folder / "config.json").read_text())["arms"])


def ends(log):
    """The arms whose scores a log tells: those that it tells to have run to the end."""
    name = ""
    for line in log.splitlines():
        if began := re.search(r"--workdir=\S*/(\S+)$", line):
            name = began[1]
        if line.startswith("seed 0: held-out"):
            yield name
