"""A file is the old one or the new one, whatever happens while it is written."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from attnlab.atomic import is_partial, write_atomic
from experiments.running import workdir


def test_a_kill_in_the_first_write_leaves_a_folder_that_can_be_used(tmp_path):
    """The process dies between the write and the rename."""
    script = """
import os, sys
from pathlib import Path
from experiments.running import workdir
os.replace = lambda *paths: os._exit(9)
with workdir.own(Path(sys.argv[1])):
    workdir.claim(Path(sys.argv[1]), {"config": 1, "environment": {}})
"""
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, cwd=ROOT)
    assert done.returncode == 9
    assert any(map(is_partial, folder.iterdir()))
    record = {"config": 1, "environment": {}}
    with workdir.own(folder):
        assert workdir.claim(folder, record) == []
    assert [path.name for path in folder.iterdir()] == [workdir.CONFIG]


def test_two_files_of_one_stem_do_not_meet(tmp_path, monkeypatch):
    """One is written while the other is."""
    replace = os.replace

    def interrupted(source, target):
        if os.path.basename(target) == "a.json":
            workdir.write_bytes(tmp_path / "a.csv", b"1,2\n")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    workdir.write_bytes(tmp_path / "a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert (tmp_path / "a.csv").read_bytes() == b"1,2\n"


def test_the_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *p: (calls.append("replace"), replace(*p)))
    workdir.write_json(tmp_path / "a.json", {})
    assert calls == ["fsync", "replace", "fsync"]


def test_an_error_changes_nothing(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.json", b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a.json", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"old"}
