"""What is written can be read, and a resumed run leaves no double lines."""

import struct

import numpy as np

from attnlab.training.loggers import read_metrics
from attnlab.training.metrics import Recorder


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


def scalars(folder):
    return [(step, v.tag, v.simple_value) for step, v in values(folder)]


def test_json_lines_and_tensorboard(tmp_path, capsys):
    write(tmp_path, 0, [10, 20], name="run", loggers=["tensorboard"])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[1] == {"step": 20, "train/loss": [20, -20], "train/learning_rate": 0.5}
    assert (20, "train/loss", -20.0) in scalars(tmp_path / "tensorboard" / "seed_7")
    assert (10, "train/learning_rate", 0.5) in scalars(tmp_path / "tensorboard" / "seed_0")
    assert "[run] step     20  train/loss 20 -20" in capsys.readouterr().err


def test_without_other_loggers_there_are_json_lines_alone(tmp_path):
    write(tmp_path, 0, [10])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_tensorboard_shows_alone(tmp_path):
    options = dict(hyperparameters={"model": {"width": 8}}, loggers=["tensorboard"])
    with Recorder(tmp_path, (3, 4), **options) as recorder:
        recorder.rewind(0)
        recorder.show(5, {"speed": 2.0})
    found = values(tmp_path / "tensorboard" / "seed_3")
    first = {v.tag.partition("/")[0]: v for _, v in found}
    assert (first["speed"].simple_value, read_metrics(tmp_path / "metrics.jsonl")) == (2.0, [])
    assert b'"width": 8' in first["hyperparameters"].tensor.string_val[0]


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    write(tmp_path, 0, [10, 20, 30])
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 40, "tra')  # cut short by a kill
    write(tmp_path, 20, [30, 40])
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]


def test_other_processes_write_nothing(tmp_path, capsys):
    write(tmp_path, 0, [10], writes=False)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_a_value_of_the_step_that_a_run_resumes_at_is_recorded_once(tmp_path):
    for first, rows in ((0, {10: {"a": 1}, 20: {"b": 2}}), (20, {20: {"a": 3, "b": 4}})):
        with Recorder(tmp_path, (0,)) as recorder:
            recorder.rewind(first)
            for step, numbers in rows.items():
                recorder.log_scalars(step, numbers)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 10, "a": 1}, {"step": 20, "b": 2}, {"step": 20, "a": 3}]
