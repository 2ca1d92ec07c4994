"""A file is the old one or the new one, whatever happens while it is written."""

import os

import pytest

from attnlab import lab
from attnlab.atomic import is_partial, write_atomic
from attnlab.data import Text
from attnlab.heads import Standard
from attnlab.models import ModelConfig
from attnlab.training import EvaluationConfig, ScheduleConfig, TrainConfig


@pytest.mark.slow
def test_a_kill_in_the_first_write_leaves_a_folder_that_can_be_used(tmp_path):
    """The process dies between the write and the rename of spec.json."""
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    (folder / ".spec.json.k3x9.partial").write_text("{")  # what a kill leaves
    train = TrainConfig(
        steps=2,
        schedule=ScheduleConfig(warmup_steps=1),
        length=16,
        batch_size=8,
        evaluation=EvaluationConfig(windows=8, curve_windows=8),
    )
    model = ModelConfig(width=8, num_layers=1, max_len=16, heads=Standard(num_heads=1))
    (tmp_path / "text").write_bytes(b"the rose is a rose. " * 200)
    data = Text(path=str(tmp_path / "text"))
    spec = lab.RunSpec("run", lab.Experiment(model=model, train=train, data=data), 0)
    assert lab.run_one(spec, tmp_path).status == "complete"
    assert not any(map(is_partial, folder.iterdir()))


def test_two_files_of_one_stem_do_not_meet(tmp_path, monkeypatch):
    """One is written while the other is."""
    replace = os.replace

    def interrupted(source, target):
        if os.path.basename(target) == "a.json":
            write_atomic(tmp_path / "a.csv", b"1,2\n")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    write_atomic(tmp_path / "a.json", b"{}")
    assert (tmp_path / "a.json").read_bytes() == b"{}"
    assert (tmp_path / "a.csv").read_bytes() == b"1,2\n"


def test_the_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *p: (calls.append("replace"), replace(*p)))
    write_atomic(tmp_path / "a.json", b"{}")
    assert calls == ["fsync", "replace", "fsync"]


def test_an_error_changes_nothing(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.json", b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a.json", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"old"}
