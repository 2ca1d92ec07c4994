"""Recall by head_dim: a short training, the fitted curve, and the published page."""

import numpy as np
import pandas
import pytest
from conftest import ROOT

from experiments.studies.recall import analysis, study

ROWS = pandas.read_csv(ROOT / "docs/results/recall.csv")


def test_one_layer_learns_to_recall():
    found = study.run_one(num_heads=4, head_dim=8, pairs=4, seed=0, steps=150)
    assert found["recalled"] > 0.6  # a guess is right in 1 of 4


def test_the_logistic_curve_is_recovered():
    dims, count = (np.tile(x, 20) for x in ([2, 2, 4, 8], [1, 8, 2, 16]))
    pairs = np.repeat([4, 8, 16, 32, 64], 16)
    z = 1 - 2 * np.log(pairs) + 3 * np.log(dims) + 0.5 * np.log(count)
    right = 1 / pairs + (1 - 1 / pairs) / (1 + np.exp(-z))
    found = analysis.fitted(pairs, dims, count, right)
    assert found == pytest.approx([1, -2, 3, 0.5], abs=0.1)


def test_the_page_is_that_of_its_rows():
    assert analysis.page(ROWS) == (ROOT / "docs/results/recall.md").read_text()
