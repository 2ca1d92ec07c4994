"""The report as data: conclusions of known scores, tables, figures, warnings, files."""

import csv
import dataclasses
import io
import itertools
import re
import shutil

import numpy as np
import pytest
from made_results import made, noisy, tuned, with_curves
from small_experiment import MODEL, experiment, train_config

from attnlab import lab
from attnlab.data import Text
from attnlab.lab.description import Description, Expectation
from attnlab.lab.policies import FIRST_RATE
from attnlab.lab.workdir import add_specs, run_folder
from attnlab.report import Panel, make_page, read_panels
from attnlab.report.figures import Curve, curves_figures, learning_curves, over_tag_figures
from attnlab.report.heads import Heads, attention_map, statistics_table
from attnlab.report.page import Facts, Figures, Paragraph, Table, to_markdown
from attnlab.report.style import new_axes, style, themed_svg
from attnlab.report.tables import budget_table, comparison_table, rates_table, scores_table
from attnlab.report.words import answers, expectations, limits, warnings

CROSSED = {
    (("layout", "standard"), ("sharing", "separate")): 2.70,
    (("layout", "standard"), ("sharing", "albert")): 2.95,
    (("layout", "wide"), ("sharing", "separate")): 2.60,
    (("layout", "wide"), ("sharing", "albert")): 2.85,
}
TWO = {(("layout", "standard"),): 2.7, (("layout", "wide"),): 2.5}


def panel(runs, **about):
    return Panel(lab.Results(runs), Description(**about))


def conclusions(runs, **about):
    """(variant, baseline, over) -> conclusion."""
    rows = panel(runs, **about).comparisons.itertuples()
    return {(r.variant, r.baseline, r.over): r.conclusion for r in rows}


def texts(blocks):
    return " ".join(f"{b.lead} {b.text}" for b in blocks if isinstance(b, Paragraph))


def in_percent(runs):
    """The same scores as an accuracy, of which higher is better."""
    metric = lab.result.MetricInfo(name="accuracy", unit="% right", better="higher", digits=1)
    task, found = lab.TaskInfo(metrics=(metric,)), []
    for run in runs:
        scores = lab.Scores(heldout={"accuracy": 10 * run.scores.heldout["loss"]})
        found.append(dataclasses.replace(run, task=task, scores=scores))
    return found


def store(runs, workdir):
    """As a sweep leaves them."""
    add_specs([run.spec for run in runs], workdir)
    for run in runs:
        folder = run_folder(workdir, run.spec)
        folder.mkdir(parents=True)
        run.write(folder)
    return workdir


def test_one_frame_has_averages_first_then_pairs_best_first():
    assert list(conclusions(noisy(CROSSED, range(4))).items()) == [
        (("wide", "standard", "sharing"), "better"),
        (("albert", "separate", "layout"), "worse"),
        (("wide, separate", "standard, separate", ""), "better"),
        (("wide, albert", "standard, separate", ""), "worse"),
        (("standard, albert", "standard, separate", ""), "worse"),
    ]


def test_baselines_units_and_variants_that_diverged():
    runs = noisy(TWO, range(5))
    assert conclusions(runs) == {("wide", "standard", ""): "better"}
    assert conclusions(runs, baseline={"layout": "wide"}) == {("standard", "wide", ""): "worse"}
    assert conclusions(in_percent(runs)) == {("wide", "standard", ""): "worse"}
    gone = made({"layout": "x"}, 0, None)
    assert conclusions([*runs, gone], baseline={"layout": "x"}) == {}
    assert conclusions([gone, *runs]) == {}  # the first one, not the first that is left
    assert "Every run diverged" in texts(answers(panel([gone])))
    crossed = [*noisy(CROSSED, [0, 1])[:-2], made(dict(list(CROSSED)[-1]), 0, None)]
    assert all(over == "" for *_, over in conclusions(crossed))  # not every combination


def test_only_the_pairs_of_the_question_are_compared():
    """Their baselines are named in the figure, where there are several."""
    pairs = tuple(
        ({"layout": "wide", "sharing": plan}, {"layout": "standard", "sharing": plan})
        for plan in ("separate", "albert")
    )
    one = panel(noisy(CROSSED, range(4)), pairs=pairs)
    assert set(one.comparisons["variant"]) == {"wide", "wide, separate", "wide, albert"}
    [some] = make_page([one]).blocks(Figures)
    for label in ("wide, separate − ", "wide, albert − ", "wide − standard (mean)"):
        assert label in some.figures[0].svg


