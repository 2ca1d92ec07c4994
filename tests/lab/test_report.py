"""The report: what it says of known scores; variants are never merged; the files it writes."""

import csv
import dataclasses
import io
import re

import numpy as np
import pytest
from attnlab.report.answers import answers, limits, question, warnings
from attnlab.report.expectations import expectations
from made_results import made, noisy, with_curves

from attnlab import lab
from attnlab.lab.policies import tuning_specs
from attnlab.lab.result import MetricInfo
from attnlab.report import (
    Description,
    Expectation,
    Panel,
    make_page,
    read_panels,
)
from attnlab.report.figures import curves_figures, effects_figure, over_tag_figures
from attnlab.report.heads import heads_sections
from attnlab.report.page import Figures, Paragraph, Table, to_markdown
from attnlab.report.tables import comparison_table, rates_blocks, scores_table

CROSSED = {
    (("layout", layout), ("sharing", plan)): mean
    for (layout, plan), mean in {
        ("standard", "separate"): 2.70, ("standard", "albert"): 2.95, ("wide", "separate"): 2.60,
        ("wide", "albert"): 2.85,
    }.items()
}  # fmt: skip
TWO = {(("layout", "standard"),): 2.7, (("layout", "wide"),): 2.5}


def texts(blocks):
    return " ".join(f"{b.lead} {b.text}" for b in blocks if isinstance(b, Paragraph))


def page_text(panels):
    return re.sub(r"\s+", " ", to_markdown(make_page(panels))).replace("\\", "")


def panel(runs, **about):
    return Panel(lab.Results(runs), Description(**about))


def test_an_interval_that_includes_zero_is_inconclusive():
    """The first bold words, too: a lower mean is no better variant."""
    runs = [made({"layout": "standard"}, s, x) for s, x in enumerate((2.7, 2.4, 2.9))]
    runs += [made({"layout": "wide"}, s, x) for s, x in enumerate((2.6, 2.5, 2.7))]
    [answer] = answers(panel(runs))
    assert answer.lead == "Inconclusive (the interval includes zero)."
    assert "wide less standard: −0.067 bits per byte (95 % interval −0.446 to 0.313" in answer.text
    several = noisy({**TWO, (("layout", "narrow"),): 2.7}, [0, 1, 2], spread=1.0)
    [answer] = answers(panel(several))
    assert answer.lead.startswith("Inconclusive: none of 2 variants differs significantly")


def test_a_clear_difference_has_its_interval_in_the_answer():
    runs = noisy(TWO, range(5))
    [answer] = answers(panel(runs))
    assert answer.lead == "wide is better than standard."
    row = lab.Results(runs).compare({"layout": "standard"}).iloc[0]
    interval = f"{row['low']:.3f} to {row['high']:.3f}".replace("-", "−")
    assert interval in answer.text
    [answer] = answers(panel(runs, baseline={"layout": "wide"}))
    assert answer.lead == "standard is worse than wide."


def test_one_run_is_never_the_best():
    text = page_text([panel([made({"layout": "wide"}, 0, 2.5)])])
    assert "best" not in text.lower()
    assert "no other variant to compare it with" in text
    assert "One run: a result, not a comparison." in text


def test_higher_is_better_for_an_accuracy():
    metric = lab.result.MetricInfo(name="accuracy", unit="% right", better="higher", digits=1)
    runs = [
        dataclasses.replace(
            run,
            task=lab.TaskInfo(metrics=(metric,)),
            scores=lab.Scores(heldout={"accuracy": run.scores.heldout["loss"]}),
        )
        for run in noisy({(("layout", "a"),): 50.0, (("layout", "b"),): 90.0}, range(5), 1.0)
    ]
    results = lab.Results(runs)
    assert results.metric == "accuracy"
    assert list(results.table()["layout"]) == ["b", "a"]
    [answer] = answers(Panel(results))
    assert answer.lead == "b is better than a."


