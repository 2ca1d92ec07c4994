"""Rows of finished runs."""

from experiments.studies.rows import completed, one_by_one


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