def test_the_answer_has_the_numbers_of_its_row():
    one = panel(noisy(TWO, range(5)))
    [answer], [row] = answers(one), one.comparisons.to_dict("records")
    found = [float(x.replace("−", "-")) for x in re.findall(r"[−\d]+\.\d{3}", answer.text)][:3]
    np.testing.assert_allclose(found, [row[n] for n in ("difference", "low", "high")], atol=6e-4)
    apart = [made({"v": v}, v, 2.0) for v in (0, 1)]
    assert "no seed with scores of both" in texts(answers(panel(apart)))
    wide = noisy({**TWO, (("layout", "narrow"),): 2.7}, [0, 1, 2], spread=1.0)
    assert {a.lead.split(":")[0] for a in answers(panel(wide))} == {"Inconclusive"}
    means = {(("v", f"v{i}"),): 2.0 + 0.2 * (i > 3) - 0.2 * (i == 1) for i in range(8)}
    [answer] = answers(panel(noisy(means, range(6))))  # many are counted
    counts = re.findall(r"(\d+) (better|worse|inconclusive)", answer.lead)
    assert counts == [("1", "better"), ("4", "worse"), ("2", "inconclusive")]
    pairs = [({"v": f"v{a}"}, {"v": f"v{b}"}) for a, b in ((1, 0), (4, 1), (4, 2), (4, 3), (5, 1))]
    [answer] = answers(panel(noisy(means, range(6)), pairs=tuple(pairs)))
    assert "Better: v1 against v0. Worse: v4 against v3; " in answer.text


def test_a_sign_that_depends_on_another_tag_is_in_the_conclusion():
    """wide is better on average, and worse under one of the plans."""
    means = dict(zip(CROSSED, (2.70, 2.95, 2.72, 2.60), strict=True))
    one = panel(noisy(means, range(5), spread=0.001))
    row = one.comparisons.iloc[0]
    found = row["conclusion"], round(row["least"], 2), round(row["most"], 2)
    assert found == ("better", -0.35, 0.02)
    assert "sign depends on sharing" in answers(one)[0].lead
    assert "sign" not in answers(panel(noisy(CROSSED, range(5))))[0].lead
    [table] = comparison_table(one)
    assert table.frame["single differences"].notna().tolist() == [True, True, False, False, False]


def test_warnings_stand_above_the_conclusion():
    bad = {tags: mean + 3 for tags, mean in CROSSED.items()}  # unigram has 4.7
    page = make_page([panel(noisy(bad, range(5)))])
    kinds = [b.kind if isinstance(b, Paragraph) else "figure" for b in page.head]
    assert kinds == ["", "warning", "answer", "answer", "figure"]
    runs = noisy(TWO, [0, 1])
    found = [*runs, made({"layout": "wide"}, 2, None), made({"layout": "x"}, 0, 5.0)]
    a, b = (noisy(TWO, [0, 1], data=Text(path=name), sha256="one") for name in "ab")
    python = dataclasses.replace(runs[0].provenance, environment={"python": "3.12", "jax": "0"})
    newer = dataclasses.replace(runs[0], provenance=python)
    other = noisy(TWO, [0, 1], data=Text(path="a"), sha256="two")
    pairs = (({"layout": "wide"}, {"layout": "standrd"}),)
    for some, about, word in (
        (found, {}, "wide diverged with seed 2"),
        (found, {}, "(unigram): x."),
        ([*runs[:2], *a[2:]], {}, "path differ"),  # of wide
        ([*a[:2], *other[2:]], {}, "digests differ"),
        ([*a, *b], {}, "digests are equal"),
        ([newer, *runs[1:]], {}, "python is 3.12 or 3.11"),
        (runs, {"pairs": pairs}, "standrd"),
        (runs, {"baseline": {"layout": "wid"}}, "'wid'"),
    ):
        assert word in texts(warnings(panel(some, **about)))
    assert warnings(panel(runs)) == warnings(panel(in_percent(runs))) == []
    assert warnings(panel(runs, baseline={"layout": "wide"})) == []


def test_texts_and_seeds_are_both_sources_of_variation():
    runs = []
    for i, name in enumerate("abc"):
        shifted = {tags: mean + 0.1 * i * (tags[0][1] == "wide") for tags, mean in TWO.items()}
        runs += noisy(shifted, range(3), key=i, data=Text(path=name))
    results = lab.Results(runs)
    row = results.compare({"layout": "standard"}).iloc[0]
    assert (row["method"], row["texts"], row["pairs"]) == ("t over texts", 3, 9)
    assert row["conclusion"] == "inconclusive"  # over seeds alone it would be clear
    assert results.table()["texts"].tolist() == [3, 3]
    assert any("texts (3) and seeds" in line for line in limits(Panel(results)))
    wide = [run.scores.heldout["loss"] for run in runs if run.spec.tags["layout"] == "wide"]
    spread = np.sqrt(np.reshape(wide, (3, 3)).var(axis=1, ddof=1).mean())  # within texts
    assert results.table()["sd"].to_list()[0] == pytest.approx(spread)


@pytest.mark.parametrize("tag", ["tokenizer", "name"])
def test_a_field_of_the_data_that_is_swept_is_no_text(tag):
    """Two tokenizers on three texts are compared on each of them."""
    runs = []
    for tokenizer, mean in (("bytes", 2.0), ("bpe:300", 2.5)):
        for i, name in enumerate("abc"):
            data = Text(path=name, tokenizer=tokenizer)
            runs += noisy({((tag, tokenizer),): mean + i}, range(2), key=i, data=data)
    [row] = lab.Results(runs).compare().to_dict("records")
    assert (row["texts"], row["pairs"], row["conclusion"]) == (3, 6, "worse")
    assert row["difference"] == pytest.approx(0.5)


def on_two_texts(*scores):
    """A variant with two seeds on each of two texts, of which the unigrams are 2.5 and 5.5."""
    return [
        made({"layout": "wide"}, seed, score + 0.02 * seed, data=Text(path=name), unigram=unigram)
        for name, score, unigram in zip("ab", scores, (2.5, 5.5), strict=True)
        for seed in (0, 1)
    ]


def test_scores_of_several_texts_stand_beside_baselines_of_the_same_texts():
    """Means over both, and the standard deviation within a text."""
    one = panel(on_two_texts(2.0, 5.0))
    rows = {row["variant"]: row for row in scores_table(one).frame.to_dict("records")}
    assert rows["unigram (no model)"]["held-out bits per byte"] == 4.0
    assert rows["wide"]["standard deviation"] == pytest.approx(np.std([0, 0.02], ddof=1))
    assert one.results.table()["sd"][0] == pytest.approx(np.std([0, 0.02], ddof=1))
    assert warnings(one) == []
    assert "(unigram): wide" in texts(warnings(panel(on_two_texts(2.0, 6.5))))


def test_metrics_that_the_first_run_lacks_are_columns():
    runs = [made({"a": 1}, 0, None), made({"a": 1}, 1, 2.0, more={"other": 1.5})]
    assert scores_table(panel(runs)).frame["held-out other"][0] == 1.5
    names = ("bits_per_byte", "other")  # of one unit
    bits = [lab.result.MetricInfo(name=n, unit="bits", digits=i) for i, n in enumerate(names, 1)]
    task = lab.TaskInfo(metrics=tuple(bits))
    table = scores_table(panel([dataclasses.replace(runs[1], task=task)]))
    columns = ["held-out bits", "held-out bits (other)"]
    assert table.frame.iloc[0][columns].tolist() == [2.0, 1.5]
    assert [table.digits[column] for column in columns] == [1, 2]


def test_variants_are_tags_and_the_fields_that_tell_equal_tags_apart(monkeypatch):
    """adamw and lion without a tag of their own: never one row. A tag named as a column stays. A
    module that has moved makes no variant."""
    runs = [
        made({"layout": "standard"}, seed, score, values={"train.optimizer.name": name})
        for name, score in (("adamw", 2.7), ("lion", 2.4))
        for seed in (0, 1)
    ]
    results = lab.Results(runs)
    assert list(results.labels.values()) == ["adamw", "lion"]
    assert list(results.table()["train.optimizer.name"]) == ["lion", "adamw"]
    assert len(results.compare()) == 1
    rates = {"train.optimizer.learning_rate": 0.01, "train.schedule.final_learning_rate": 0.001}
    found = lab.Results([made({"a": 1}, 0, 2.0), made({"a": 1}, 0, 2.1, values=rates)]).labels
    assert sorted(found.values()) == ["learning_rate=0.003", "learning_rate=0.01"]
    named = [made({"p": p, "seeds": "few"}, s, p + 0.1 * s * p) for p in (1, 2) for s in range(3)]
    table = lab.Results(named).table()
    assert table[["p", "seeds (tag)", "seeds"]].values.tolist() == [[1, "few", 3], [2, "few", 3]]
    again = dataclasses.replace(runs[0], spec=dataclasses.replace(runs[0].spec, id="again"))
    with pytest.raises(ValueError, match="'again'"):  # it would count twice
        lab.Results([*runs, again]).table()
    monkeypatch.setattr(lab.Experiment, "_imports", lambda self: [f"/{id(self)}/mine.py"])
    assert len(lab.Results(runs).variants) == 2


