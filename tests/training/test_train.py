"""A run is a function of its config: seeds, devices, kills and signals change nothing."""

import contextlib
import dataclasses
import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep
from jax.flatten_util import ravel_pytree

from attnlab import heads, training
from attnlab.data import text
from attnlab.models import FFN, Compute, Dropout, ModelConfig, Norm
from attnlab.sharing import Plan
from attnlab.training import FitOptions, optimizers, sharding
from attnlab.training.checkpoint import Checkpoints, WrongCheckpoint
from attnlab.training.interrupts import stop_signals
from attnlab.training.loggers import read_metrics
from attnlab.training.metrics import Recorder
from attnlab.training.objectives import OBJECTIVES

MODEL = ModelConfig(
    width=16, num_layers=2, heads=heads.Standard(num_heads=2), ffn=FFN(width=24), max_len=8
)
CONFIG = training.TrainConfig(
    steps=20,
    batch_size=8,
    length=8,
    seeds=(0, 1, 5),
    schedule=training.ScheduleConfig(warmup_steps=2),
    log_every=5,
    evaluation=training.EvaluationConfig(every=10, batch_size=8, windows=20, curve_windows=8),
    checkpoint_every=5,
)
# Each byte is the last one plus 1 or 2, modulo 9: ln 9 nats without context, ln 2 with it.
TEXT = np.random.default_rng(0).integers(1, 3, 4000).cumsum() % 9 + 97
FLOAT64 = Compute(dtype="float64")
FAST = training.OptimizerConfig(learning_rate=1e-2)


def evaluated(**changes):
    return dataclasses.replace(CONFIG.evaluation, **changes)


SELDOM = dict(log_every=10_000, evaluation=evaluated(every=10_000), checkpoint_every=10_000)
DATASET = text.dataset_of_corpus(text.Corpus("test", TEXT[:3600], TEXT[3600:], ""), CONFIG.length)
OTHER = dataclasses.replace(DATASET, digest="of another text")


def fit(
    folder,
    config=CONFIG,
    model=MODEL,
    devices=1,
    recorder=Recorder,
    objective="causal_lm",
    dataset=DATASET,
):
    folder.mkdir(exist_ok=True)
    options = FitOptions(mesh=sharding.data_mesh(jax.devices()[:devices]))
    with (
        recorder(folder, config.seeds) as records,
        Checkpoints(folder / "checkpoints", say=records.say) as checkpoints,
    ):
        return training.fit(
            model.build(),
            OBJECTIVES.get(objective, objective),
            training.make_optimizer(config),
            config,
            dataset,
            recorder=records,
            checkpoints=checkpoints,
            options=options,
        )


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_it_learns(tmp_path):
    """Nearer to ln 2, all there is to know, than to the ln 9 that needs no context."""
    rare = dict(log_every=5, evaluation=evaluated(every=150), checkpoint_every=150)
    result = fit(tmp_path, dataclasses.replace(CONFIG, steps=150, optimizer=FAST, **rare))
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
    config = dataclasses.replace(CONFIG, **SELDOM)
    together = fit(tmp_path / "all", config, model)
    alone = fit(tmp_path / "5", dataclasses.replace(config, seeds=(5,)), model)
    assert_same_bits(jax.tree.map(lambda a: a[2:], together.state), alone.state)
    assert together.heldout["loss"][2] == alone.heldout["loss"][0]
    assert len(set(together.heldout["loss"])) == 3


@pytest.mark.slow
def test_eight_devices_and_two_parts_are_one_device(tmp_path):
    config = dataclasses.replace(CONFIG, batch_size=16, steps=10, seeds=(0, 5))
    results, losses = [], []
    for devices, parts in ((1, 1), (8, 2)):
        folder = tmp_path / f"{devices}-{parts}"
        config = dataclasses.replace(config, accumulate=parts)
        results.append(fit(folder, config, devices=devices).heldout["loss"])
        rows = read_metrics(folder / "metrics.jsonl")
        losses.append(np.array([r["train/loss"] for r in rows if "train/loss" in r]))
    assert losses[0].shape == (2, 2)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", deep(["masked_lm", "span_corruption"], "masked_lm"))
