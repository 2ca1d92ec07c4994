"""Looped depth: the task, the budgets, a tiny training, and the published page."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from conftest import ROOT

from attnlab import flops_per_token, lab, num_parameters
from attnlab.lab.result import ModelSizes, Scores
from experiments.studies.looped_depth import analysis, study

ROWS = pandas.read_csv(ROOT / "docs/results/looped_depth.csv")


def test_pointers_are_followed_as_often_as_asked():
    hops = jnp.array([1, 2, 3, 4])
    features, answer = study.batch(jax.random.key(0), 4, hops)
    n = study.NODES
    f = np.argmax(features[..., n : 2 * n], -1)
    for row, count in enumerate(hops):
        at = np.arange(n)
        for _ in range(count):
            at = f[row][at]
        assert answer[row].tolist() == at.tolist()
        assert sorted(f[row].tolist()) == list(range(n))


def test_budgets():
    configs = study.VARIANTS
    parameters = {name: num_parameters(c) for name, c in configs.items()}
    flops = {name: flops_per_token(c, study.NODES) for name, c in configs.items()}
    assert flops["albert, equal FLOPs"] == flops["separate"]
    assert parameters["albert, equal parameters"] == pytest.approx(
        parameters["separate"], rel=0.002
    )
    assert parameters["one layer"] == parameters["albert, equal FLOPs"]


def test_the_page_is_that_of_its_rows():
    assert analysis.page(ROWS) == (ROOT / "docs/results/looped_depth.md").read_text()


def test_the_rate_is_chosen_on_tuning_seeds_alone():
    worse, chosen = ROWS.copy(), analysis.best_rates(ROWS)["separate"]
    assert chosen == 0.006
    worse.loc[~worse.seed.isin(study.TUNING_SEEDS), study.COLUMNS] = 0
    assert analysis.best_rates(worse)["separate"] == chosen
    worse.loc[worse.rate == chosen, study.COLUMNS] = 0
    assert analysis.best_rates(worse)["separate"] != chosen


def test_a_run_that_diverged_has_nothing_right():
    spec = study.spec("one layer", 1e9, seed=3)
    sizes = ModelSizes(parameters=9, applied_parameters=9, flops_per_token=9, ffn_width=4)
    run = lab.RunResult(spec=spec, status="diverged", scores=Scores(), sizes=sizes)
    assert [float(study.row(run)[name]) for name in study.COLUMNS] == [0] * study.HOPS


@pytest.mark.slow
def test_a_tiny_run_trains(tmp_path):
    spec = study.spec("albert, equal FLOPs", 0.01, seed=0, steps=60)
    result = lab.run_one(spec, tmp_path)
    row = study.row(result)
    assert list(row)[4:] == [*study.COLUMNS, "seconds"]
    assert result.scores.heldout["loss"] < 2.5 < np.log(study.NODES)
