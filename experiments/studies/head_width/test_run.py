"""Runs by `lab.sweep` and their rows; the command."""

import dataclasses
import math

import pytest
from commands import command

from attnlab import lab
from experiments.studies.head_width.rows import (
    append_csv,
    check_origin,
    new_rows,
    read_rows,
    runs_of,
)
from experiments.studies.head_width.spec import StudyRun, run_spec
from experiments.studies.head_width.test_simulations import ROWS
from experiments.studies.head_width.texts import load_text

TINY = StudyRun(
    1, 16, width=16, length=16, stage=0, parametrization="fan_in", text="python", seed=5,
    learning_rate=0.003, bytes_per_parameter=2.0,
)  # fmt: skip
STUDY = "experiments.studies.head_width"


@pytest.mark.slow
def test_runs_become_rows(tmp_path):
    """One that learns and one that diverges. Both have the n-grams of their own batches."""
    runs = [TINY, dataclasses.replace(TINY, learning_rate=1e38)]
    specs = [run_spec(run, tmp_path) for run in runs]
    results = lab.sweep(specs, tmp_path / "work", executor=lab.InProcess())
    append_csv(tmp_path / "runs.csv", new_rows(results, tmp_path, "abc"))
    rows = read_rows(tmp_path / "runs.csv")
    assert runs_of(rows) == runs
    assert rows["status"].tolist() == ["complete", "diverged"]
    assert rows["heldout_bits"][0] < 7
    assert rows["validation_bits"][1] == math.inf
    assert rows["bytes_trained"].tolist() == [12 * 2048] * 2
    assert rows["unigram"].between(4, 6).all()
    assert set(rows["text_sha256"]) == {load_text("python", tmp_path).sha256}


def test_rows_of_another_commit_or_text_are_refused():
    rows = ROWS.assign(commit="abc", text_sha256="d1")[:1]
    check_origin(rows, ["new", "abc"], {"python": "d1"})
    with pytest.raises(ValueError, match="commit abc"):
        check_origin(rows, ["new"], {"python": "d1"})
    with pytest.raises(ValueError, match="another text"):
        check_origin(rows, ["abc"], {"python": "d2"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--analysis"], "876 are missing"),
        (["--stages=9"], "stages are 0, 1"),
        (["--stages=3,3"], "each once"),
        (["--gpu", "--data=."], "no file wikitext2/train.txt.gz"),
        (["--stages=0", "--workdir=x", "--data=."], "no file wikitext2/train.txt.gz"),
        (["--stages=0"], "--workdir is needed"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, flags, said):
    done = command(STUDY, f"--results={tmp_path}", *flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []
