"""One run: stopped and resumed it is the run that was never stopped; diverged it is a row."""

import dataclasses
import os
import signal

import pytest

from attnlab.lab import RunInUse, lock
from attnlab.training import Stopped
from experiments.studies.head_width import run as lab_run
from experiments.studies.head_width.run import Place, run_one
from experiments.studies.head_width.spec import StudyRun, Variant

SPEC = StudyRun(-1, Variant(1, 16, width=16, length=16), "fan_in", "python", 5, 0.01, 2.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Scores of few windows."""
    monkeypatch.setattr(lab_run, "HELDOUT_BYTES", 2048)
    monkeypatch.setattr(lab_run, "VALIDATION_BYTES", 1024)


def numbers(row):
    """All but what depends on time."""
    return dataclasses.replace(row, origin=None)


def test_stopped_and_resumed_it_has_the_same_numbers(tmp_path, monkeypatch):
    whole = run_one(SPEC, Place(tmp_path, tmp_path / "whole", "c"))
    place = Place(tmp_path, tmp_path / "stopped", "c")
    make = lab_run.make_source

    def stopping(corpus, length):
        source = make(corpus, length)

        def batch(seed, step, size, part):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return source.batches(seed, step, size, part)

        return dataclasses.replace(source, batches=batch)

    monkeypatch.setattr(lab_run, "make_source", stopping)
    with pytest.raises(Stopped, match="step 7 of 12"):
        run_one(SPEC, place)
    monkeypatch.setattr(lab_run, "make_source", make)
    resumed = run_one(SPEC, place)
    assert numbers(resumed) == numbers(whole)
    assert whole.scores.status == "complete"
    assert whole.scores.heldout_bits < 7
    assert whole.sizes.bytes_trained == 12 * 2048
    assert resumed.origin.cpu_seconds > 0


def test_a_diverged_run_is_a_row(tmp_path):
    spec = dataclasses.replace(SPEC, parametrization="one_rate", learning_rate=1e38)
    row = run_one(spec, Place(tmp_path, tmp_path, "c"))
    assert (row.scores.status, row.scores.validation_bits) == ("diverged", float("inf"))
    assert row.baselines.ngram3 > 1


def test_a_folder_has_one_process(tmp_path):
    folder = tmp_path / "runs" / SPEC.id
    folder.mkdir(parents=True)
    with lock.hold(folder), pytest.raises(RunInUse, match=f"{SPEC.id} is in use by process"):
        run_one(SPEC, Place(tmp_path, tmp_path, "c"))
