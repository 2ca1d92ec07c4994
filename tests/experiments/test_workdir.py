"""A workdir is claimed whole or left alone."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.running import lock, workdir
from experiments.running.workdir import WorkdirError, own


def claim(folder, record, **options):
    """As a run does: own the folder, then make it the record's."""
    with own(folder):
        return workdir.claim(folder, record, **options)


RECORD = {"config": {"model": {"width": 8}}, "environment": {"cores": 2}}


def test_claims_a_new_folder_and_its_own(tmp_path):
    assert claim(tmp_path / "a" / "b", RECORD) == []
    assert json.loads((tmp_path / "a/b/config.json").read_text()) == RECORD
    assert claim(tmp_path / "a" / "b", RECORD) == []


def test_another_environment_is_told_not_refused(tmp_path):
    claim(tmp_path, RECORD)
    changed = RECORD | {"environment": {"cores": 4}}
    assert claim(tmp_path, changed) == ["cores was 2, is 4"]
    assert json.loads((tmp_path / "config.json").read_text()) == RECORD


def test_another_config_is_refused_with_what_differs(tmp_path):
    claim(tmp_path, RECORD)
    other = RECORD | {"config": {"model": {"width": 9}, "new": 1}}
    with pytest.raises(WorkdirError) as error:
        claim(tmp_path, other)
    assert "config.model.width: there 8, here 9" in str(error.value)
    assert "config.new: there None, here 1" in str(error.value)
    assert json.loads((tmp_path / "config.json").read_text()) == RECORD


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(WorkdirError, match=r"no run of attnlab \(it holds thesis.tex\)"):
        claim(tmp_path, RECORD)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_which_nothing_came_about_is_removed(tmp_path):
    with pytest.raises(KeyError), own(tmp_path / "runs" / "one"):
        raise KeyError
    assert list((tmp_path / "runs").iterdir()) == []
    with own(tmp_path / "runs" / "one"):
        (tmp_path / "runs/one/metrics.jsonl").touch()
    assert [p.name for p in (tmp_path / "runs/one").iterdir()] == ["metrics.jsonl"]


def test_one_owner(tmp_path):
    with own(tmp_path), pytest.raises(lock.Busy, match=f"in use by process {os.getpid()} on"):
        claim(tmp_path, RECORD)
    assert claim(tmp_path, RECORD) == []


def test_a_run_s_folder_is_no_sweep_s(tmp_path):
    claim(tmp_path, RECORD)
    sweep = {"arms": {f"arm {i}": RECORD["config"] for i in range(40)}, "environment": {}}
    with pytest.raises(WorkdirError, match="holds one run, not a sweep; use another"):
        claim(tmp_path, sweep)
    claim(tmp_path / "sweep", sweep)
    with pytest.raises(WorkdirError, match="holds a sweep, not one run; use another"):
        claim(tmp_path / "sweep", RECORD)
    other = {"arms": {"arm 7": {"model": {"width": 9}}}, "environment": {}}
    with pytest.raises(WorkdirError) as error:
        claim(tmp_path / "sweep", other)
    assert "  arms.arm 0: there '1 fields', here None" in str(error.value)
    assert "  and 35 more" in str(error.value)
    assert len(str(error.value).splitlines()) == 8


def test_a_broken_record_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WorkdirError, match=r"config.json is not readable"):
        claim(tmp_path, RECORD)


def test_a_full_disk_is_told_before_the_start(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WorkdirError, match="3 MiB left, this run needs 5 MiB"):
        claim(tmp_path / "run", RECORD, room=5 << 20)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"cannot write to .*: Not a directory"):
        claim(tmp_path / "file" / "run", RECORD)
    with pytest.raises(WorkdirError, match="cannot write to"):
        claim(workdir.Path("/proc/attnlab"), RECORD)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """A limit on file size stands for the disk that fills up while a run writes."""
    claim(tmp_path, RECORD)
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from experiments.running import workdir;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10));"
        "workdir.write_json(Path(sys.argv[1]), {'long': 'x' * 100})"
    )
    words = [sys.executable, "-c", code, tmp_path / "config.json"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "File too large" in result.stderr
    assert json.loads((tmp_path / "config.json").read_text()) == RECORD
