"""`python -m experiments.prune`: gates of a run, beside other ways to choose as many heads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from test_view import SEEDS, run

from attnlab import interpret, training
from attnlab.models import ModelConfig, num_parameters
from experiments.studies.pruning import study as pruning

__all__ = ["run"]


def test_what_cannot_be_pruned_is_told(run, tmp_path):
    (tmp_path / "there").write_text("")
    for words, said in (
        (["--pressures=a"], "error: --pressures=a must be numbers"),
        (["--pressures=-1"], "error: --pressures=-1 must be one or more finite numbers"),
        (["--pressures="], "error: --pressures= must be one or more finite numbers"),
        (["--pressures=1,nan"], "error: --pressures=1,nan must be one or more finite numbers"),
        (["--frozen", "--learning_rate=0.1"], "error: --frozen trains no weights; leave out"),
        (["--learning_rate=0"], "error: --learning_rate=0 must be above 0"),
        (["--gate_rate=nan"], "error: --gate_rate=nan must be above 0 and finite"),
        (["--gate_rate=0"], "error: --gate_rate=0 must be above 0 and finite"),
        (
            ["--learning_rate=1e9", "--steps=12", "--pressures=0.5"],
            "error: the training with pressure 0.5 diverged",
        ),
        (["--rows=100000000"], "error: --rows=100000000 is more than the"),
        ([f"--out={tmp_path / 'there'}"], f"error: {tmp_path / 'there'} exists already"),
        (
            ["--untrained", "--frozen"],
            "error: with --frozen --untrained the initial weights would never be trained",
        ),
    ):
        done = command("experiments.prune", f"--workdir={run[0]}", *words)
        assert done.returncode == 1
        assert done.stderr.startswith(said)


def test_how_it_goes_on(run):
    """At the rate that the run ended with, which its schedule says; untrained as the run."""
    train = json.loads((run[0] / "specs.json").read_text())[0]["config"]["train"]
    was = training.TrainConfig.from_dict(train)
    study = pruning.begin(run[0], SEEDS[1], 40)
    assert study.trains.seeds == (SEEDS[1],)
    rate = training.make_optimizer(study.trains).schedule(39)
    np.testing.assert_allclose(
        rate, training.make_optimizer(was).schedule(was.steps - 1), rtol=1e-6
    )
    again = pruning.begin(run[0], None, 40, untrained=True)
    assert (again.params, again.trains.schedule.name) == (None, was.schedule.name)
    assert again.trains.optimizer.learning_rate == was.optimizer.learning_rate


def test_the_table_says_why_no_model_is_smaller():
    gates = {"heads": [[1.0, 1.0]]}
    row = pruning.Row(0.1, 2, 0, 2.0, {}, {}, gates, why="positions 'alibi': use scale_heads")
    smaller = row._replace(why="", heads=1, parameters=9, small_loss=2.0)
    config = ModelConfig()
    said = "–: no smaller model, since positions 'alibi': use scale_heads\n"
    assert said in pruning.table(config, None, [row, smaller, row], by="layer")
    assert "–" not in pruning.table(config, None, [smaller], by="layer")


@pytest.mark.slow
def test_a_row_by_hand(run):
    """Of a plan cycle:2 of three layers with two heads: 6 uses. Some of them close, some stay."""
    study = pruning.begin(run[0], SEEDS[1], 8, frozen=True)
    whole, (row,) = pruning.at_pressures(study, [0.05], by="layer", rate=1.0, rows=9)
    values = np.asarray(row.gates["heads"])
    assert values.shape == (3, 2)
    assert 0 < row.kept == (values > 0).sum() < 6
    params = jax.tree.map(lambda a: jnp.asarray(a[1]), run[2])
    tokens = jnp.asarray(study.source.heldout(9)["tokens"])
    given = dict(targets=tokens[:, 1:])
    loss = interpret.token_loss(study.config, params, tokens[:, :-1], **given)
    gates = interpret.head_gates(study.config)
    np.testing.assert_allclose(whole, loss({}).mean(), rtol=1e-5)
    np.testing.assert_allclose(row.loss, loss(gates.patch(values)).mean(), rtol=1e-5)
    alone = loss(gates.patch((values > 0).astype(np.float32))).mean()
    np.testing.assert_allclose(row.before["gates"], alone, rtol=1e-5)
    tokens = jnp.asarray(study.source.train(9)["tokens"])
    seen = interpret.token_loss(study.config, params, tokens[:, :-1], targets=tokens[:, 1:])
    order = interpret.ascending_order(interpret.ablation_effects(seen, gates))[: 6 - row.kept]
    gone = np.ones(6, np.float32)
    gone[np.asarray(order)] = 0
    expected = loss(gates.patch(gone.reshape(3, 2))).mean()
    np.testing.assert_allclose(row.before["ablation"], expected, rtol=1e-5)
    assert row.after == {}
    told = pruning.table(study.config, whole, [row], by="layer")
    assert told.splitlines()[1].split()[:4] == ["0.05", *map(str, row[1:3]), f"{row.loss:.4f}"]
    assert f"{num_parameters(study.config):,} parameters" in told
