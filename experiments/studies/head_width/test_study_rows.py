"""Rows: written once, read back the same, never of another commit or text by accident."""

import csv

import pytest
from study_rows import make_row

from experiments.studies.head_width.rows import (
    WrongRows,
    append_row,
    check_origin,
    columns,
    read_rows,
)


def test_rows_come_back_the_same(tmp_path):
    path = tmp_path / "results/runs.csv"
    rows = [make_row(0.1 + 0.2, bits=1.7), make_row(1e-3, bits=float("inf"))]
    assert read_rows(path) == []
    assert [append_row(path, row) for row in rows] == [True, True]
    assert read_rows(path) == rows
    assert path.read_text().splitlines()[0].split(",") == columns()
    assert sorted(p.name for p in path.parent.iterdir()) == ["runs.csv", "runs.csv.lock"]


def test_a_run_is_written_once(tmp_path):
    path, row = tmp_path / "runs.csv", make_row(0.01)
    assert append_row(path, row)
    assert not append_row(path, row)
    assert read_rows(path) == [row]


def test_every_field_of_the_issue_is_a_column():
    wanted = {
        "stage", "num_heads", "head_dim", "layout", "text", "text_sha256", "seed",
        "learning_rate", "parameters", "flops_per_token", "bytes_trained", "heldout_bits",
        "validation_bits", "unigram", "ngram3", "ngram4", "ngram5", "gzip", "seconds",
        "cpu_seconds", "commit", "parametrization", "plan", "width", "length", "ffn_width",
        "status",
    }  # fmt: skip
    assert wanted <= set(columns())


def test_rows_of_another_commit_or_text_are_refused():
    row = make_row(0.01)
    check_origin([row], ["abc"], {"python": "d1"})
    check_origin([row], ["new", "abc"], {})
    with pytest.raises(WrongRows, match="is of commit abc, not new;"):
        check_origin([row], ["new"], {"python": "d1"})
    with pytest.raises(WrongRows, match="digest d1, here it is d2"):
        check_origin([row], ["abc"], {"python": "d2"})


def test_files_that_are_not_rows_are_refused(tmp_path):
    path, row = tmp_path / "runs.csv", make_row(0.01)
    append_row(path, row)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1] + "\n")
    with pytest.raises(WrongRows, match="twice"):
        read_rows(path)
    path.write_text(whole.replace("ngram3", "trigram"))
    with pytest.raises(WrongRows, match="other columns"):
        read_rows(path)
    assert len(list(csv.reader(whole.splitlines()))) == 2
