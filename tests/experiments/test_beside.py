"""The report of a published table, from arm folders written by hand: nothing is trained here."""

import json

import pytest
from written_arms import undrawn, write_arm, written

from experiments.reporting import figures, pairs, results
from experiments.reporting.statistics import rank_correlation

__all__ = ["undrawn"]

# title -> (layout of the folder, our loss, perplexity and BLEU of the paper)
ROWS = {
    "A h=1": ("narrow", 3.10, (5.0, 20)),
    "base": ("standard", 2.90, (4.0, 25.5)),
    "A h=9": ("wide", 2.80, (4.25, 26.0)),
    "not tried": (None, None, ()),
    "lost": ("alt", 0.0, (9.0, None)),
}


def write_table(folder, better="lower", **changes):
    """A sweep over the rows of a table, as experiments.sweep leaves it."""
    titles = {}
    for name, (layout, loss, _) in ROWS.items():
        if layout is None:
            continue
        write_arm(folder / layout, layout, "separate", loss, 1000, diverged=name == "lost")
        titles[layout] = name
        path = folder / layout / "config.json"
        record = json.loads(path.read_text())
        record["config"]["model"] |= {"vocab_size": 256, "norm": name}
        path.write_text(json.dumps(record))
    paper = {
        "title": "Table 9 of a paper", "source": "Somebody 2017, table 9", "notes": "A note.",
        "setting": dict.fromkeys(("data", "task", "model", "training", "score"), "theirs"),
        "columns": ["perplexity", "BLEU"], "better": better, "base": "base",
        "rows": {n: {"parameters": 12345, "printed": "", "scores": s}
                 for n, (_, _, s) in ROWS.items()},
    }  # fmt: skip
    arms = {t: json.loads((folder / t / "config.json").read_text())["config"] for t in titles}
    sweep = {"arms": arms, "titles": titles, "paper": paper | changes, "environment": {}}
    (folder / "config.json").write_text(json.dumps(sweep))
    return folder


@pytest.mark.usefixtures("undrawn")
def test_numbers_of_both_stand_in_the_paper_s_order(tmp_path):
    for text in written(write_table(tmp_path)):
        assert "Table 9 of a paper, on other data and at another scale" in text
        assert "A note." in text
    markdown = (tmp_path / "report.md").read_text()
    begin = markdown.index("Beside the paper")
    rows = [line for line in markdown[begin:].splitlines() if "| 12,345 |" in line]
    assert rows == [
        "| A h=1 | 3.102 ± 0.009 | 1,000 | 12,345 | – | 5.00 | 20.0 |",
        "| **base** | 2.902 ± 0.009 | 1,000 | 12,345 | – | 4.00 | 25.5 |",
        "| A h=9 | 2.802 ± 0.009 | 1,000 | 12,345 | – | 4.25 | 26.0 |",
        "| not tried | not run | – | 12,345 | – | – | – |",
        "| ~~lost~~ | diverged | 1,000 | 12,345 | – | 9.00 | – |",
    ]
    assert "- **data:** theirs. **Here:** a &lt;script>" in markdown


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("better", "found"), [("lower", "0.50"), ("higher", "−0.50")])
def test_the_order_is_compared(tmp_path, better, found):
    markdown, _ = written(write_table(tmp_path, better))
    assert "**A h=9 predicts best: 2.802 ± 0.009 bits per byte**, base has 2.902" \
        in markdown  # fmt: skip
    assert "after Holm's correction, better: A h=9; worse: A h=1." in markdown
    assert (
        "Over the 3 rows that both have, Spearman's rank correlation with its perplexity is "
        f"{found} (" in markdown
    )
    assert "the same order comes up once in 6 times" in markdown
    assert "this is no replication" in markdown


@pytest.mark.usefixtures("undrawn")
def test_rows_are_compared_with_the_base_and_may_differ_in_anything(tmp_path):
    [panel] = results.read([write_table(tmp_path)])
    compared = [(pair.a.name, pair.b.name) for pair in pairs.compare(panel)]
    assert compared == [("A h=9", "base"), ("base", "A h=1")]
    assert results.warnings([panel]) == []


def test_rows_of_one_group_have_one_colour(tmp_path):
    [panel] = results.read([write_table(tmp_path)])
    looks = figures.styles(panel)
    assert looks["A h=1"].colour == looks["A h=9"].colour != looks["base"].colour
    assert looks["A h=1"].marker != looks["A h=9"].marker


def test_distances_are_drawn_from_the_base(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "drawn", lambda *args, **_: args[0])
    monkeypatch.setattr(
        figures.plotting, "interval_plot", lambda rows, label: drawn.append((label, rows))
    )
    for name in ("learning_curves", "scatter"):
        monkeypatch.setattr(figures.plotting, name, lambda *args: None)
    figures.of_panel(results.read([write_table(tmp_path)])[0], "x")
    [(label, rows)] = drawn
    assert label == "bits per byte worse than base"
    assert [(r.label, round(r.mean, 6)) for r in rows] == [("A h=9", -0.1), ("A h=1", 0.2)]
    assert all(r.low <= r.mean <= r.high for r in rows)


@pytest.mark.usefixtures("undrawn")
def test_without_the_base_there_is_no_verdict(tmp_path):
    markdown, _ = written(write_table(tmp_path, base="not tried"))
    assert "The row to compare with, not tried, has no result." in markdown


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 3, 2, 4], 4.5 / (4.5 * 5) ** 0.5),  # ranks 1, 2.5, 2.5, 4
        ([1, 1, 1], [1, 2, 3], float("nan")),
    ],
)
def test_rank_correlation_by_hand(a, b, expected):
    assert rank_correlation(a, b) == pytest.approx(expected, nan_ok=True)