@pytest.mark.slow
def test_parts_give_the_gradient_of_the_whole_batch(name):
    """The step of plain gradient descent, with targets that fall unevenly on the parts."""
    objective, rng = OBJECTIVES[name], np.random.default_rng(1)
    kind = objective.model_kinds[0]
    model = dataclasses.replace(MODEL, kind=kind, vocab_size=400, max_len=20, compute=FLOAT64)
    if kind == "encoder_decoder":  # it has as many targets in every row, but for padding
        valid = jnp.asarray(rng.random((12, 20)) < 0.6)
        prepare = objective.prepare
        padded = lambda b: b | {"valid": valid[: len(b["tokens"])]}
        objective = objective._replace(prepare=lambda b, key: prepare(padded(b), key))
    optimizer = optax.sgd(1.0)
    batch = {"tokens": jnp.asarray(rng.integers(0, 256, (12, 21)))}

    @jax.jit
    def steps(batch):
        state = training.init_state(model.build(), objective, optimizer, batch, 0)
        grown = jax.tree.map(lambda a: 3.0 * a.astype(jnp.float64), state.params)
        state = state._replace(params=grown)
        step = functools.partial(
            training.train_step, model.build(), objective.smoothed(0.1), optimizer, state, batch, 7
        )
        ends = [step(accumulate=n) for n in (1, 3)]
        changes = [jax.tree.map(jnp.subtract, end.params, grown) for end in ends]
        return [(ravel_pytree(c)[0], end.window_loss) for c, end in zip(changes, ends, strict=True)]

    whole, parts = steps(batch)
    assert_close(parts, whole)


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_a_run_in_float64(tmp_path):
    """Over several log lines."""
    model = dataclasses.replace(MODEL, compute=FLOAT64)
    result = fit(tmp_path, dataclasses.replace(CONFIG, seeds=(0,)), model)
    assert result.state.window_loss.dtype == np.float64


@pytest.mark.slow
def test_training_is_smoothed_and_evaluation_is_not(tmp_path):
    """Half of each target is spread over 256 symbols: no prediction costs less than 3.4 nats."""
    config = dataclasses.replace(
        CONFIG, steps=60, seeds=(0,), optimizer=FAST, label_smoothing=0.5, accumulate=2
    )
    result = fit(tmp_path, config)
    rows = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in r]
    assert rows[-1]["train/loss"][0] > 3.4
    assert max(result.heldout["loss"][0], result.train["loss"][0]) < 3


class Killed(Exception):
    pass


def killing(step, kill):
    """A Recorder that dies when it is to write `step`."""

    class KillingRecorder(Recorder):
        def log_scalars(self, at, values):
            if at == step:
                kill()
            super().log_scalars(at, values)

    return KillingRecorder


MUON = dict(
    optimizer=training.OptimizerConfig(name="muon"),
    schedule=training.ScheduleConfig(name="warmup_stable_decay", warmup_steps=2),
)


def die():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_resume_is_as_if_it_had_never_stopped(tmp_path, capsys):
    """Killed and stopped, of a text in other tokens than bytes; by SIGKILL: tests/lab."""
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.astype(np.uint8).tobytes())
    dataset = text.Text(path=str(path), tokenizer="bpe:270").load(CONFIG.length)
    data = {"dataset": dataset, "model": dataclasses.replace(MODEL, vocab_size=270)}
    config = dataclasses.replace(CONFIG, **MUON)
    whole = fit(tmp_path / "whole", config, **data)
    for step, kill in ((5, terminate), (10, die), (15, terminate)):
        with contextlib.suppress(Killed, training.Stopped):
            fit(tmp_path / "broken", config, recorder=killing(step, kill), **data)
    resumed = fit(tmp_path / "broken", config, **data)
    assert "resuming at step 15" in capsys.readouterr().err
    assert_same_bits(resumed.state, whole.state)
    np.testing.assert_array_equal(resumed.heldout["loss"], whole.heldout["loss"])
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")]
    assert rows[0] == rows[1]


