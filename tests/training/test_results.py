"""What a run records and returns, also after a kill or an error behind its last step."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import CONFIG, DATASET, TEXT, Killed, assert_same_bits, changed, fit

from attnlab.data import text
from attnlab.training import (
    Checkpoints,
    OptimizerConfig,
    Recorder,
    init_state,
    measured,
    train_step,
)
from attnlab.training.loggers import read_metrics
from attnlab.training.objectives import OBJECTIVES, Example, Objective

SHORT = changed(steps=10, seeds=(0, 5), evaluation={"every": 5})


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

    def distance(initial, params):
        return {"moved": jnp.abs(params["embedding"] - initial["embedding"]).max()}

    calls = [measured(distance, every=5)]
    whole = fit(tmp_path / "whole", SHORT, callbacks=calls)
    for step, name in ((0, "weights/moved"), (10, "eval/loss"), (10, "weights/moved")):
        with contextlib.suppress(Killed):
            killed = killed_after(step, name)
            fit(tmp_path / "killed", SHORT, recorder=killed, callbacks=calls)
    again = fit(tmp_path / "killed", SHORT, callbacks=calls)
    assert_same_bits(again.state, whole.state)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert rows[0] == rows[1]
    pairs = [(row["step"], name) for row in rows[1] for name in row if name != "step"]
    assert len(pairs) == len(set(pairs))


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


class Noise:
    """Its prediction for row i is w_i times the noise of a dropout key."""

    def init(self, key, rows):
        return {"params": {"w": jnp.ones(4)}}

    def apply(self, variables, rows, *, deterministic=True, rngs=None):
        noise = jax.random.normal(rngs["dropout"]) if rngs else 1.0
        return types.SimpleNamespace(logits=variables["params"]["w"][rows] * noise, losses={})


def test_parts_of_an_accumulated_step_have_dropout_of_their_own():
    """A step of SGD moves w_i by the noise of the part that row i is in."""
    objective = Objective(
        lambda batch, key, /, sizes=None: Example(batch, batch["rows"], jnp.ones(4)),
        "noise", ("encoder",), (), ("rows",), loss=lambda found, targets, smoothing=0.0: found,
    )  # fmt: skip
    batch, sgd = {"rows": jnp.arange(4)}, optax.sgd(1.0)
    state = init_state(Noise(), objective, sgd, batch, 0)
    for parts in (1, 2, 4):
        moved = train_step(Noise(), objective, sgd, state, batch, 0, accumulate=parts)
        assert len(np.unique(moved.params["w"])) == parts
