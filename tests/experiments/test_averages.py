"""Layouts over all plans and plans over all layouts, from arm folders written by hand."""

import itertools
import json

import numpy as np
import pytest
from conftest import assert_close
from scipy import stats
from written_arms import undrawn, write_arm, written

from experiments.reporting import averages, results

__all__ = ["undrawn"]

SCORES = {
    ("wide", "separate"): [2.80, 2.84, 2.79],
    ("wide", "albert"): [3.00, 3.10, 3.02],
    ("standard", "separate"): [2.70, 2.71, 2.73],
    ("standard", "albert"): [2.95, 3.00, 2.90],
}
GAPS = [0.075, 0.115, 0.09]
"""Wide less standard of SCORES, seed by seed, the mean over both plans."""


def write(folder, scores=SCORES, **changes):
    for (layout, plan), losses in scores.items():
        arm = folder / f"{layout}-{plan}"
        write_arm(arm, layout, plan, 0, 1000, heldout_bits_per_byte=losses, **changes)
    return folder


def close(got, expected):
    assert_close(np.array(got), np.array(expected))


def found(*folders):
    return averages.effects(results.read(list(folders)))


def test_a_seed_is_one_observation_its_mean_over_plans(tmp_path):
    heads, plans = found(write(tmp_path))
    assert (heads.pair.a.name, heads.pair.b.name, heads.over) == ("standard", "wide", "plan")
    told = stats.ttest_1samp(GAPS, 0)
    interval = told.confidence_interval(0.95)
    close(heads.pair.fixed[1:5], [np.mean(GAPS), *interval, told.pvalue])
    close(heads.singles, [0.29 / 3, 0.27 / 3])
    assert heads.pair.fixed_p == max(2 * min(told.pvalue, plans.pair.p / 2), told.pvalue)
    assert (plans.pair.a.name, plans.pair.b.name, plans.over) == ("separate", "albert", "layout")
    close(plans.singles, [0.71 / 3, 0.69 / 3])


def test_several_texts_are_averaged_too(tmp_path):
    more = {arm: [x + 1 + 0.1 * (arm[0] == "wide") for x in some] for arm, some in SCORES.items()}
    folders = write(tmp_path / "a"), write(tmp_path / "b", more, sha256="cd34")
    heads, _ = found(*folders)
    close(heads.pair.fixed.mean, np.mean(GAPS) + 0.05)
    assert (heads.pair.fixed.pairs, len(heads.singles)) == (3, 4)
    [both] = averages.together(results.read(list(folders)))
    assert "Averaged over 2 plans and 2 texts, standard over wide by 0.143" in averages.answer(both)


def test_where_more_is_better(tmp_path):
    right = {"name": "accuracy", "unit": "% right", "better": "higher", "digits": 1}
    for (layout, plan), losses in SCORES.items():
        scores = {"heldout_accuracy": losses, "metrics": [right], "curves": False}
        write_arm(tmp_path / f"{layout}-{plan}", layout, plan, 0, 1000, **scores)
    heads, _ = found(tmp_path)
    assert heads.pair.a.name == "wide"
    close(heads.pair.fixed.mean, np.mean(GAPS))
    close(heads.singles, [0.29 / 3, 0.27 / 3])


def test_seeds_that_were_added_later_do_not_count(tmp_path):
    write(tmp_path)
    for layout, plan in SCORES:
        losses = [9.0, 1.0, 5.0 + (layout == "wide")]
        late = {"seeds": [3, 4, 5], "heldout_bits_per_byte": losses}
        write_arm(tmp_path / f"{layout}-{plan}-seeds3-5", layout, plan, 0, 1000, **late)
    assert {len(run.seeds) for run in results.read([tmp_path])[0].complete} == {6}
    heads, _ = found(tmp_path)
    close(heads.pair.fixed.mean, np.mean(GAPS))
    assert heads.pair.fixed.pairs == 3


def test_only_means_of_pairs_that_the_question_names(tmp_path):
    write(tmp_path)
    asked = {"pairs": [["standard · albert", "wide · albert"]], "smallest": 0.5, "limit": 9}
    (tmp_path / results.QUESTION).write_text(json.dumps({"question": asked}))
    [heads] = found(tmp_path)
    assert (heads.over, heads.pair.verdict) == ("plan", "equal within 0.5")
    assert heads.pair.p == heads.pair.fixed.p


def test_there_is_no_mean_where_arms_are_missing_or_alike(tmp_path):
    for gone in SCORES:
        some = {arm: losses for arm, losses in SCORES.items() if arm != gone}
        assert not found(write(tmp_path / "-".join(gone), some))
    whole = write(tmp_path / "whole")
    assert not found(write(tmp_path / "one", dict(itertools.islice(SCORES.items(), 1))))
    assert not found(whole, tmp_path / "one")
    rates = write(tmp_path / "rates", learning_rate=0.01)
    write_arm(rates / "lost", "wide", "ring", 0, 1000, learning_rate=0.1, diverged=True)
    assert not found(rates)


@pytest.mark.usefixtures("undrawn")
def test_the_report_says_it_of_a_text_and_of_all(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", sha256="cd34")
    for text in written(first, second):
        assert text.count("Averaged over 2 plans, standard over wide by 0.093") == 2
        assert text.count("At equal width, 2 texts together. Averaged over 2 plans and 2") == 1
    assert "Not all folders are of the same data" in text
    row = "| standard | wide | 2 plans and 2 texts | **standard is better** | 0.093 |"
    assert row in written(first, second)[0]
