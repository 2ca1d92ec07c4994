"""What is written can be read by the loggers' own readers, once; their errors stop nothing."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import ROOT

from attnlab.lab.machine import write_provenance
from attnlab.training import LOGGERS, Recorder
from attnlab.training.loggers import read_metrics

HYPERPARAMETERS = {"width": 8}


def write(folder, first, steps, **options):
    with Recorder(folder, (0, 7), **options) as recorder:
        recorder.rewind(first)
        for step in steps:
            recorder.log_scalars(step, {"train/loss": np.array([step, 3 * step]), "rate": 0.5})


def write_and_resume(folder, *loggers):
    """The first process was killed after its checkpoint of step 20."""
    folder = Path(folder)
    options = dict(name="run", loggers=loggers, hyperparameters=HYPERPARAMETERS)
    write(folder, 0, [0, 10, 20, 30], **options)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "tra')  # cut short by the kill
    time.sleep(1)  # TensorBoard names its files by the second
    write(folder, 20, [30, 40], **options)


def tensorboard_values(folder):
    """{(step, name and seed): number} of the events that are shown, each of which is there once."""
    from tensorboardX.proto.event_pb2 import Event  # after Recorder, which spares us torch

    found, text = {}, b""
    for path in sorted((folder / "tensorboard").glob("seed_*/*"), key=lambda path: path.name):
        seed, content = path.parent.name, path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.HasField("session_log"):
                hidden = [key for key in found if key[0] >= event.step and key[1].endswith(seed)]
                found = {key: value for key, value in found.items() if key not in hidden}
            text += b"".join(part for v in event.summary.value for part in v.tensor.string_val)
            for value in event.summary.value:
                key = event.step, f"{value.tag}/{seed}"
                assert key not in found
                if not value.tensor.string_val:
                    found[key] = value.simple_value
    assert b'"width": 8' in text
    return found


def wandb_values(folder):
    """The same of wandb, whose server replaces steps that are logged again."""
    found = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                config = {i.key: json.loads(i.value_json) for i in record.run.config.update}
                assert config["width"] == 8
                assert record.run.run_id == (folder / "wandb_id.txt").read_text()
            row = {(i.nested_key or [i.key])[0]: json.loads(i.value_json)
                   for i in record.history.item}  # fmt: skip
            found |= {(row["_step"], name): row[name] for name in row if not name.startswith("_")}
    return found


def wandb_records(path):
    """The messages of wandb's own protocol. wandb 0.31 has no reader of its files in Python: they
    are a LevelDB log (blocks of 32 KiB; 4 bytes checksum, 2 length, 1 type) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts, at = parts + content[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


EACH = {"train/loss/seed_0": 1, "train/loss/seed_7": 3}
WRITTEN = {
    "tensorboard": (tensorboard_values, EACH, {"rate/seed_0": 0.5, "rate/seed_7": 0.5}),
    "wandb": (wandb_values, EACH | {"train/loss": 2}, {"rate": 0.5}),
}
"""Logger -> its reader, what it has of step 1, and what it has of every step."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "wandb")) for name in LOGGERS]
)
def test_every_logger_gets_every_metric_once(tmp_path, name):
    """As metrics.jsonl does, over a resume. In a process of its own, since wandb starts one."""
    if name == "wandb":
        pytest.importorskip("wandb")
    script = "import sys, test_loggers; test_loggers.write_and_resume(*sys.argv[1:])"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/training")))
    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    words = [sys.executable, "-c", script, str(tmp_path), name]
    done = subprocess.run(
        words, env=environment | {"PYTHONPATH": paths}, timeout=120, capture_output=True, text=True
    )
    assert "[run] step     20  train/loss 20 60  rate 0.5" in done.stderr
    steps = [0, 10, 20, 30, 40]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": n, "train/loss": [n, 3 * n], "rate": 0.5} for n in steps]
    read, grows, stays = WRITTEN[name]
    expected = {(n, one): n * value for n in steps for one, value in grows.items()}
    assert read(tmp_path) == expected | {(n, one): stays[one] for n in steps for one in stays}


@pytest.fixture
def mine(monkeypatch):
    """A logger of this name."""
    logger = mock.Mock()
    monkeypatch.setitem(LOGGERS, "mine", lambda info: logger)
    return logger


def test_what_depends_on_the_machine_is_for_loggers_and_in_no_file_of_the_run(tmp_path, mine):
    with Recorder(tmp_path, (0,), loggers=["mine"]) as recorder:
        recorder.rewind(0)
        recorder.show(25, {"speed": 2.0})
    mine.log_scalars.assert_called_once_with(25, {"speed": 2.0})
    mine.finish.assert_called_once_with()
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]


def test_other_processes_write_nothing(tmp_path, capsys):
    write(tmp_path, 0, [10], writes=False)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["log_scalars", "finish"])
def test_a_logger_that_fails_is_reported_once_and_stops_nothing(tmp_path, capsys, mine, method):
    """After one write, or when it is closed."""
    gone = OSError("the server is gone")
    getattr(mine, method).side_effect = [None, gone, gone] if method == "log_scalars" else gone
    write(tmp_path, 0, [1, 2, 3], loggers=["mine"])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.count("the logger mine failed") == 1
    assert "OSError: the server is gone" in said


def test_commit_and_changes_of_a_repository(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    write_provenance(tmp_path / "run")
    assert json.loads((tmp_path / "run/provenance.json").read_text())["git"] is None
    (tmp_path / "a.py").write_text("x = 1\n")
    for words in ("init -q", "add a.py", "commit -q -m one"):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words.split()]
        subprocess.run(git, check=True)
    (tmp_path / "a.py").write_bytes(b"x = 2\xff\r\n")
    write_provenance(tmp_path / "run")
    about = json.loads((tmp_path / "run/provenance.json").read_text())
    assert re.fullmatch("[0-9a-f]{40}", about["git"]["commit"])
    assert " M a.py" in about["git"]["changed"]
    assert (about["argv"], about["packages"]["numpy"]) == (sys.argv, np.__version__)
    assert b"-x = 1\n+x = 2\xff\r\n" in (tmp_path / "run/changes.diff").read_bytes()
