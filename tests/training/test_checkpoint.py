"""Files and checkpoints are whole or not there; a damaged step falls back to an older one."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab.atomic import write_atomic
from attnlab.training.checkpoint import Checkpoints, WrongCheckpoint, digest


def make(step):
    params = {"a": jnp.arange(50_000.0) * step, "b": {"c": jnp.full((3, 2), step, jnp.bfloat16)}}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.array(step)}


def save(folder, *steps):
    with Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, make(step), {"seconds": step / 2})


def restore(folder, like=None):
    lines = []
    with Checkpoints(folder, say=lines.append) as checkpoints:
        return checkpoints.restore(make(0) if like is None else like), lines


def test_round_trip_keeps_the_newest(tmp_path):
    assert restore(tmp_path) == (None, [])
    save(tmp_path, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    (step, state, notes), lines = restore(tmp_path)
    assert (step, notes, lines) == (3, {"seconds": 1.5}, [])
    assert jax.tree.structure(state) == jax.tree.structure(make(3))
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(make(3)), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    with Checkpoints(tmp_path) as checkpoints:  # without a state like it
        step, state, _ = checkpoints.restore()
    np.testing.assert_array_equal(state["params.b.c"], make(3)["params"]["b"]["c"])
    assert (step, state["params.b.c"].dtype) == (3, jnp.bfloat16)


@pytest.mark.parametrize(
    ("kind", "message"), [(WrongCheckpoint, "another run"), (RuntimeError, "RESOURCE_EXHAUSTED")]
)
def test_another_run_and_a_device_without_memory_are_no_damage(tmp_path, kind, message):
    """The error is raised, and no older step is tried."""
    save(tmp_path, 1, 2)

    def check(notes):
        raise kind(f"{message} after {notes['seconds']} seconds")

    lines = []
    with (
        Checkpoints(tmp_path, say=lines.append) as checkpoints,
        pytest.raises(kind, match=rf"{message} after 1\.0"),
    ):
        checkpoints.restore(make(0), check)
    assert lines == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def damage(folder, how):
    """A flipped bit, or only the beginning of the largest file; no notes; or no files at all."""
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "without notes":
        (folder / "_CHECKPOINT_METADATA").write_text("")
    else:
        largest.write_bytes(content[: {"flip": None, "cut": 100}[how]])


@pytest.mark.parametrize("how", ["flip", "cut", "without notes", "empty"])
def test_a_damaged_step_falls_back_and_can_be_saved_again(tmp_path, how):
    save(tmp_path, 1, 2)
    damage(tmp_path / "2", how)
    with Checkpoints(tmp_path, say=lambda line: None) as checkpoints:
        assert checkpoints.restore()[0] == 1
        read = 2 if how in ("flip", "cut") else 1  # notes are read without arrays
        assert checkpoints.notes() == (read, {"seconds": read / 2})
    assert (tmp_path / "2").exists()  # who looks only takes nothing away
    (step, state, _), lines = restore(tmp_path)
    assert step == 1
    np.testing.assert_array_equal(state["params"]["a"], make(1)["params"]["a"])
    assert len(lines) == 1
    assert "checkpoint 2 is damaged, trying an older one" in lines[0]
    save(tmp_path, 2)
    assert restore(tmp_path)[0][0] == 2


def test_nothing_that_can_be_loaded_is_an_error_that_deletes_nothing(tmp_path):
    """A damaged step, or a state of another shape."""
    save(tmp_path, 1)
    with pytest.raises(WrongCheckpoint, match=r"step is int32 \[\] there and int32 \[2\] here"):
        restore(tmp_path, make(0) | {"step": jnp.zeros((2,), jnp.int32)})
    damage(tmp_path / "1", "flip")
    with pytest.raises(ValueError, match=r"could be read \(tried \[1\]\); move the folder away"):
        restore(tmp_path)
    assert (tmp_path / "1").exists()


def test_what_a_killed_save_left_is_deleted_by_the_next_save(tmp_path):
    """Not by a reader, since a running process may be writing it."""
    save(tmp_path, 1)
    left = tmp_path / "7.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", left)
    assert restore(tmp_path)[0][0] == 1
    assert left.exists()
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_digest_sees_bits_shape_and_dtype():
    zero = np.zeros((2, 3), np.float32)
    others = [zero.T, zero.astype(np.int32), zero + np.float32(1e-45)]
    assert len({digest(a) for a in [zero, *others]}) == 4
    assert digest(zero) == digest(jnp.zeros((2, 3)))


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