def test_averages_over_other_tags_come_first():
    found = answers(panel(noisy(CROSSED, range(4))))
    assert [a.lead for a in found] == [
        "wide is better than standard.",
        "albert is worse than separate.",
        "wide, separate is better than standard, separate.",
    ]
    assert "Means over sharing." in found[0].text
    assert "Holm's correction counts 3 comparisons." in found[2].text


def test_only_the_pairs_of_the_question_are_compared():
    pairs = tuple(
        ({"layout": "wide", "sharing": plan}, {"layout": "standard", "sharing": plan})
        for plan in ("separate", "albert")
    )
    one = panel(noisy(CROSSED, range(4)), pairs=pairs)
    assert [c.family for c in one.comparisons] == [2, 2]
    assert {effect.tag for effect in one.effects} == {"layout"}
    assert "wide, albert (standard, albert)" in texts(answers(one))


def test_equal_tags_with_another_optimizer_are_two_variants():
    """adamw and lion without a tag of their own: never one row, never "another learning rate"."""
    runs = [
        made({"layout": "standard"}, seed, score, values={"train.optimizer.name": name})
        for name, score in (("adamw", 2.7), ("lion", 2.4))
        for seed in (0, 1)
    ]
    results = lab.Results(runs)
    assert list(results.labels.values()) == ["adamw", "lion"]
    table = results.table()
    assert list(table["train.optimizer.name"]) == ["lion", "adamw"]
    assert list(table["seeds"]) == [2, 2]
    text = page_text([Panel(results)])
    assert "less adamw" in text
    assert "correction counts 1 comparison." in text


def test_equal_tags_with_another_rate_are_two_variants():
    rates = {"train.optimizer.learning_rate": 0.01, "train.schedule.final_learning_rate": 0.001}
    runs = [made({"a": 1}, 0, 2.0), made({"a": 1}, 0, 2.1, values=rates)]
    found = lab.Results(runs).labels
    assert [len(variant) for variant in found] == [2, 2]  # one field tells them apart
    assert sorted(found.values())[0].startswith("train.optimizer.learning_rate=0.0")


def test_a_seed_that_would_count_twice_is_refused():
    runs = [made({"layout": "wide"}, 0, 2.0), made({"layout": "wide"}, 0, 2.0)]
    runs[1] = dataclasses.replace(runs[1], spec=dataclasses.replace(runs[1].spec, id="again"))
    with pytest.raises(ValueError, match="'again' are the same variant and seed"):
        lab.Results(runs).table()


def on_text(run, path):
    config = lab.with_values(run.spec.config, {"data.path": path})
    return dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config))


def test_texts_and_seeds_are_both_sources_of_variation(tmp_path):
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    runs = []
    for i, path in enumerate(paths):
        path.write_bytes(b"some text " * 500)
        shifted = {tags: mean + 0.1 * i * (tags[0][1] == "wide") for tags, mean in TWO.items()}
        runs += [on_text(run, str(path)) for run in noisy(shifted, range(3), key=i)]
    results = lab.Results(runs)
    row = results.compare({"layout": "standard"}).iloc[0]
    assert (row["method"], row["texts"], row["seeds"]) == ("t over texts", 3, 9)
    assert row["conclusion"] == "inconclusive"  # over seeds alone it would be clear
    assert results.table()["texts"].tolist() == [3, 3]
    assert any("Texts (3) and seeds" in line for line in limits(Panel(results)))
    assert len(results.labels) == 2
    frame = comparison_table(Panel(results), "differences").frame
    assert [name for name in frame.columns if "interval" in name] == ["95 % interval"]