def test_tables_have_the_scores_and_the_baselines():
    runs = [*noisy(TWO, [0, 1, 2]), made({"layout": "wide"}, 3, None)]
    rows = {row["variant"]: row for row in scores_table(panel(runs)).frame.to_dict("records")}
    assert list(rows) == ["wide", "standard", "unigram (no model)", "5-gram (no model)"]
    wide = [run.scores.heldout["loss"] for run in runs[3:6]]
    expected = [np.mean(wide), np.std(wide, ddof=1), 3, 1]
    names = ("held-out bits per byte", "standard deviation", "runs", "diverged")
    assert [rows["wide"][name] for name in names] == pytest.approx(expected)
    assert rows["5-gram (no model)"]["held-out bits per byte"] == 2.9
    results = lab.Results(runs)
    found = results.table().iloc[0][["mean", "sd", "seeds", "diverged"]].tolist()
    assert found == pytest.approx(expected)
    assert results.table()["seconds"].tolist() == [2.5, 2.5]  # of those that did not diverge
    assert budget_table(panel(runs)).frame["seconds"].tolist() == [2.5, 2.5]
    assert f"{np.mean(wide):.3f}" in results._repr_html_()
    alone = make_page([panel(runs[:1])])
    assert alone.blocks(Figures) == []
    assert "Nothing to compare. standard: " in texts(alone.head)


def test_budgets_have_measured_seconds_beside_flops():
    """1,000 tokens a second, 8 x 16 tokens a step; 40 steps of 3 forward passes."""
    runs = noisy(TWO, [0])
    row = budget_table(panel(runs)).frame.iloc[1]
    assert (row["parameters"], row["FLOPs per token"]) == (1300, 5200)
    assert float(row["seconds per step"]) == 0.128
    pairs = [dataclasses.replace(r, data=lab.result.DataInfo(row_tokens=32)) for r in runs]
    row = budget_table(panel(pairs)).frame.iloc[1]
    assert float(row["seconds per step"]) == 0.256  # rows of two texts
    assert float(row["training FLOPs"]) == pytest.approx(3 * 5200 * 40 * 8 * 16, rel=5e-3)
    nearly = [made({"v": n}, 0, 2.0, parameters=n) for n in (1000, 1001)]  # were they made equal?
    for some, budget, word in (
        (runs, "", "Not at an equal budget: variants have 1,000 to 1,300"),
        (runs, "parameters", "Not equal, though matched: parameters, of 1,000 to 1,300"),
        (runs, "flops", "flops, of 4,000 to 5,200"),
        (runs, "hours", "Equal for all variants: hours"),
        (nearly, "parameters", "Equal for all variants: parameters"),
    ):
        assert word in " ".join(limits(panel(some, matched=budget)))
    values = {"matched": "flops"}  # as `lab.product(..., match="flops")` leaves it in every run
    runs = [made({"layout": name}, 0, 2.5, values=values) for name in ("standard", "wide")]
    assert read_panels([lab.Results(runs)])[0].about.matched == "flops"


def test_learning_rates_are_compared_on_each_text():
    """Those of a variant are all in its budget."""

    def run(variant, text, rate):
        return made({"v": variant}, 0, 2.0, values={FIRST_RATE: rate}, data=Text(path=text))

    runs = [run(v, text, rate) for text, rate in (("a", 0.003), ("b", 0.012)) for v in (1, 2, 3)]
    assert budget_table(panel(runs)).frame["learning rate"].tolist() == ["0.003, 0.012"] * 3
    assert "rates differ" not in " ".join(limits(panel(runs)))
    assert "rates differ" in " ".join(limits(panel([*runs[:-1], run(3, "b", 0.1)])))


def test_equivalence_needs_a_margin():
    runs = noisy({(("layout", "a"),): 2.0, (("layout", "b"),): 2.0}, range(6), spread=0.001)
    assert list(conclusions(runs).values()) == ["inconclusive"]
    assert list(conclusions(runs, margin=0.05).values()) == ["equivalent"]
    [table] = comparison_table(panel(runs, margin=0.05))
    assert "p outside margin" in table.frame
    [some] = make_page([panel(runs, margin=0.05)]).blocks(Figures)
    assert "inconclusive" not in some.figures[0].caption


