"""The command: killed and started again it leaves the rows of a study that was never stopped."""

import dataclasses
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from attnlab.lab.head_width.rows import append_row, read_rows


def start(folder, *more, preset="tiny"):
    command = [sys.executable, "-m", "experiments.study", f"--rows={folder / 'runs.csv'}",
               f"--config=experiments/configs/head_width.py:{preset}", f"--data={folder}",
               f"--workdir={folder / 'work'}", *more]  # fmt: skip
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def finish(folder, *more, preset="tiny"):
    process = start(folder, *more, preset=preset)
    return process.communicate(timeout=600)[0], process.returncode


def numbers(folder):
    rows = read_rows(folder / "runs.csv")
    return sorted([dataclasses.replace(row, origin=None) for row in rows], key=lambda r: r.spec.id)


def wait_for_rows(folder, count):
    until = time.monotonic() + 300
    while len(read_rows(folder / "runs.csv")) < count:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out, code = finish(whole)
    assert code == 0, out
    first = start(killed)
    wait_for_rows(killed, 1)
    first.kill()
    first.wait()
    second = start(killed)
    wait_for_rows(killed, 3)
    second.send_signal(signal.SIGTERM)
    assert "stopped; repeat the command to resume" in second.communicate(timeout=60)[0]
    assert second.returncode == 75
    assert finish(killed)[1] == 0
    assert len(numbers(killed)) == 8
    assert numbers(killed) == numbers(whole)


def test_rows_of_another_commit_are_refused_by_the_command(tmp_path):
    from lab_rows import make_row

    append_row(tmp_path / "runs.csv", make_row(0.01, stage=-1))
    out, code = finish(tmp_path)
    assert code != 0
    assert "is of commit abc, not" in out
    out, code = finish(tmp_path, "--status")
    assert code == 0
    assert "stage -1 (tiny): 1/8 runs" in out


def test_programs_of_the_study_on_a_gpu_are_counted_without_running_one(tmp_path):
    out, code = finish(tmp_path, "--status", preset="gpu")
    assert code == 0
    assert out.splitlines()[-1] == "0/16 programs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("preset", "flag"), [("gpu", "--analysis=x"), ("tiny", "--measure=20")])
def test_a_flag_of_the_other_study_is_refused(tmp_path, preset, flag):
    out, code = finish(tmp_path, flag, preset=preset)
    assert code != 0
    assert flag.split("=")[0] + " " in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
