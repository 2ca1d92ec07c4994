"""Gates of a run, beside other ways to choose as many heads."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from test_view import SEEDS, run

from attnlab import interpret, training
from attnlab.models import num_parameters
from experiments.studies.pruning import study as pruning

__all__ = ["run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pressures="], "--pressures="),
        (["--pressures=nan"], "not nan"),
        (["--pressures=0.1,-1"], "--pressures must be 0 or more, not -1"),
        (["--pressures=a"], "'a'"),
        (["--learning_rate=1e9", "--steps=12", "--pressures=0.5"], "pressure 0.5"),
        (["--rows=100000000"], "--rows=100000000"),
        (["--learning_rate=0"], "above 0"),
    ],
)
def test_what_cannot_be_pruned_is_refused(run, flags, named):
    done = command("experiments.studies.pruning", f"--workdir={run[0]}", *flags)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert named in done.stderr


def test_how_it_goes_on(run):
    """At the rate that the run ended with, which its schedule says, or the one that is given."""
    train = json.loads((run[0] / "specs.json").read_text())[0]["config"]["train"]
    was = training.TrainConfig.from_dict(train)
    study = pruning.begin(run[0], SEEDS[1], 40)
    assert study.trains.seeds == (SEEDS[1],)
    rate = training.make_optimizer(study.trains).schedule(39)
    np.testing.assert_allclose(
        rate, training.make_optimizer(was).schedule(was.steps - 1), rtol=1e-6
    )
    other = pruning.begin(run[0], None, 40, learning_rate=0.1)
    assert training.make_optimizer(other.trains).schedule(39) == pytest.approx(0.1)


@pytest.mark.slow
def test_a_row_by_hand(run):
    """Of a plan cycle:2 of three layers with two heads: 6 uses. Some of them close, some stay. Only
    the gates are trained, so other choices end as they began."""
    study = pruning.begin(run[0], SEEDS[1], 8)
    frozen = dataclasses.replace(study.trains.optimizer, frozen=".")
    study = study._replace(trains=dataclasses.replace(study.trains, optimizer=frozen))
    whole, (row,) = pruning.at_pressures(study, [0.05], by="layer", rate=1.0, rows=9)
    values = np.asarray(row["gates"]["heads"])
    assert values.shape == (3, 2)
    assert 0 < row["kept"] == (values > 0).sum() < 6
    params = jax.tree.map(lambda a: jnp.asarray(a[1]), run[2])
    tokens = jnp.asarray(study.source.heldout(9)["tokens"])
    given = dict(targets=tokens[:, 1:])
    loss = interpret.token_loss(study.config, params, tokens[:, :-1], **given)
    gates = interpret.head_gates(study.config)
    np.testing.assert_allclose(whole, loss({}).mean(), rtol=1e-5)
    np.testing.assert_allclose(row["loss"], loss(gates.patch(values)).mean(), rtol=1e-5)
    alone = loss(gates.patch((values > 0).astype(np.float32))).mean()
    np.testing.assert_allclose(row["before"]["gates"], alone, rtol=1e-5)
    tokens = jnp.asarray(study.source.train(9)["tokens"])
    seen = interpret.token_loss(study.config, params, tokens[:, :-1], targets=tokens[:, 1:])
    order = interpret.ascending_order(interpret.ablation_effects(seen, gates))[: 6 - row["kept"]]
    gone = np.ones(6, np.float32)
    gone[np.asarray(order)] = 0
    expected = loss(gates.patch(gone.reshape(3, 2))).mean()
    np.testing.assert_allclose(row["before"]["ablation"], expected, rtol=1e-5)
    assert row["after"]["ablation"] == pytest.approx(row["before"]["ablation"], rel=1e-5)
    told = pruning.table(study.config, whole, [row | {"why": "reason"}], by="layer")
    shown = ["0.05", str(row["kept"]), str(row["between"]), f"{row['loss']:.4f}"]
    assert told.splitlines()[1].split()[:4] == shown
    assert f"{num_parameters(study.config):,} parameters" in told
    assert "reason" in told
