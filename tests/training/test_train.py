"""A run is a function of its config: seeds, devices, kills and signals change nothing."""

import contextlib
import dataclasses
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
from conftest import deep
from small_runs import FAST, MODEL, SELDOM, assert_same_bits, changed, fit

from attnlab import training
from attnlab.data import text
from attnlab.models import Compute, Dropout, Norm
from attnlab.sharing import Plan
from attnlab.training import Checkpoints, OptimizerConfig, Recorder, WrongCheckpoint
from attnlab.training.interrupts import stop_signals
from attnlab.training.loggers import read_metrics
from attnlab.training.objectives import OBJECTIVES


def test_it_learns(tmp_path):
    """Nearer to ln 2, all there is to know, than to the ln 9 that needs no context."""
    config = changed(steps=150, optimizer=FAST, evaluation={"every": 150}, checkpoint_every=150)
    result = fit(tmp_path, config)
    assert (result.heldout["loss"] < 1.2).all()
    assert (result.heldout["loss"] > np.log(2)).all()
    assert (np.abs(result.train["loss"] - result.heldout["loss"]) < 0.1).all()
    assert result.state.step.tolist() == [150] * 3
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows if "train/loss" in r] == list(range(5, 151, 5))


@pytest.mark.parametrize("compiled", deep(["for tests", "as in a run"], "for tests"))
def test_seeds_together_are_the_seeds_alone(tmp_path, compiled, request):
    if compiled == "as in a run":
        request.getfixturevalue("optimized")
    model = dataclasses.replace(MODEL, dropout=Dropout(rate=0.1))
    together = fit(tmp_path / "all", SELDOM, model)
    alone = fit(tmp_path / "5", changed(SELDOM, seeds=(5,)), model)
    assert_same_bits(jax.tree.map(lambda a: a[2:], together.state), alone.state)
    assert together.heldout["loss"][2] == alone.heldout["loss"][0]
    assert len(set(together.heldout["loss"])) == 3


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_a_run_in_float64(tmp_path):
    """Over several log lines."""
    model = dataclasses.replace(MODEL, compute=Compute(dtype="float64"))
    result = fit(tmp_path, changed(seeds=(0,)), model)
    assert result.state.window["loss"].dtype == np.float64


@pytest.mark.slow
def test_training_is_smoothed_and_evaluation_is_not(tmp_path):
    """Half of each target is spread over 256 symbols: no prediction costs less than 3.4 nats."""
    config = changed(steps=60, seeds=(0,), optimizer=FAST, label_smoothing=0.5, accumulate=2)
    result = fit(tmp_path, config)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in r]
    assert rows[-1]["train/loss"][0] > 3.4
    assert max(result.heldout["loss"][0], result.train["loss"][0]) < 3


def killing(step, name, kill):
    """A Recorder that dies when it has written a value of `step`."""

    class KillingRecorder(Recorder):
        def log_scalars(self, at, values):
            super().log_scalars(at, values)
            if at == step and name in values:
                kill()

    return KillingRecorder


def die():
    raise small_runs.Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def moved(initial, params):
    return {"moved": jnp.abs(params["embedding"] - initial["embedding"]).max()}


def test_resume_is_as_if_it_had_never_stopped(tmp_path, capsys):
    """Killed and stopped before the first checkpoint, between metrics and checkpoint, and after the
    last one; of a text in other tokens than bytes. By SIGKILL: tests/lab."""
    path = tmp_path / "text.txt"
    path.write_bytes(small_runs.TEXT.astype(np.uint8).tobytes())
    schedule = training.ScheduleConfig(name="warmup_stable_decay", warmup_steps=2)
    config = changed(optimizer=OptimizerConfig(name="muon"), schedule=schedule)
    given = {
        "config": config,
        "dataset": text.Text(path=str(path), tokenizer="bpe:270").load(small_runs.CONFIG.length),
        "model": dataclasses.replace(MODEL, vocab_size=270),
        "callbacks": [training.measured(moved, every=5)],
    }
    whole = fit(tmp_path / "whole", **given)
    for step, name, kill in (
        (0, "weights/moved", die),
        (5, "train/loss", terminate),
        (10, "eval/loss", die),
        (15, "weights/moved", terminate),
        (20, "weights/moved", die),
    ):
        with contextlib.suppress(small_runs.Killed, training.Stopped):
            fit(tmp_path / "broken", recorder=killing(step, name, kill), **given)
    for last in (15, 20):  # the second time its result was lost
        resumed = fit(tmp_path / "broken", **given)
        assert f"resuming at step {last}" in capsys.readouterr().err
        assert_same_bits(resumed.state, whole.state)
        np.testing.assert_array_equal(resumed.heldout["loss"], whole.heldout["loss"])
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")]
    assert rows[0] == rows[1]
    pairs = [(row["step"], name) for row in rows[1] for name in row if name != "step"]
    assert len(pairs) == len(set(pairs))
    assert {(0, "weights/moved"), (20, "weights/moved"), (20, "eval/loss")} < set(pairs)


