"""What a run records and returns, also after a kill or an error behind its last step."""

import dataclasses

import numpy as np
import pytest
from small_runs import CONFIG, DATASET, TEXT, changed, fit

from attnlab.data import text
from attnlab.training import Checkpoints, OptimizerConfig
from attnlab.training.loggers import read_metrics
from attnlab.training.objectives import OBJECTIVES

SHORT = changed(steps=10, seeds=(0, 5), evaluation={"every": 5})


def test_all_points_of_a_curve_are_of_the_same_rows(tmp_path):
    """Of parameters that do not move the score is the same at every step."""
    config = changed(
        SHORT,
        optimizer=OptimizerConfig(learning_rate=1e-12, weight_decay=0.0),
        schedule=dataclasses.replace(CONFIG.schedule, final_learning_rate=0.0),
    )
    result = fit(tmp_path, config)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in r]
    assert [row["step"] for row in rows] == [5, 10]
    np.testing.assert_allclose(rows[0]["eval/loss"], rows[1]["eval/loss"], rtol=1e-6)
    assert np.abs(result.heldout["loss"] - rows[1]["eval/loss"]).min() > 1e-4
    assert result.validation == {}


@pytest.mark.slow
def test_the_whole_validation_part_is_scored_at_the_end(tmp_path):
    """Beside the curve, which is of some of its rows. Here the held-out part is the same text."""
    corpus = text.Corpus("test", TEXT[:3400], TEXT[3400:], "", TEXT[3400:])
    dataset = text.dataset_of_corpus(corpus, 8)
    result = fit(tmp_path, changed(SHORT, evaluation={"windows": 0}), dataset=dataset)
    np.testing.assert_array_equal(result.validation["loss"], result.heldout["loss"])
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (result.validation["loss"] != last["eval/loss"]).all()


def test_an_error_in_a_statistic_after_training_does_not_lose_it(tmp_path, capsys):
    whole = fit(tmp_path / "whole", SHORT)

    def texts(model, params, dataset):
        raise ZeroDivisionError("no words")

    objective = OBJECTIVES["causal_lm"]._replace(final_metrics=texts)
    result = fit(tmp_path / "other", SHORT, objective=objective)
    np.testing.assert_array_equal(result.heldout["loss"], whole.heldout["loss"])
    assert "ZeroDivisionError: no words" in capsys.readouterr().err


def test_seconds_of_a_resumed_run_are_those_of_all_starts(tmp_path):
    """A checkpoint that says that a million seconds were spent, half of them on its steps."""
    config = changed(SHORT, steps=7, seeds=(3,))
    whole = fit(tmp_path / "whole", config)
    with Checkpoints(tmp_path / "whole/checkpoints") as checkpoints:
        step, state, notes = checkpoints.restore()
    assert notes["wall_seconds"] <= whole.wall_seconds
    (tmp_path / "late").mkdir()
    with Checkpoints(tmp_path / "late/checkpoints") as checkpoints:
        spent = {"wall_seconds": 1e6, "busy_seconds": 5e5, "busy_steps": step - 1}
        checkpoints.save(step, state, notes | spent)
    resumed = fit(tmp_path / "late", config)
    assert resumed.wall_seconds > 1e6
    tokens = (step - 1) * 8 * DATASET.row_tokens
    assert resumed.tokens_per_second == pytest.approx(tokens / 5e5, rel=1e-3)
    np.testing.assert_array_equal(resumed.heldout["loss"], whole.heldout["loss"])
