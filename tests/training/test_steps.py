"""Facts of a step, of a log line and of the clock that a change of the code must not lose."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab import training
from attnlab.data import text
from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig
from attnlab.training import sharding
from attnlab.training.checkpoint import Checkpoints
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES, Example, Objective
from attnlab.training.step import init_state, train_step

MODEL = ModelConfig(
    width=8, num_layers=1, heads=Standard(num_heads=2), ffn=FFN(width=12), max_len=8
)
TEXT = np.random.default_rng(0).integers(1, 3, 400).cumsum() % 9 + 97
DATASET = text.dataset_of_corpus(text.Corpus("test", TEXT[:300], TEXT[300:], ""), 8)


def config(log_every):
    return training.TrainConfig(
        steps=7, batch_size=8, length=8, seeds=(3,), log_every=log_every, checkpoint_every=5,
        schedule=training.ScheduleConfig(warmup_steps=2),
        evaluation=training.EvaluationConfig(every=100, batch_size=8, windows=8, curve_windows=8),
    )  # fmt: skip


def one_device():
    return training.FitOptions(mesh=sharding.data_mesh(jax.devices()[:1]))


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


def test_a_log_line_is_the_mean_of_the_steps_since_the_last_one():
    """Also the last one, of fewer steps."""
    each, fifth = (
        training.fit_in_memory(
            MODEL.build(), OBJECTIVES["causal_lm"], config(every), DATASET, options=one_device()
        )
        for every in (1, 5)
    )
    steps, losses = each.curve("train/loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    steps, means = fifth.curve("train/loss")
    assert steps.tolist() == [5, 7]
    expected = [losses[0, :5].mean(), losses[0, 5:].mean()]
    np.testing.assert_allclose(means[0], expected, rtol=1e-5)


def test_seconds_of_a_resumed_run_are_those_of_all_starts(tmp_path):
    """A checkpoint that says that a million seconds were spent, half of them on its steps."""

    def fit(folder):
        folder.mkdir(exist_ok=True)
        with (
            Recorder(folder, (3,), speaks=False) as recorder,
            Checkpoints(folder / "checkpoints") as checkpoints,
        ):
            return training.fit(
                MODEL.build(), OBJECTIVES["causal_lm"], training.make_optimizer(config(5)),
                config(5), DATASET, recorder=recorder, checkpoints=checkpoints,
                options=one_device(),
            )  # fmt: skip

    whole = fit(tmp_path / "whole")
    with Checkpoints(tmp_path / "whole/checkpoints") as checkpoints:
        step, state, notes = checkpoints.restore()
    assert notes["wall_seconds"] <= whole.wall_seconds
    late = tmp_path / "late"
    late.mkdir()
    with Checkpoints(late / "checkpoints") as checkpoints:
        spent = {"wall_seconds": 1e6, "busy_seconds": 5e5, "busy_steps": step - 1}
        checkpoints.save(step, state, notes | spent)
    resumed = fit(late)
    assert resumed.wall_seconds > 1e6
    tokens = (step - 1) * 8 * DATASET.row_tokens
    assert resumed.tokens_per_second == pytest.approx(tokens / 5e5, rel=1e-3)
    np.testing.assert_array_equal(resumed.heldout["loss"], whole.heldout["loss"])