def test_another_run_does_not_go_on(tmp_path):
    """Least of all another plan of equal shapes; the field that differs is named."""
    config = changed(steps=5, evaluation={"windows": 8}, seeds=(0,))
    late = training.ScheduleConfig(warmup_steps=8)
    model = dataclasses.replace(MODEL, num_layers=4, sharing="groups:2")
    fit(tmp_path, config, model)
    for changes, field in (
        ({"model": dataclasses.replace(model, sharing="cycle:2")}, "model.plans.layers.attention"),
        ({"model": dataclasses.replace(model, norm=Norm(position="post"))}, "model.norm.position"),
        ({"config": changed(config, optimizer=FAST)}, "optimizer.learning_rate"),
        ({"config": changed(config, seeds=(0, 1))}, "training.seeds"),
        ({"config": changed(config, steps=7)}, "after step 3"),
        ({"config": changed(config, steps=9, schedule=late)}, "training.schedule.warmup_steps"),
        ({"dataset": dataclasses.replace(small_runs.DATASET, digest="of another text")}, "source"),
    ):
        with pytest.raises(WrongCheckpoint, match=field):
            fit(tmp_path, **{"config": config, "model": model, **changes})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]
    by_hand = Plan(attention=(0, 0, 1, 1), ffn=(0, 0, 1, 1))  # another name of the plan
    more = changed(config, log_every=2, accumulate=2)
    assert fit(tmp_path, more, dataclasses.replace(model, sharing=by_hand)).step == 5


@pytest.mark.parametrize(
    ("before", "after", "ends"), [(20, 3, [0, 6, 9, 12, 15, 18, 20]), (4, 10, [0, 4, 10, 20])]
)
def test_log_lines_after_a_resume_with_another_log_every(tmp_path, before, after, ends):
    """Each is the mean of the steps since the last one, also of those before the resume at 5."""
    config, broken = changed(seeds=(0, 5)), tmp_path / "broken"
    fit(tmp_path / "each", changed(config, log_every=1))
    with pytest.raises(small_runs.Killed):
        fit(broken, changed(config, log_every=before), recorder=killing(10, "eval/loss", die))
    fit(broken, changed(config, log_every=after))
    steps, means = train_losses(broken)
    losses = np.array(train_losses(tmp_path / "each")[1])
    assert steps == ends[1:]
    expected = [losses[begin:end].mean(0) for begin, end in itertools.pairwise(ends)]
    np.testing.assert_allclose(means, expected, rtol=1e-5)


def train_losses(folder):
    """(steps, losses of all seeds)"""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]
    return [row["step"] for row in rows], [row["train/loss"] for row in rows]


@pytest.mark.parametrize("step", [5, 20])
def test_sigterm_saves_and_says_so(tmp_path, step):
    recorder = killing(step, "train/loss", terminate)
    with pytest.raises(training.Stopped, match=f"step {step} of 20"):
        fit(tmp_path, changed(checkpoint_every=100), recorder=recorder)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_request_to_stop_is_kept_until_the_outermost_scope_ends():
    with stop_signals() as outer:
        with stop_signals() as inner:
            terminate()
            assert inner() == outer() == 1
        assert outer() == 1
        terminate()
        with pytest.raises(KeyboardInterrupt):
            terminate()
    with stop_signals() as later:
        assert later() == 0


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    huge = OptimizerConfig(learning_rate=1e38)
    config = changed(optimizer=huge, schedule=training.ScheduleConfig(warmup_steps=0), seeds=(3,))
    with pytest.raises(training.NonFiniteLoss, match="seed 3"):
        fit(tmp_path, config)
    assert list((tmp_path / "checkpoints").iterdir()) == []


# What a run records and returns, also after a kill or an error behind its last step.
SHORT = changed(steps=10, seeds=(0, 5), evaluation={"every": 5})


def test_all_points_of_a_curve_are_of_the_same_rows(tmp_path):
    """Of parameters that do not move the score is the same at every step."""
    optimizer = OptimizerConfig(learning_rate=1e-12, weight_decay=0.0)
    schedule = dataclasses.replace(small_runs.CONFIG.schedule, final_learning_rate=0.0)
    result = fit(tmp_path, changed(SHORT, optimizer=optimizer, schedule=schedule))
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in r]
    assert [row["step"] for row in rows] == [5, 10]
    np.testing.assert_allclose(rows[0]["eval/loss"], rows[1]["eval/loss"], rtol=1e-6)
    assert np.abs(result.heldout["loss"] - rows[1]["eval/loss"]).min() > 1e-4
    assert result.validation == {}


@pytest.mark.slow
def test_the_whole_validation_part_is_scored_at_the_end(tmp_path):
    """Beside the curve, which is of some of its rows. Here the held-out part is the same text."""
    train, rest = np.split(small_runs.TEXT, [3400])
    dataset = text.dataset_of_corpus(text.Corpus("test", train, rest, "", rest), 8)
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
    tokens = (step - 1) * 8 * small_runs.DATASET.row_tokens
    assert resumed.tokens_per_second == pytest.approx(tokens / 5e5, rel=1e-3)
    np.testing.assert_array_equal(resumed.heldout["loss"], whole.heldout["loss"])
