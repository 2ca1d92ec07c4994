"""Optional loggers: their own readers open what they wrote, and their errors stop nothing."""

import dataclasses
import json
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from test_train import CONFIG, DATASET, MODEL, evaluated

from attnlab import training
from attnlab.training import CALLBACKS, LOGGERS, Recorder, provenance
from attnlab.training.loggers import read_metrics

STEPS = [10, 20]
HYPERPARAMETERS = {"model": {"width": 8}, "seeds": [0, 7]}


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
    assert [row["_step"] for row in history] == STEPS
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
    with Recorder(tmp_path, (0, 7), loggers=["mine"]) as recorder:
        recorder.rewind(0)
        for step in (1, 2, 3):
            recorder.log_scalars(step, {"loss": 1.0})
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
        with Recorder(tmp_path, (0, 7), hyperparameters=HYPERPARAMETERS) as recorder:
            recorder.rewind(step)
        (tmp_path / "mark").touch()
    about = json.loads((tmp_path / "provenance.json").read_text())
    assert about["hyperparameters"] == HYPERPARAMETERS
    assert about["argv"] == sys.argv
    assert about["packages"]["numpy"] == np.__version__
    assert (tmp_path / "provenance.json").stat().st_mtime <= (tmp_path / "mark").stat().st_mtime


def test_commit_and_changes_of_a_repository(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a.py").write_text("x = 1\n")
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    (tmp_path / "a.py").write_text("x = 2\n")
    about, changes = provenance.describe_process(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", about["git"]["commit"])
    assert about["git"]["changed"] == [" M a.py"]
    assert b"-x = 1\n+x = 2\n" in changes
    assert provenance.describe_process(tmp_path.parent)[0]["git"] is None


SHORT = dataclasses.replace(
    CONFIG, steps=4, seeds=(0,), log_every=2, evaluation=evaluated(every=2), checkpoint_every=4
)


def test_callbacks_are_called_in_their_period_log_numbers_and_may_fail():
    @training.callback(every=3)
    def norm(info):
        info.log("norm", np.abs(info.params["embedding"]).max())
        info.log("moved", np.abs(info.params["embedding"] - info.initial["embedding"]).max())

    @training.callback(every=2)
    def broken(info):
        if info.step:
            raise KeyError("a bug")

    config = dataclasses.replace(SHORT, seeds=(0, 5))
    with pytest.warns(RuntimeWarning, match="the callback broken failed") as warned:
        run = training.fit_in_memory(
            MODEL.build(),
            training.OBJECTIVES["causal_lm"],
            config,
            DATASET,
            options=training.FitOptions(callbacks=[norm, broken]),
        )
    assert len(warned) == 1
    assert run.curve("norm")[0].tolist() == [0, 3, 4]
    expected = [np.abs(run.params(i)["embedding"]).max() for i in range(2)]
    assert run.curve("norm")[1][:, -1].tolist() == expected
    moved = run.curve("moved")[1]
    assert (moved[:, 0] == 0).all()
    assert (moved[:, 1:] > 0).all()


@pytest.mark.slow
def test_a_profile_of_some_steps(tmp_path):
    """A trace that holds the steps."""
    options = training.FitOptions(callbacks=[training.Profile(tmp_path, 2, 3)])
    training.fit_in_memory(
        MODEL.build(), training.OBJECTIVES["causal_lm"], SHORT, DATASET, options=options
    )
    assert [p.suffix for p in tmp_path.rglob("*.xplane.pb")] == [".pb"]


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_logs_a_number_of_each_seed(name):
    """At step 0, where the period says so and at the last step; each is finite."""
    callback = CALLBACKS[name]
    run = training.fit_in_memory(
        MODEL.build(),
        training.OBJECTIVES["causal_lm"],
        dataclasses.replace(SHORT, seeds=(0, 5)),
        DATASET,
        options=training.FitOptions(callbacks=[callback]),
    )
    logged = [row for row in run.records if not any(n.startswith("train/") for n in row)]
    names = {n for row in logged for n in row if not n.startswith("eval/")} - {"step"}
    assert names
    for one in names:
        steps, values = run.curve(one)
        assert steps.tolist() == [s for s in range(5) if s % callback.every == 0 or s == 4]
        assert values.shape == (2, len(steps))
        assert np.isfinite(values).all()