def test_seeds_that_were_added_are_judged_at_any_time():
    runs = noisy(CROSSED, range(4))
    assert set(panel(runs).comparisons["method"]) == {"paired t"}
    frame = panel(runs, seeds_added=True, planned_seeds=(0, 1, 2)).comparisons
    found = {(row.over != "", row.method, row.pairs) for row in frame.itertuples()}
    assert found == {(True, "paired t", 3), (False, "anytime", 4)}


def test_seeds_that_are_new_since_a_report_was_written_are_marked(tmp_path):
    """By the report itself; those that were planned and not finished are not new."""

    def added(*parts, name="report.html"):
        """What the page says of these runs."""
        path = lab.report([lab.Results(part) for part in parts], tmp_path / name)
        return re.findall("Seeds ([0-9, ]+) were added", path.read_text())

    workdir = store(noisy(TWO, range(3)), tmp_path / "w")
    add_specs([made({"layout": "wide"}, 3, 2.0).spec], workdir)
    lab.report(workdir, tmp_path / "report.html")
    assert added(noisy(TWO, range(4))) == []
    for _ in range(2):  # the second time, too
        assert added(noisy(TWO, range(5))) == ["4"]
    assert added(noisy(TWO, range(5)), name="other.html") == []  # each page has its own
    wider = [made({"v": 1}, seed, 2.0, values={"model.ffn.width": 16}) for seed in (7, 8)]
    assert added(noisy(TWO, range(6)), wider) == ["4, 5"]  # not 7, 8
    unlike = noisy(TWO, range(5, 9), data=Text(path="another"))
    assert added(unlike) == added(noisy(TWO, range(4)), unlike) == []
    assert added(noisy(TWO, range(5))) == ["4"]
    table = (tmp_path / "tables" / "comparisons.csv").read_text()
    assert next(csv.DictReader(io.StringIO(table)))["method"] == "anytime"


def test_curves_have_all_points_of_all_seeds(tmp_path):
    """A step that was written twice (a kill after the last checkpoint) is one point."""
    results = with_curves(noisy(TWO, [0, 1, 2]), tmp_path)
    path = tmp_path / "runs" / results[0].spec.id / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    one = Panel(results)
    for run in results:
        curve = one.curve(run, "eval/bits_per_byte")
        assert list(curve) == [10, 20, 30, 40]
        assert curve[40] == pytest.approx(run.scores.heldout["bits_per_byte"] + 0.01)
    path.write_text(path.read_text() + '{"step": 50, "eval/bits_per_byte": [1.0]}\n')
    assert one.curve(results[0], "eval/bits_per_byte")[50] == 1.0  # a run that goes on
    [figure] = curves_figures(one)
    assert "16 held-out rows" in figure.caption


def test_curves_that_diverged_and_first_steps_do_not_set_the_range():
    look = style(0, 0)
    sound = Curve("a", look, [1, 100], [[3.0, 3.2], [2.0, 2.4]])
    broken = Curve("b", look, [1, 100], [[3.0], [1e9]], diverged=True)
    axes = learning_curves([sound, broken], "bits").axes[0]
    assert axes.get_ylim()[1] < 10
    assert list(axes.lines[0].get_ydata()) == pytest.approx([3.1, 2.2])
    late = Curve("a", look, [1, 2, 50, 100], [[90.0], [40.0], [2.1], [2.0]])
    low, high = learning_curves([late], "bits").axes[0].get_ylim()
    assert 1.9 < low < high < 2.2  # the range of the last three quarters


def test_expected_results_count_every_seed():
    runs = [made({"v": "a"}, seed, 2.0, more={"heads_apart": float(seed)}) for seed in range(5)]
    expected = Expectation(
        tags={"v": "a"}, relation="at most", value=3.0, number="heads_apart", text="{max:.1f}",
    )  # fmt: skip

    def leads(**changes):
        one = dataclasses.replace(expected, **changes)
        return [p.lead for p in expectations(panel(runs, expectations=(one,), source="a proof"))]

    assert leads() == ["Not as expected:", ""]
    assert leads(value=4.0) == ["As expected:", ""]
    assert leads(tags={"v": "b"}) == ["No result:", ""]
    assert leads(over={"v": "a"}, relation="exactly", value=1.0) == ["As expected:", ""]
    with pytest.raises(ValueError, match="in braces write mean, min, max; ratio needs `over`"):
        dataclasses.replace(expected, text="{ratio}")
    alone = Expectation(tags={}, relation="exactly", value=2.0, text="{mean}")
    [found] = expectations(panel([made({}, 0, 2.0)], expectations=(alone,)))
    assert found.lead == "As expected:"