def test_another_run_does_not_go_on(tmp_path):
    """Least of all another plan of equal shapes; the field that differs is named."""
    config = dataclasses.replace(CONFIG, steps=5, evaluation=evaluated(windows=8), seeds=(0,))
    model = dataclasses.replace(MODEL, num_layers=4, sharing="groups:2")
    fit(tmp_path, config, model)
    for changes, field in (
        ({"model": dataclasses.replace(model, sharing="cycle:2")}, "model.plans.layers.attention"),
        ({"model": dataclasses.replace(model, norm=Norm(position="post"))}, "model.norm.position"),
        ({"config": dataclasses.replace(config, optimizer=FAST)}, "optimizer.learning_rate"),
        ({"config": dataclasses.replace(config, seeds=(0, 1))}, "training.seeds"),
        ({"config": dataclasses.replace(config, steps=7)}, "up to step 3"),
        ({"dataset": OTHER}, "source"),
    ):
        with pytest.raises(WrongCheckpoint, match=field):
            fit(tmp_path, **{"config": config, "model": model, **changes})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]
    by_hand = Plan(attention=(0, 0, 1, 1), ffn=(0, 0, 1, 1))  # another name of the plan
    more = dataclasses.replace(config, log_every=2, accumulate=2)
    assert fit(tmp_path, more, dataclasses.replace(model, sharing=by_hand)).step == 5


@pytest.mark.parametrize(
    ("changes", "objective", "field"),
    [
        ({"kind": "encoder"}, "causal_lm", "model.kind"),
        ({"vocab_size": 50}, "causal_lm", "model.vocab_size"),
        ({}, "recall", "values"),
    ],
)
def test_a_model_or_dataset_that_does_not_fit_the_objective(tmp_path, changes, objective, field):
    with pytest.raises(ValueError, match=field):
        fit(tmp_path, model=dataclasses.replace(MODEL, **changes), objective=objective)


@pytest.mark.parametrize("step", [5, 20])
def test_sigterm_saves_and_says_so(tmp_path, step):
    with pytest.raises(training.Stopped, match=f"step {step} of 20"):
        fit(
            tmp_path,
            dataclasses.replace(CONFIG, checkpoint_every=100),
            recorder=killing(step, terminate),
        )
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
    config = dataclasses.replace(
        CONFIG,
        optimizer=training.OptimizerConfig(learning_rate=1e38),
        schedule=training.ScheduleConfig(warmup_steps=0),
        seeds=(3,),
    )
    with pytest.raises(training.NonFiniteLoss, match="seed 3"):
        fit(tmp_path, config)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_decay_is_by_name():
    shapes = jax.eval_shape(MODEL.build().init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    flat = jax.tree_util.tree_flatten_with_path(optimizers.weight_decay_mask(shapes["params"]))[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="."): on for path, on in flat}
    decayed = {name.split(".")[-1] for name, on in names.items() if on}
    assert decayed == {"embedding", "positions", "q", "k", "v", "o", "up", "down"}
    # stacked norm scales are matrices by shape: ndim would decay them
    assert names["layers.attention.norm.scale"] is False


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(seeds=()), "seeds"),
        (dict(seeds=(1, 1)), "seeds"),
        (dict(seeds=(0, -1)), "seeds"),
        (dict(label_smoothing=-0.1), "label_smoothing"),
        (dict(seeds=(0, 2**32)), "4294967296"),
        (dict(steps=2), "schedule.warmup_steps"),
        (dict(accumulate=3), "accumulate 3"),
    ],
)
def test_fields_of_a_training_that_do_not_go_together(fields, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **fields)


def test_devices_must_divide_the_batch():
    with pytest.raises(ValueError, match="batch_size 12"):
        sharding.data_mesh(batch_size=12)
    batch = sharding.shard_batch(
        sharding.data_mesh(batch_size=16), np.arange(32).reshape(2, 16), axis=1
    )
    assert_close(batch.sum(), jnp.asarray(496))
    assert batch.sharding.shard_shape(batch.shape) == (2, 2)
