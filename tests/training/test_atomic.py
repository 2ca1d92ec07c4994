"""A file is the old one or the new one, whatever happens while it is written."""

import os

import pytest

from attnlab.atomic import write_atomic


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