def rates(tuning, judged=()):
    results = lab.Results(judged or noisy(TWO, [0, 1]))
    [table] = rates_table(Panel(results, tuning=lab.Results(tuning)))
    return table.frame.to_dict("records")


def test_the_rates_of_a_report_are_those_that_tuning_chooses():
    """Also where the parabola is lowest beyond them; and on each text."""
    tuning = tuned((0.6, 0.7, 0.8, 0.3, 0.5))
    [row] = rates(tuning)
    [rate] = lab.best_rates(lab.Results(tuning)).values()
    assert (float(row["best rate"]), row["chosen by"]) == (rate, "best that was tried")
    one = tuned((3.0, 2.0, 3.0), data=Text(path="a"))
    rows = rates([*one, *tuned((6.0, 5.0, 6.0), first=0.008, data=Text(path="b"))])
    assert [row["best rate"] for row in rows] == ["0.004", "0.016"]
    assert len({row["variant"] for row in rows}) == 2


def test_learning_rates_are_those_of_the_validation_part():
    """Of the runs that tuned, not of the judged ones."""
    [row] = rates(tuned((3.0, 2.0, 3.0)), judged=tuned((9.0,), first=0.004))
    assert (row["best rate"], row["chosen by"]) == ("0.004", "parabola")
    assert row["rate: score"] == "0.002: 3.000, 0.004: 2.000, 0.008: 3.000"


def test_rates_without_validation_scores_are_not_judged():
    runs = [
        made({"learning_rate": rate}, 0, score, values={FIRST_RATE: rate})
        for rate, score in ((0.003, 2.5), (3.0, None), (10.0, None), (30.0, None))
    ]
    assert rates_table(panel(runs)) == []


def test_a_number_that_varies_is_an_axis():
    runs = [
        made({"layout": layout, "pairs": pairs}, seed, 2 + pairs / 10 + shift)
        for layout, shift in (("wide", 0.0), ("standard", 0.2))
        for pairs in (4, 8, 16)
        for seed in (0, 1)
    ]
    [figure] = over_tag_figures(panel(runs))
    assert figure.name == "over-pairs"
    for label in ("wide", "standard", "pairs", ">4<", ">8<", ">16<"):
        assert label in figure.svg
    assert over_tag_figures(panel(noisy(CROSSED, [0]))) == []
    named = [made({"tokens/step": n}, 0, 2.0 + n) for n in (1, 2, 4)]
    assert [figure.name for figure in over_tag_figures(panel(named))] == ["over-tokens_step"]


def test_all_text_of_a_themed_figure_follows_the_theme():
    figure, [axes] = new_axes(1)
    for place in ("left", "center", "right"):
        axes.set_title(f"title at {place}", loc=place)
    axes.set(xlabel="steps", ylabel="loss")
    written = re.findall("<text[^>]*>[^<]*", themed_svg(figure, "titles"))
    assert len(written) > 5
    assert all("fill: currentColor" in text for text in written)


def test_every_figure_and_table_is_a_file(tmp_path):
    runs = noisy(CROSSED, [0, 1, 2])
    results = with_curves(runs, tmp_path / "w")
    path = lab.report(results, tmp_path / "out" / "report.html")
    page, text = path.read_text(), path.with_suffix(".md").read_text()
    for folder, ending in (("tables", "csv"), ("figures", "svg")):
        names = {file.stem for file in (path.parent / folder).glob(f"*.{ending}")}
        assert len(names) > 1
        assert all(f"{folder}/{name}.{ending}" in text for name in names)
        assert all(f'id="{name}"' in page for name in names)
    rows = list(csv.DictReader(io.StringIO((path.parent / "results.csv").read_text())))
    assert len(rows) == len(runs)
    assert float(rows[0]["heldout_bits_per_byte"]) == runs[0].scores.heldout["bits_per_byte"]
    table = list(csv.DictReader((path.parent / "tables" / "comparisons.csv").open()))
    expected = Panel(lab.Results(runs)).comparisons
    np.testing.assert_allclose([float(row["low"]) for row in table], expected["low"])
    again = lab.report(results, tmp_path / "again" / "report.html")
    assert again.read_text() == page  # reproducible, and it loads nothing:
    assert not re.search(r'(src|href)="(?!#)', page)


