"""A training that is killed or has an error after its last step is not lost, nor counted twice."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from test_train import CONFIG, DATASET, MODEL, TEXT, Killed, assert_same_bits, evaluated

from attnlab import training
from attnlab.data import text
from attnlab.training import Checkpoints, FitOptions, OptimizerConfig, Recorder, measured
from attnlab.training.loggers import read_metrics
from attnlab.training.objectives import OBJECTIVES

SHORT = dataclasses.replace(
    CONFIG, steps=10, seeds=(0, 5), evaluation=evaluated(every=5), checkpoint_every=5
)


def distance(initial, params):
    """Of an embedding from where it began."""
    return {"moved": jnp.abs(params["embedding"] - initial["embedding"]).max()}


def fit(
    folder,
    config=SHORT,
    recorder=Recorder,
    objective=OBJECTIVES["causal_lm"],
    dataset=DATASET,
    **options,
):
    folder.mkdir(exist_ok=True)
    with (
        recorder(folder, config.seeds) as records,
        Checkpoints(folder / "checkpoints", say=records.say) as checkpoints,
    ):
        return training.fit(
            MODEL.build(),
            objective,
            training.make_optimizer(config),
            config,
            dataset,
            recorder=records,
            checkpoints=checkpoints,
            options=FitOptions(**options),
        )


def killed_after(step, name):
    """A Recorder that dies when it has written this value."""

    class KilledRecorder(Recorder):
        def log_scalars(self, at, values):
            super().log_scalars(at, values)
            if at == step and name in values:
                raise Killed

    return KilledRecorder


@pytest.mark.slow
def test_each_metric_is_recorded_once_whenever_the_run_is_killed(tmp_path):
    """Before the first checkpoint, and between the last one and the result."""
    whole = fit(tmp_path / "whole", callbacks=[measured(distance, every=5)])
    for step, name in ((0, "weights/moved"), (10, "eval/loss"), (10, "weights/moved")):
        with contextlib.suppress(Killed):
            fit(
                tmp_path / "killed",
                recorder=killed_after(step, name),
                callbacks=[measured(distance, every=5)],
            )
    again = fit(tmp_path / "killed", callbacks=[measured(distance, every=5)])
    assert_same_bits(again.state, whole.state)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert rows[0] == rows[1]
    pairs = [(row["step"], name) for row in rows[1] for name in row]
    pairs = [pair for pair in pairs if pair[1] != "step"]
    assert len(pairs) == len(set(pairs))


def test_all_points_of_a_curve_are_of_the_same_rows(tmp_path):
    """Of parameters that do not move the score is the same at every step."""
    config = dataclasses.replace(
        SHORT,
        optimizer=OptimizerConfig(learning_rate=1e-12, weight_decay=0.0),
        schedule=dataclasses.replace(SHORT.schedule, final_learning_rate=0.0),
    )
    result = fit(tmp_path, config)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in r]
    assert [row["step"] for row in rows] == [5, 10]
    np.testing.assert_allclose(rows[0]["eval/loss"], rows[1]["eval/loss"], rtol=1e-6)
    assert np.abs(result.heldout["loss"] - rows[1]["eval/loss"]).min() > 1e-4


@pytest.mark.slow
def test_the_whole_validation_part_is_scored_at_the_end(tmp_path):
    """Beside the curve, which is of some of its rows. Here the held-out part is the same text."""
    corpus = text.Corpus("test", TEXT[:3400], TEXT[3400:], "", TEXT[3400:])
    dataset = text.dataset_of_corpus(corpus, 8)
    config = dataclasses.replace(SHORT, evaluation=evaluated(every=5, windows=0))
    result = fit(tmp_path / "both", config, dataset=dataset)
    np.testing.assert_array_equal(result.validation["loss"], result.heldout["loss"])
    last = read_metrics(tmp_path / "both" / "metrics.jsonl")[-1]
    assert (result.validation["loss"] != last["eval/loss"]).all()
    assert fit(tmp_path / "none").validation == {}


def test_an_error_in_a_statistic_after_training_does_not_lose_it(tmp_path, capsys):
    whole = fit(tmp_path / "whole")

    def texts(model, params, dataset):
        raise ZeroDivisionError("no words")

    objective = OBJECTIVES["causal_lm"]._replace(final_metrics=texts)
    result = fit(tmp_path / "other", objective=objective)
    np.testing.assert_array_equal(result.heldout["loss"], whole.heldout["loss"])
    assert "ZeroDivisionError: no words" in capsys.readouterr().err


def test_an_error_in_a_statistic_at_step_0_is_raised(tmp_path):
    """Nothing is lost yet, and the user can correct it."""

    def measure(initial, params):
        return {"moved": params["no such part"]}

    with pytest.raises(KeyError, match="no such part"):
        fit(tmp_path, callbacks=[measured(measure, every=5)])
