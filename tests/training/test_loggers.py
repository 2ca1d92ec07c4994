"""What is written can be read by the loggers' own readers, once; their errors stop nothing."""

import json
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from attnlab.training import LOGGERS, Recorder, provenance
from attnlab.training.loggers import read_metrics

HYPERPARAMETERS = {"model": {"width": 8}, "seeds": [0, 7]}


def write(folder, first, steps, **options):
    with Recorder(folder, (0, 7), **options) as recorder:
        recorder.rewind(first)
        for step in steps:
            recorder.log_scalars(
                step, {"train/loss": np.array([step, -step]), "train/learning_rate": 0.5}
            )


def values(folder):
    """(step, value with its tag) of every TensorBoard event in a folder."""
    from tensorboardX.proto.event_pb2 import Event  # after Recorder, which spares us torch

    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            found += [(event.step, v) for v in event.summary.value]
            content = content[16 + size :]
    return found


def test_json_lines_and_tensorboard(tmp_path, capsys):
    options = dict(name="run", loggers=["tensorboard"], hyperparameters=HYPERPARAMETERS)
    with Recorder(tmp_path, (0, 7), **options) as recorder:
        recorder.rewind(0)
        recorder.log_scalars(20, {"train/loss": np.array([20, -20]), "train/learning_rate": 0.5})
        recorder.show(25, {"speed": 2.0})  # TensorBoard alone
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 20, "train/loss": [20, -20], "train/learning_rate": 0.5}]
    assert "[run] step     20  train/loss 20 -20" in capsys.readouterr().err
    for seed, loss in ((0, 20.0), (7, -20.0)):
        found = values(tmp_path / "tensorboard" / f"seed_{seed}")
        scalars = [(step, v.tag, v.simple_value) for step, v in found]
        assert (20, "train/loss", loss) in scalars
        assert (20, "train/learning_rate", 0.5) in scalars
        assert (25, "speed", 2.0) in scalars
    texts = [v for _, v in values(tmp_path / "tensorboard" / "seed_0") if v.tensor.string_val]
    assert b'"width": 8' in texts[0].tensor.string_val[0]


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    write(tmp_path, 0, [10, 20, 30])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 40, "tra')  # cut short by a kill
    write(tmp_path, 20, [30, 40])
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]


def test_other_processes_write_nothing(tmp_path, capsys):
    write(tmp_path, 0, [10], writes=False)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    """A run folder that wandb's own messages read: history and config. In a process of its
    own, since wandb starts one beside it."""
    pytest.importorskip("wandb")
    script = """
import sys, numpy as np
from pathlib import Path
from attnlab.training import Recorder
with Recorder(Path(sys.argv[1]), (0, 7), loggers=["wandb"], hyperparameters={"width": 8}) as r:
    r.rewind(0)
    for step in (10, 20):
        r.log_scalars(step, {"train/loss": np.array([step, step + 2.0])})
"""
    environment = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    words = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(words, check=True, env=environment, timeout=120)
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    history = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
         for item in record.history.item}
        for record in records if record.HasField("history")
    ]  # fmt: skip
    assert [row["train/loss"] for row in history] == [11.0, 21.0]
    assert [row["train/loss/seed_7"] for row in history] == [12.0, 22.0]
    assert [row["_step"] for row in history] == [10, 20]
    [run] = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["width"] == 8
    assert run.run_id == (tmp_path / "wandb_id.txt").read_text()


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


class Failing:
    """Fails after one write."""

    def __init__(self, info):
        self.calls = 0

    def log_scalars(self, step, values):
        self.calls += 1
        if self.calls > 1:
            raise OSError("the server is gone")

    def finish(self):
        raise OSError


def test_a_logger_that_fails_is_reported_once_and_stops_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(LOGGERS, "mine", Failing)
    write(tmp_path, 0, [1, 2, 3], loggers=["mine"])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.count("the logger mine failed") == 1
    assert "OSError: the server is gone" in said


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        Recorder(tmp_path, (0,), loggers=["tensorbord"])


def test_the_first_start_records_what_the_run_was_started_with(tmp_path):
    """Once: a resumed run keeps the record of its first start."""
    for step in (0, 20):
        write(tmp_path, step, [], hyperparameters=HYPERPARAMETERS)
        (tmp_path / "mark").touch()
    about = json.loads((tmp_path / "provenance.json").read_text())
    assert about["hyperparameters"] == HYPERPARAMETERS
    assert about["argv"] == sys.argv
    assert about["packages"]["numpy"] == np.__version__
    assert (tmp_path / "provenance.json").stat().st_mtime <= (tmp_path / "mark").stat().st_mtime


def test_commit_and_changes_of_a_repository(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    provenance.write_provenance(tmp_path / "run", {})
    assert json.loads((tmp_path / "run/provenance.json").read_text())["git"] is None
    (tmp_path / "run/provenance.json").unlink()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a.py").write_text("x = 1\n")
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    (tmp_path / "a.py").write_bytes(b"x = 2\xff\r\n")
    provenance.write_provenance(tmp_path / "run", {})
    about = json.loads((tmp_path / "run/provenance.json").read_text())
    assert re.fullmatch("[0-9a-f]{40}", about["git"]["commit"])
    assert about["git"]["changed"] == [" M a.py"]
    assert b"-x = 1\n+x = 2\xff\r\n" in (tmp_path / "run/changes.diff").read_bytes()