def test_names_are_shown_as_they_are(tmp_path):
    """Labels with markup, in HTML, in Markdown and in figures."""
    names = ("<b>&amp;", "a|b *c*", "_a", r"$\d$")
    runs = noisy({(("name", name),): 2.0 + i for i, name in enumerate(names)}, [0, 1])
    path = lab.report(with_curves(runs, tmp_path / "w"), tmp_path / "report.html")
    for figure in ("curves", "differences"):
        drawn = (tmp_path / "figures" / f"{figure}.svg").read_text()
        assert all(f">{name}</text>" in drawn for name in names[2:])
    assert "&lt;b&gt;&amp;amp;" in path.read_text()
    assert "<b>" not in path.read_text()
    assert r"a\|b \*c\*" in path.with_suffix(".md").read_text()


def test_several_workdirs(tmp_path):
    """Of the same variants: one panel, with both texts or all seeds. Others: a panel each."""
    runs = noisy(TWO, [0, 1])
    first = store(runs, tmp_path / "first")
    elsewhere = {"data": Text(path="another"), "values": {FIRST_RATE: 0.01}}  # tuned on each text
    second = store(noisy(TWO, [0, 1], **elsewhere), tmp_path / "second")
    wider = noisy(TWO, [0, 1], values={"model.ffn.width": 16})
    matched = store(wider, tmp_path / "matched")
    [both] = read_panels([first, second])
    assert len(both.results.texts) == 2
    [seeds] = read_panels([first, lab.Results(noisy(TWO, [2]))])
    assert len(seeds.results.scores()[seeds.results.variant({"layout": "wide"})]) == 3
    again = store(wider, tmp_path / "other" / "first")
    titles = [f"{tmp_path.name}/first", "other/first"]
    assert [p.title for p in read_panels([first, again])] == titles
    repeated = store(runs, tmp_path / "elsewhere" / "again")  # the same sweep on another machine
    assert len(read_panels([first, repeated])) == 2
    for seeds, more, digest, count in (
        ([2, 3, 4], {}, "a", 1),
        ([2, 3, 4], {}, "b", 2),  # as the corpus of another Python
        ([0, 1], elsewhere, "b", 1),
        ([0, 1], elsewhere, "a", 2),  # a copy of the text
    ):
        given = noisy(TWO, [0, 1], sha256="a"), noisy(TWO, seeds, sha256=digest, **more)
        assert len(read_panels([*map(lab.Results, given)])) == count
    page = make_page(read_panels([first, matched]))
    assert "Scores: matched" in {section.title for section in page.sections}
    names = {table.name for table in page.blocks(Table)}
    assert names >= {"comparisons-1", "comparisons-2", "budgets-2"}
    run_folder(first, runs[0].spec).joinpath("result.json").unlink()
    [one] = read_panels([first])
    assert list(one.unfinished) == [runs[0].spec]
    assert runs[0].spec.id in texts(warnings(one))


def test_what_several_workdirs_say_of_their_seeds_and_comparisons(tmp_path):
    """In any order: seeds that one of them added are not planned; other margins stay apart."""
    a, b, c = (
        store(noisy(TWO, range(n), data=Text(path=name)), tmp_path / f"w{n}")
        for name, n in (("a", 3), ("b", 5), ("c", 2))
    )
    Description(seeds_added=True, planned_seeds=(0, 1)).write(b)
    for some in itertools.permutations([a, b, c]):
        [one] = read_panels(some)
        assert (one.about.seeds_added, one.about.planned_seeds) == (True, (0, 1))
        assert "Seeds 2, 3, 4 were added" in texts(warnings(one))
    assert read_panels([a, c])[0].about == Description()
    for about in (
        Description(margin=0.1),
        Description(pairs=(({"layout": "wide"}, {"layout": "standard"}),)),
    ):
        about.write(c)
        assert [len(p.results.texts) for p in read_panels([a, b, c])] == [2, 1]


