"""Rows of finished runs."""

import pandas
import pytest

from experiments.studies.rows import completed, conclusions, one_by_one


def test_a_second_call_trains_only_what_is_missing(tmp_path):
    path, calls = tmp_path / "a.csv", []

    def train(name, seed):
        calls.append((name, seed))
        return {"loss": seed / 3}

    completed(path, [{"name": "a", "seed": 0}], one_by_one(train))
    text = path.read_text()
    runs = [{"name": name, "seed": seed} for name in "ab" for seed in (0, 1)]
    rows = completed(path, runs, one_by_one(train))
    assert calls == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert path.read_text().startswith(text)
    assert rows.loss.tolist() == [0, 0.333333, 0, 0.333333]
    for end in (-9, -4, -1):  # a kill while it wrote the last row, here in its loss
        path.write_text(path.read_text()[:end])
        assert completed(path, runs, one_by_one(train)).loss.tolist() == rows.loss.tolist()
    path.write_text("variant,seed\na,0\n")
    with pytest.raises(ValueError, match="no column 'name'"):
        completed(path, runs, one_by_one(train))


def test_one_common_seed_decides_nothing():
    scores = {"a": pandas.Series({0: 1.0, 1: 2.0}), "b": pandas.Series({1: 4.0, 2: 5.0})}
    assert conclusions(scores, 1)["b"][1] == "inconclusive"