def test_data_that_no_tag_names_are_reported(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text " * 500)
    runs = noisy(TWO, [0, 1])
    other = [on_text(run, str(path)) if run.spec.tags["layout"] == "wide" else run for run in runs]
    assert "different data: path differ" in texts(warnings(panel(other)))
    assert warnings(panel(runs)) == []
    digests = [dataclasses.replace(r, data=lab.result.DataInfo(sha256=str(i)))
               for i, r in enumerate(runs)]  # fmt: skip
    assert "different data (their digests differ)" in texts(warnings(panel(digests)))


def test_diverged_runs_and_weak_baselines_are_reported():
    runs = [*noisy(TWO, [0, 1]), made({"layout": "wide"}, 2, None), made({"layout": "x"}, 0, 5.0)]
    one = panel(runs)
    text = texts(warnings(one))
    assert "wide diverged with seed 2" in text
    assert "Worse than a baseline without a model (unigram): x." in text
    rows = {cells[0].text: cells for _, cells in scores_table(one, "t").rows}
    assert rows["5-gram (no model)"][1].text == "2.900"
    assert "Every run diverged" in texts(answers(panel([made({"layout": "x"}, 0, None)])))


def test_a_conclusion_among_bad_models_says_so_and_its_warning_comes_first():
    bad = {tags: mean + 3 for tags, mean in CROSSED.items()}  # unigram has 4.7
    one = panel(noisy(bad, range(5)))
    assert all("(unigram). Among them:" in a.lead for a in answers(one))
    head = [b for b in make_page([one]).head if isinstance(b, Paragraph)]
    kinds = [block.kind for block in head]
    assert kinds.index("warning") < kinds.index("answer")
    some = noisy({**CROSSED, next(iter(CROSSED)): 6.0}, range(5))
    assert not any("Among them" in a.lead for a in answers(panel(some)))


def test_differences_of_opposite_signs_are_in_the_conclusion():
    """wide is better on average, and worse under one of the plans."""
    means = dict(zip(CROSSED, (2.70, 2.95, 2.72, 2.60), strict=True))
    found = answers(panel(noisy(means, range(5), spread=0.001)))
    assert found[0].lead.startswith("wide is better than standard.")
    assert "both signs: from −0.35" in found[0].lead
    assert "both signs" not in answers(panel(noisy(CROSSED, range(5))))[0].lead


def test_seeds_that_a_person_adds_after_a_report_are_marked(tmp_path):
    from attnlab.lab.sweep import described

    runs = noisy(TWO, range(3))
    more = [run.spec for run in noisy(TWO, range(5))]
    assert not described(Description(), more, tmp_path / "w").seeds_added  # nothing has run
    store(runs, tmp_path / "w")
    Description().write(tmp_path / "w")
    assert not described(Description(), more, tmp_path / "w").seeds_added  # nobody saw a report
    (tmp_path / "w" / "report.html").touch()
    same = [run.spec for run in runs]
    assert described(Description(), same, tmp_path / "w") == Description()
    about = described(Description(), more, tmp_path / "w")
    assert (about.seeds_added, about.planned_seeds) == (True, (0, 1, 2))
    about.write(tmp_path / "w")
    (tmp_path / "w" / "specs.json").write_text(lab.spec.write_specs(more))
    assert described(Description(), more, tmp_path / "w") == about  # the same command once more
    said = limits(Panel(lab.Results(noisy(TWO, range(5))), about))
    assert any("Seeds 3, 4 were added" in line for line in said)


def test_the_seed_of_tuning_is_none_that_is_added_later():
    """Of two variants with seed 999, up to six seeds each: 1000 to 1004 are added."""
    runs = noisy(TWO, [999])
    [seed] = {spec.seed for spec in tuning_specs([run.spec for run in runs], 3)}
    results, policy = lab.Results(runs), lab.AddSeeds(half_width=0.0, most=6)
    while specs := policy.propose(results):
        results += lab.Results([made(dict(s.tags), s.seed, 2.0 + 0.01 * s.seed) for s in specs])
    seeds = {run.spec.seed for run in results}
    assert len(seeds) == 6
    assert seed not in seeds


def test_equivalence_needs_a_margin():
    runs = noisy({(("layout", "a"),): 2.0, (("layout", "b"),): 2.0}, range(6), spread=0.001)
    assert answers(panel(runs))[0].lead.startswith("Inconclusive")
    [answer] = answers(panel(runs, margin=0.05))
    assert answer.lead == "b and a are equivalent within 0.05 bits per byte."


def test_seeds_that_were_added_are_judged_at_any_time():
    runs = noisy({(("layout", "a"),): 2.0, (("layout", "b"),): 2.1}, range(4))
    assert answers(panel(runs))[0].lead == "b is worse than a."
    assert answers(panel(runs, seeds_added=True))[0].lead == "Inconclusive (too few seeds)."


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
    [figure] = curves_figures(one, "curves")
    assert "same 16 held-out rows" in figure.caption


def test_expected_results_count_every_seed():
    """Of seeds that were added later, too."""
    runs = [made({"v": "a"}, seed, 2.0, more={"heads_apart": float(seed)}) for seed in range(5)]
    expected = Expectation(
        tags={"v": "a"}, relation="at most", value=3.0, number="heads_apart",
        text="heads differ by {max:.1f}",
    )  # fmt: skip
    one = panel(runs, expectations=(expected,), source="a proof")
    missed, source = expectations(one)
    assert missed.lead == "Not as expected:"
    assert missed.text == "heads differ by 4.0 (expected: at most 3)."
    assert "a proof" in source.text
    met = dataclasses.replace(expected, value=4.0)
    assert expectations(panel(runs, expectations=(met,)))[0].lead == "As expected:"
    gone = dataclasses.replace(expected, tags={"v": "b"})
    assert expectations(panel(runs, expectations=(gone,)))[0].lead == "No result:"


def test_learning_rates_are_those_of_the_validation_part():
    runs = [
        made(
            {"layout": "wide", "learning_rate": rate},
            1000,
            2.0,
            values={"train.optimizer.learning_rate": rate},
            validation=2 + abs(np.log2(rate / 0.004)),
        )
        for rate in (0.002, 0.004, 0.008)
    ]
    runs = [
        dataclasses.replace(
            run, scores=lab.Scores(validation={"bits_per_byte": run.scores.validation["loss"]})
        )
        for run in runs
    ]
    one = Panel(lab.Results(noisy(TWO, [0, 1])), tuning=lab.Results(runs))
    table, figures = rates_blocks(one, "rates")
    [row] = table.frame.to_dict("records")
    assert (row["best rate"], row["chosen by"]) == ("0.004", "parabola")
    assert row["rate: score"] == "0.002: 3.000, 0.004: 2.000, 0.008: 3.000"
    assert len(figures.figures) == 1


def test_the_figure_of_effects_has_the_intervals():
    one = panel(noisy(CROSSED, range(4)))
    [figure] = effects_figure([one])
    found = figure.svg
    for label in ("wide − standard (mean)", "albert − separate (mean)", "wide, albert"):
        assert label in found
    assert "standard, separate" in found  # of the axis
    single = panel([made({"layout": "a"}, 0, 2.0), made({"layout": "b"}, 0, 2.1)])
    assert effects_figure([single]) == []  # one seed has no interval


def test_scores_over_a_number_that_varies():
    runs = [
        made({"layout": layout, "pairs": pairs}, seed, 2 + pairs / 10 + shift)
        for layout, shift in (("wide", 0.0), ("standard", 0.2))
        for pairs in (4, 8, 16)
        for seed in (0, 1)
    ]
    [figure] = over_tag_figures(panel(runs), "over")
    assert figure.name == "over-pairs"
    for label in ("wide", "standard", "pairs", ">4<", ">8<", ">16<"):
        assert label in figure.svg
    assert over_tag_figures(panel(noisy(CROSSED, [0])), "over") == []


def test_every_figure_and_table_is_a_file(tmp_path):
    runs = noisy(CROSSED, [0, 1, 2])
    path = lab.report(with_curves(runs, tmp_path / "w"), tmp_path / "out" / "report.html")
    page, text = path.read_text(), path.with_suffix(".md").read_text()
    for kind, folder, ending in ((Table, "tables", "csv"), (Figures, "figures", "svg")):
        files = {file.stem for file in (path.parent / folder).glob(f"*.{ending}")}
        assert files, kind
        assert all(f"{folder}/{name}.{ending}" in text for name in files)
        assert all(f'id="{name}"' in page for name in files)
    rows = list(csv.DictReader(io.StringIO((path.parent / "results.csv").read_text())))
    assert len(rows) == len(runs)
    assert float(rows[0]["heldout_bits_per_byte"]) == runs[0].scores.heldout["bits_per_byte"]
    table = list(csv.DictReader((path.parent / "tables" / "differences.csv").open()))
    expected = lab.Results(runs).compare({"layout": "standard", "sharing": "separate"})
    np.testing.assert_allclose(
        [float(row["low"]) for row in table], expected.sort_values("difference")["low"]
    )
    assert not re.search(r'(src|href)="(?!#)', page)  # it loads nothing
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", page)
    with pytest.raises(ValueError, match="no results"):
        lab.report(lab.Results([]), tmp_path / "empty.html")


def test_names_are_shown_as_they_are(tmp_path):
    """Labels with markup, in HTML and in Markdown."""
    names = ("<b>&amp;", "a|b *c*")
    runs = noisy({(("name", name),): 2.0 + i for i, name in enumerate(names)}, [0, 1])
    path = lab.report(lab.Results(runs), tmp_path / "report.html")
    assert "&lt;b&gt;&amp;amp;" in path.read_text()
    assert "<b>" not in path.read_text()
    assert r"a\|b \*c\*" in path.with_suffix(".md").read_text()


def store(runs, workdir):
    """As a sweep leaves them."""
    from attnlab.lab.run import run_folder
    from attnlab.lab.spec import write_specs

    workdir.mkdir()
    (workdir / "specs.json").write_text(write_specs([run.spec for run in runs]))
    for run in runs:
        folder = run_folder(workdir, run.spec)
        folder.mkdir(parents=True)
        run.write(folder)


def test_several_workdirs(tmp_path):
    """On other texts: one panel with both. With other configs: a panel each."""
    runs = noisy(TWO, [0, 1])
    text = tmp_path / "other.txt"
    text.write_bytes(b"some text " * 500)
    store(runs, tmp_path / "first")
    store([on_text(run, str(text)) for run in runs], tmp_path / "second")
    matched = [
        made(dict(run.spec.tags), run.spec.seed, 2.0, values={"model.ffn.width": 16})
        for run in runs
    ]
    store(matched, tmp_path / "matched")
    [both] = read_panels([tmp_path / "first", tmp_path / "second"])
    assert len(both.results.texts) == 2
    panels = read_panels([tmp_path / "first", tmp_path / "matched"])
    assert [p.title for p in panels] == ["first", "matched"]
    text = page_text(panels)
    assert "Scores: first" in text
    assert "Scores: matched" in text
    (tmp_path / "first" / "runs" / runs[0].spec.id / "result.json").unlink()
    [one] = read_panels([tmp_path / "first"])
    assert list(one.unfinished) == [runs[0].spec.id]
    assert "Not finished" in texts(warnings(one))
    with pytest.raises(ValueError, match="holds no sweep"):
        read_panels([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="the same workdir twice"):
        read_panels([tmp_path / "first", tmp_path / "other" / ".." / "first"])
    (tmp_path / "other").mkdir()
    store(matched, tmp_path / "other" / "first")
    panels = read_panels([tmp_path / "first", tmp_path / "other" / "first"])
    assert [p.title for p in panels] == [str(tmp_path / f) for f in ("first", "other/first")]


def test_scores_of_different_units_have_figures_of_their_own():
    """Bits, of which less is better, beside percents, of which more is."""
    one, other = (
        Panel(lab.Results(noisy(TWO, range(3), key=k)), title=title)
        for k, title in enumerate(("bytes", "texts"))
    )
    percent = MetricInfo(name="accuracy", unit="% of texts right", better="higher")
    runs = [
        dataclasses.replace(
            run,
            task=lab.TaskInfo(metrics=(percent,)),
            scores=lab.Scores(heldout={"accuracy": 10 * run.scores.heldout["loss"]}),
        )
        for run in other.results
    ]
    other = dataclasses.replace(other, results=lab.Results(runs))
    page = make_page([one, other])
    figures = {f.name: f.svg for block in page.blocks(Figures) for f in block.figures}
    for name in ("differences", "score-parameters"):
        assert "bits per byte" in figures[f"{name}-1"]
        assert "texts: " not in figures[f"{name}-1"]
        assert "% of texts right" in figures[f"{name}-2"]
        assert "bytes: " not in figures[f"{name}-2"]
    said = "bits per byte (lower is better) or % of texts right (higher is better) on held-out"
    assert said in page_text([one, other])


def test_the_description_survives_json(tmp_path):
    about = Description(
        question="Which?", pairs=(({"a": 1}, {"a": 2}),), planned_seeds=(0, 1),
        expectations=(Expectation(tags={"a": 1}, relation="exactly", value=1.0, text="{mean}"),),
    )  # fmt: skip
    about.write(tmp_path)
    assert lab.read_description(tmp_path) == about
    assert lab.read_description(tmp_path / "none") == Description()
    with pytest.raises(ValueError, match="version 99"):
        Description.from_json('{"version": 99}')


def test_the_command_writes_the_report(tmp_path):
    from experiments import report

    store(noisy(TWO, [0, 1]), tmp_path / "w")
    assert report.write([tmp_path / "w"]) == tmp_path / "w" / "report.html"
    for workdirs in ([], [tmp_path / "w", tmp_path / "w"]):
        with pytest.raises(ValueError, match="give"):
            report.write(workdirs)


def test_a_notebook_shows_the_table_and_the_figure():
    results = lab.Results(noisy(TWO, range(4)))
    table = results.table()
    assert f"{table['mean'][0]:.3f}" in results._repr_html_()
    assert "<table" in results._repr_html_()


def test_tags_named_like_a_column_keep_their_values():
    runs = [made({"p": p, "seeds": "few"}, s, p + 0.1 * s * p) for p in (1, 2) for s in range(3)]
    results = lab.Results(runs)
    assert results.table()[["p", "seeds (tag)", "seeds"]].values.tolist() == [
        [1, "few", 3],
        [2, "few", 3],
    ]
    row = results.compare({"p": 1}).iloc[0]
    assert row["p (tag)"] == 2
    assert row["p"] < 1
    run = made({"seed": 7, "learning_rate": 0.1}, 0, 1.0)
    row = lab.Results([run]).to_pandas().iloc[0]
    assert (row["seed (tag)"], row["seed"]) == (7, 0)


def test_results_without_scores_say_so(tmp_path):
    results = lab.Results([made({"layout": "wide"}, 0, None)])
    for call in (results.table, lab.Results([]).table):
        with pytest.raises(ValueError, match="no run has a held-out score"):
            call()
    assert results._repr_html_() == repr(results) == "Results of 1 run, 1 variant"
    with pytest.raises(ValueError, match="none of these runs"):
        results.folder_of(made({}, 1, None))
    for path, baseline, message in (
        ("page.md", {}, "page.md is where the Markdown page would be"),
        ("page.html", {"layout": "narrow"}, "'narrow'} names 0 variants"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.report(results, tmp_path / path, Description(baseline=baseline))


def test_statistics_before_training_are_read(tmp_path):
    arrays = dict(probs=np.full((1, 2, 3, 3), 1 / 3), names=["entropy"], rows=2)
    before = {"untrained": np.full((1, 1, 2), 3.0)}
    np.savez(tmp_path / "maps.npz", statistics=np.ones((1, 1, 2)), **arrays, **before)
    results = lab.Results([made({"layout": "wide"}, 0, 2.0)], [tmp_path])
    _, section = heads_sections(Panel(results), "")
    assert "untrained 3.0" in section.blocks[1].figures[0].svg


def test_titles_come_from_the_question():
    assert question([panel(noisy(TWO, [0]), question="Are wide heads better?")]) == (
        "Are wide heads better?"
    )
    assert question([panel(noisy(TWO, [0]))]) == (
        "Which layout has the best held-out bits per byte: standard or wide?"
    )


def test_a_page_of_several_results_is_written(tmp_path):
    results = lab.Results(noisy(CROSSED, [0, 1, 2]))
    path = lab.report([results, results.filter(lambda run: True)], tmp_path / "r.html")
    assert "Differences: results 2" in path.read_text()
