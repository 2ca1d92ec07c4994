"""A workdir is claimed whole or left alone."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments.running import workdir
from experiments.running.workdir import WorkdirError, claim

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
