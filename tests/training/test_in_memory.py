"""Training in memory leaves nothing behind but its numbers; log lines and callbacks."""

import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL, SELDOM, assert_same_bits, changed, in_memory

from attnlab import training
from attnlab.models import FFN, Decoder, ModelConfig, matrix_axes
from attnlab.training import CALLBACKS, OptimizerConfig, ScheduleConfig
from attnlab.training.step import new_params

SHORT = changed(steps=4, seeds=(0, 5), log_every=2, evaluation={"every": 3}, checkpoint_every=4)


def test_it_leaves_no_file_and_prints_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = in_memory(SHORT)
    assert "".join(capfd.readouterr()) == ""
    assert list(tmp_path.iterdir()) == []
    steps, bits = run.curve("eval/bits_per_byte")
    assert (steps.tolist(), bits.shape) == ([3, 4], (2, 2))
    again = in_memory(changed(SHORT, evaluation={"curve_windows": SHORT.evaluation.windows}))
    last = again.curve("eval/bits_per_byte")[1][:, -1]
    np.testing.assert_array_equal(last, run.result.heldout["bits_per_byte"])
    with pytest.raises(ValueError, match="seed 2"):
        run.params(2)
    with pytest.raises(ValueError, match="eval/bits_per_byte"):
        run.curve("bits_per_byte")
    assert_same_bits(run.params(1), jax.tree.map(lambda a: a[1], run.result.state.params))


def test_seeds_and_runs_of_one_model_share_the_program_of_its_initial_parameters():
    """On one device."""
    config = changed(SELDOM, steps=1, schedule=ScheduleConfig())
    model = ModelConfig(width=20, num_layers=1, ffn=FFN(width=0))  # of no other test
    with mock.patch.object(Decoder, "init", autospec=True, side_effect=Decoder.init) as init:
        for seeds in ((0, 5), (3,)):
            in_memory(changed(config, seeds=seeds), model)
    init.assert_called_once()
    tokens = np.zeros((1, 8), np.int32)
    expected = jax.jit(model.build().init)(jax.random.key(5), tokens)["params"]
    found = new_params(model.build(), 5, {"tokens": tokens})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_callbacks_are_called_in_their_period_log_numbers_and_may_fail():
    """But not at step 0: nothing is lost yet, and the user can correct it."""

    @training.callback(every=3)
    def norm(info):
        info.log("norm", np.abs(info.params["embedding"]).max())

    @training.callback(every=2)
    def broken(info):
        if info.step:
            raise KeyError("a bug")

    calls = []

    @training.callback(every=4)
    def second(info):
        calls.append(info.step)
        if len(calls) % 2 == 0:
            info.log("second", info.step)

    def distance(initial, params):
        return {"moved": jnp.abs(params["embedding"] - initial["embedding"]).max()}

    moved = training.measured(distance, every=3)
    with pytest.warns(RuntimeWarning, match="the callback broken failed") as warned:
        run = in_memory(SHORT, callbacks=[norm, broken, moved, second])
    assert len(warned) == 1
    expected = [np.abs(run.params(i)["embedding"]).max() for i in range(2)]
    assert run.curve("norm")[1][:, -1].tolist() == expected
    np.testing.assert_array_equal(run.curve("second")[1], [[np.nan, np.nan], [0, 4]])
    steps, distances = run.curve("weights/moved")
    assert steps.tolist() == run.curve("norm")[0].tolist() == [0, 3, 4]
    assert (distances[:, 0] == 0).all()
    assert (distances[:, 1:] > 0).all()
    wrong = training.measured(lambda initial, params: {"moved": params["no such part"]}, every=5)
    with pytest.raises(KeyError, match="no such part"):
        in_memory(SHORT, callbacks=[wrong])


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_logs_a_number_of_each_seed(name):
    """At step 0, where the period says so and at the last step; each is finite."""
    callback = CALLBACKS[name]
    run = in_memory(SHORT, callbacks=[callback])
    names = {n for row in run.records for n in row if not n.startswith(("train/", "eval/"))}
    assert names > {"step"}
    for one in names - {"step"}:
        steps, values = run.curve(one)
        assert steps.tolist() == [s for s in range(5) if s % callback.every == 0 or s == 4]
        assert values.shape == (2, len(steps))
        assert np.isfinite(values).all()


@pytest.mark.slow
def test_a_profile_of_some_steps(tmp_path):
    """A trace that holds the steps."""
    in_memory(SHORT, profile=training.Profile(tmp_path, 2, 3))
    assert [p.suffix for p in tmp_path.rglob("*.xplane.pb")] == [".pb"]


def test_it_trains_as_a_run_does():
    """With optimizers that ask which axes are a matrix: layers and heads are none."""
    config = changed(SHORT, optimizer=OptimizerConfig(name="muon"))
    optimizer = training.make_optimizer(config, matrix_axes(MODEL))
    expected = in_memory(config, optimizer=optimizer)
    assert_same_bits(in_memory(config).params(0), expected.params(0))
