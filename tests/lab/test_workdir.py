"""A folder has one owner: the second is told who, and a killed owner is none."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT
from small_experiment import wait_for

from attnlab.lab import workdir
from attnlab.lab.workdir import LOCK, RunInUse, hold, holder, waiting

HOLD = """
import pathlib, sys
from attnlab.lab.workdir import hold
with hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_host_and_process_and_a_killed_owner_is_none(tmp_path):
    words = [sys.executable, "-c", HOLD, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        before = (tmp_path / LOCK).read_text()
        who = f"process {other.pid} on {socket.gethostname()} since 20"
        with pytest.raises(RunInUse, match=who) as error, hold(tmp_path, patience=0.1):
            pass
        assert str(error.value).startswith(f"{tmp_path} is in use by ")
        assert holder(tmp_path).startswith(who)
        assert (tmp_path / LOCK).read_text() == before
        other.kill()
    assert (tmp_path / LOCK).exists()
    assert holder(tmp_path) is None
    with hold(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_who_waits_long_enough_gets_it(tmp_path):
    """Also in one process."""
    with contextlib.ExitStack() as holding:
        holding.enter_context(hold(tmp_path))
        with pytest.raises(RunInUse), hold(tmp_path, patience=0):
            pass
        threading.Timer(0.05, holding.close).start()
        with hold(tmp_path, patience=60):
            pass


def test_nothing_is_left_behind(tmp_path):
    with pytest.raises(KeyError), hold(tmp_path):
        raise KeyError
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def strange(folder, seconds):
    """What an owner on another host leaves that touched its file so many seconds ago."""
    owner = {"host": "node7", "process": 12, "since": "2026-01-02 03:04:05+00:00", "kernel": "x"}
    (folder / LOCK).write_text(json.dumps(owner))
    then = time.time() - seconds
    os.utime(folder / LOCK, (then, then))


def test_another_host_lives_as_long_as_it_touches_its_file(tmp_path):
    """Whatever the lock says: a disk may keep locks within a host."""
    strange(tmp_path, 30)
    with pytest.raises(RunInUse, match="process 12 on node7 since 2026-01-02"), hold(tmp_path, 0):
        pass
    strange(tmp_path, 90)
    assert holder(tmp_path) is None
    with hold(tmp_path):
        pass


@pytest.mark.parametrize("is_other_host", [False, True])
def test_an_owner_ends_while_we_look_at_its_file(tmp_path, monkeypatch, is_other_host):
    """Between our opening of it and our lock: that is then on a file without a name, and none."""
    if is_other_host:
        strange(tmp_path, 30)
    else:
        (tmp_path / LOCK).touch()
    removals, flock = iter([tmp_path / LOCK]), fcntl.flock

    def after_a_removal(*args):
        for path in removals:
            path.unlink()
        return flock(*args)

    monkeypatch.setattr(fcntl, "flock", after_a_removal)
    with hold(tmp_path, 0):
        assert f"process {os.getpid()} on" in holder(tmp_path)
        with pytest.raises(RunInUse), hold(tmp_path, 0):
            pass


def test_a_disk_without_locks(tmp_path, monkeypatch):
    def refuses(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with hold(tmp_path):
        assert f"process {os.getpid()} on" in holder(tmp_path)
        with pytest.raises(RunInUse), hold(tmp_path, 0):
            pass
    with waiting(tmp_path):
        assert f"process {os.getpid()} on" in holder(tmp_path)


def test_an_owner_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "TOUCH_SECONDS", 0.01)
    with hold(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        wait_for(lambda: (tmp_path / LOCK).stat().st_mtime > 1e9)