def test_the_description_and_the_command_come_from_the_workdir(tmp_path):
    workdir = store(noisy(TWO, [0, 1]), tmp_path / "w")
    about = Description(
        question="Which?", pairs=(({"layout": "wide"}, {"layout": "standard"}),),
        planned_seeds=(0, 1), notes=("A note.", "1. A number.", "## A mark."),
        expectations=(Expectation(tags={"a": 1}, relation="exactly", value=1.0, text="{mean}"),),
    )  # fmt: skip
    about.write(workdir)
    assert lab.read_description(workdir) == about
    (workdir / "command.txt").write_text("python -m experiments.sweep --seeds=0,1\n")
    page = make_page(read_panels([workdir]))
    assert page.title == "Which?"
    [facts] = page.blocks(Facts)
    assert dict(facts.items)["Command"] == "python -m experiments.sweep --seeds=0,1"
    assert dict(facts.items)["Seeds"] == "0; 1"
    for note in ("A note.", r"1\. A number.", r"\## A mark."):
        assert f"\n{note}\n" in to_markdown(page)
    assert Description.from_json('{"version": 2}') == Description()


def test_what_cannot_be_reported(tmp_path):
    results = lab.Results([made({"layout": "wide"}, 0, None)])
    for call in (results.table, results.compare, lab.Results([]).table):
        with pytest.raises(ValueError, match="held-out score"):
            call()
    workdir = store(noisy(TWO, [0]), tmp_path / "w")
    page, other = tmp_path / "page.html", tmp_path / "other" / "page.html"
    other.parent.mkdir()
    other.with_name("results.csv").write_text("mine")
    for given, path, baseline, message in (
        (results, tmp_path / "page.md", {}, "page.md"),
        (results, other, {}, "results.csv.* no report wrote"),
        (results, page, {"layout": "narrow"}, "narrow.* names 0 variants"),
        (lab.Results([]), page, {}, "no results"),
        ([workdir, lab.Results([])], page, {}, "no results"),
        (tmp_path / "nowhere", page, {}, "holds no sweep"),
        ([workdir, tmp_path / "w" / ".." / "w"], page, {}, "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.report(given, path, Description(baseline=baseline))
    assert other.with_name("results.csv").read_text() == "mine"
    for file in (next(workdir.glob("runs/*/result.json")), workdir / "specs.json"):
        kept = file.read_text()
        file.write_text(kept[:-9])
        with pytest.raises(ValueError, match=file.name):
            lab.load_results(workdir)
        file.write_text(kept)
    (workdir / "description.json").write_text('{"version": 2,')
    with pytest.raises(ValueError, match="/w/description"):
        lab.report(workdir, page)


def test_heads_are_those_of_the_checkpoint(tmp_path, tmp_path_factory, capsys):
    """One run of a tiny language model: its maps, statistics before and after, and a text."""
    config = experiment(tmp_path_factory, MODEL, train_config(4, every=4))
    spec = lab.RunSpec("tiny", config, 0, {"layout": "standard"})
    results = lab.sweep([spec], tmp_path / "w", executor=lab.InProcess())
    assert "[tiny] complete; 1 of 1 runs finished" in capsys.readouterr().err
    path = lab.report(results, tmp_path / "report.html", heads=True)
    assert (tmp_path / "figures/map-0.svg").exists()
    assert "untrained" in (tmp_path / "tables/heads-0.csv").read_text()
    page = path.read_text()
    assert re.search('<details class="card"( open)?><summary class="caption">standard, ', page)
    assert "map-0" not in lab.report(results, path).read_text()
    shutil.rmtree(results[0].folder / "checkpoints")
    (results[0].folder / "checkpoints").mkdir()
    assert "map-0" not in lab.report(results, path, heads=True).read_text()


def test_maps_and_tables_of_heads_show_their_numbers():
    probs = np.tril(np.random.default_rng(0).uniform(size=(2, 2, 3, 3)))
    values = np.array([[0.5, np.nan], [1.0, 3.0]])
    names = ["layer 0, group 0", "layer 1, group 0"]
    pieces = {"tokens": ["$a", "b", "c"], "source": ["x y", "\n", "\x0c"]}
    seen = Heads(probs, names, pieces, {"first_token": values}, {"first_token": values / 3})
    axes = attention_map(seen).axes
    np.testing.assert_array_equal(axes[2].images[0].get_array(), probs[1, 0])
    assert [t.get_text() for t in axes[2].get_xticklabels()] == ["x·y", "↵", r"\x0c"]
    assert [axes[i].get_title() for i in range(2)] == ["head 0", "head 1"]
    table = statistics_table("a", seen, "heads").frame.set_index("head")["% on first token"]
    assert table.to_list()[:3] == pytest.approx([150, 50, 50])
    assert table["layer 1, group 0, head 1"] == 300
    assert np.isnan(table["layer 0, group 0, head 1"])
