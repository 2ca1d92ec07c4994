"""Gates that learn to close: their numbers by hand, one gate in all uses of a slot's head, and the
smaller model that is left."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep

from attnlab import ModelConfig, training
from attnlab.inspect import (
    Gated,
    ablations,
    chance_open,
    close_gates,
    every_gate,
    gate_values,
    gates_of,
    hard_concrete,
    open_share,
    token_loss,
    with_gates,
)
from attnlab.training import tasks
from attnlab.training.sources import text

ALPHAS = np.array([-4.0, -2.5, -1.0, 0.0, 0.7, 2.3, 2.5, 5.0])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_a_draw_and_its_gradient_by_hand(x64):
    """Stretched to -0.1 and 1.1, clipped to 0 and 1, with no gradient where it is clipped."""
    key, alphas = jax.random.key(3), np.repeat(ALPHAS, 40)
    u = np.asarray(jax.random.uniform(key, alphas.shape, jnp.float64, minval=1e-300))
    s = sigmoid((np.log(u / (1 - u)) + alphas) * 1.5)
    free = 1.2 * s - 0.1
    assert min((free < 0).sum(), (free > 1).sum(), ((free > 0) & (free < 1)).sum()) > 50
    run = jax.jit(lambda a: jax.jvp(lambda a: hard_concrete(a, key), (a,), (jnp.ones_like(a),)))
    got, slope = run(jnp.asarray(alphas))
    np.testing.assert_allclose(got, np.clip(free, 0, 1), rtol=1e-9, atol=1e-12)
    expected = np.where((free > 0) & (free < 1), 1.2 * s * (1 - s) * 1.5, 0)
    np.testing.assert_allclose(slope, expected, rtol=1e-8, atol=1e-12)


def test_draws_are_open_as_often_as_is_said():
    """1e5 draws of each: P(z > 0), P(z = 1) and the mean, within four standard errors."""
    count = 100_000
    drawn = np.asarray(jax.jit(hard_concrete)(jnp.tile(ALPHAS, (count, 1)), jax.random.key(0)))
    assert drawn.min() == 0
    assert drawn.max() == 1
    opened = sigmoid(ALPHAS + np.log(11) / 1.5)  # - beta ln(0.1 / 1.1)
    np.testing.assert_allclose(chance_open(ALPHAS), opened, rtol=1e-6)
    np.testing.assert_allclose(open_share({"a": ALPHAS[:3], "b": ALPHAS[3:]}), opened.mean(), 1e-6)
    whole = sigmoid(ALPHAS - np.log(11) / 1.5)
    for share, seen in ((opened, drawn > 0), (whole, drawn == 1)):
        error = np.sqrt(share * (1 - share) / count)
        assert (np.abs(seen.mean(0) - share) < 4 * error).all()
    u = (np.arange(20_000) + 0.5)[:, None] / 20_000
    mean = np.clip(1.2 * sigmoid((np.log(u / (1 - u)) + ALPHAS) * 1.5) - 0.1, 0, 1).mean(0)
    assert (np.abs(drawn.mean(0) - mean) < 4 * drawn.std(0) / np.sqrt(count)).all()


def test_what_a_gate_is_in_the_end():
    expected = np.clip(1.2 * sigmoid(ALPHAS) - 0.1, 0, 1)
    np.testing.assert_allclose(gate_values(ALPHAS), expected, atol=1e-6)
    assert gate_values(jnp.array([-2.398, 2.398])).tolist() == [0, 1]
    assert 0 < gate_values(-2.397) < 1e-3


SAID = ("deterministic",)


class Heads:
    """In the place of a model: gives the gates that its layers would have multiplied."""

    def __init__(self, config):
        self.config = config

    def apply(self, variables, texts, *, edit, deterministic, rngs):
        ones = jnp.ones((len(texts), 2, self.config.num_heads, 1))
        return [edit["heads"](ones, i)[..., 0] for i in range(self.config.num_layers)]


@pytest.mark.parametrize("by", ["layer", "group"])
def test_one_gate_in_all_uses_of_a_head(by):
    config = ModelConfig(num_layers=5, num_heads=16, width=16, plan="cycle:2")
    gated = Gated(Heads(config), every_gate(config, by=by))
    params = {
        "model": None,
        "gates": {"heads": jnp.zeros({"layer": (5, 16), "group": (2, 16)}[by])},
    }
    key = lambda n: {"dropout": jax.random.key(n)}
    texts = jnp.ones((3, 2))
    whole = jax.jit(lambda **o: gated.apply({"params": params}, texts, **o), static_argnames=SAID)
    run = lambda **o: np.asarray(whole(**o))
    drawn = run(deterministic=False, rngs=key(0))
    assert (drawn == drawn[:, :1, :1]).all()  # one draw for all texts and tokens
    of_layer = drawn[:, 0, 0]
    same = [[np.array_equal(a, b) for b in of_layer] for a in of_layer]
    slots = np.arange(5) % 2 if by == "group" else np.arange(5)
    assert np.array_equal(same, slots[:, None] == slots)
    assert not np.array_equal(drawn, run(deterministic=False, rngs=key(1)))
    assert (run() == 0.5).all()
    with pytest.raises(ValueError, match="gates are drawn: give rngs"):
        run(deterministic=False)
    with pytest.raises(ValueError, match="the gates are the edit of heads"):
        gated.apply({"params": params}, texts, edit={"heads": lambda heads, layer: heads})


def test_the_pull_is_the_gradient_of_the_penalty():
    """One step on a loss that feels the gates, as on loss + pressure * open_share; the weights'
    own optimizer sees them alone."""
    gates, rate = {"a": jnp.array([[-1.0, 2.0]]), "b": jnp.array([[0.5]])}, 0.3
    loss = lambda p: jnp.sum(p["model"]["w"] ** 2) + jnp.sum(jnp.sin(p["gates"]["a"])) / 9
    params = {"model": {"w": jnp.array([1.0, 2.0])}, "gates": gates}
    together = with_gates(optax.sgd(0.5), pressure=0.7, rate=rate)
    whole = lambda g: jnp.sum(jnp.sin(g["a"])) / 9 + 0.7 * open_share(g)
    adam = optax.adam(rate)

    @jax.jit
    def both(params):
        updates, _ = together.update(jax.grad(loss)(params), together.init(params), params)
        gates = params["gates"]
        return updates, adam.update(jax.grad(whole)(gates), adam.init(gates), gates)[0]

    updates, expected = both(params)
    assert_close(updates["gates"], expected)
    assert_close(updates["model"]["w"], -params["model"]["w"])
    # Nothing needs b: it closes. Adam's first step is as long as its rate.
    np.testing.assert_allclose(updates["gates"]["b"], -rate, rtol=1e-5)


BASE = dict(
    vocab_size=11, max_len=8, width=12, num_layers=2, num_heads=6, ffn_width=0, dtype="float64"
)
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8]])
SHUT, HALF, OPEN = -3.0, 0.4, 4.0
ROW = [SHUT, OPEN, HALF, SHUT, OPEN, SHUT]
OTHER = [HALF, SHUT, OPEN, SHUT, HALF, SHUT]
CLOSED = {
    # Every use of a slot's head has one gate, which goes into its map: nothing is left beside it.
    "group": (dict(plan="albert"), "group", {"heads": [ROW]}, 3, ()),
    "layer": (dict(plan="separate"), "layer", {"heads": [ROW, OTHER]}, 3, ()),
    "absorbed": (dict(layout="latent_absorbed"), "group", {"heads": [ROW] * 2}, 3, ()),
    # An application's own: what is closed in all of a slot's goes, the rest stays an edit; a slot
    # that keeps fewer is filled up.
    "uses": (dict(plan="cycle:2", num_layers=3), "layer",
             {"heads": [ROW, [SHUT] * 5 + [OPEN], OTHER]}, 4, ("heads",)),
    "groups": (dict(plan="albert", num_kv_heads=3), "group", {"heads": [[SHUT] * 2 + ROW[2:]]}, 2,
               ()),
    "three": (
        dict(kind="encoder_decoder", encoder_layers=2, plan="albert"),
        "layer",
        {"heads": [ROW, OTHER], "cross.heads": [ROW, ROW], "encoder.heads": [OTHER, OTHER]},
        4,
        ("heads",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", deep(CLOSED, "uses"))
def test_closed_gates_make_a_smaller_model(case, x64):
    fields, by, alphas, kept, left = CLOSED[case]
    config = ModelConfig(**BASE | fields)
    gates, model = every_gate(config, by=by), config.build()
    texts = (TOKENS[:, :4], TOKENS) if config.kind == "encoder_decoder" else (TOKENS,)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *texts)["params"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5), shapes)
    gated = Gated(model, gates)
    alphas = {name: jnp.asarray(rows) for name, rows in alphas.items()}
    assert {n: a.shape for n, a in alphas.items()} == {one.name: one.shape for one in gates}
    values = {name: gate_values(a) for name, a in alphas.items()}
    small = close_gates(config, params, gates, values)
    got = jax.jit(functools.partial(small.config.build().apply, edit=small.edit))
    expected = jax.jit(gated.apply)({"params": {"model": params, "gates": alphas}}, *texts)
    assert_close(got({"params": small.params}, *texts), expected)
    assert expected.dtype == np.float64
    assert small.config.num_heads == kept
    assert tuple(small.edit) == left
    sizes = [sum(a.size for a in jax.tree.leaves(tree)) for tree in (small.params, params)]
    assert sizes[0] < sizes[1]


def test_what_cannot_become_smaller_is_refused():
    config = ModelConfig(**BASE)
    gates = every_gate(config)
    assert gates == (gates_of(config),)
    one = np.ones((2, 6))
    one[0, 3] = 0
    with pytest.raises(ValueError, match="nothing would be saved"):
        close_gates(config, {}, gates, {"heads": one})
    config = ModelConfig(**BASE | dict(kind="encoder_decoder", share_encoder=True))
    with pytest.raises(ValueError, match="untie_encoder"):
        close_gates(config, {}, every_gate(config), {})


@pytest.mark.slow
def test_useless_heads_close_and_a_needed_one_stays(monkeypatch):
    """Two chains take turns, so that a byte says something only of the one after the next: ln 9
    nats without attention, ln 2 with it. Of a model that learnt it one head is kept; one writes
    nothing from then on, and one noise. The gates find that out; the weights stay as they are."""
    steps = np.random.default_rng(0).integers(1, 3, (4000, 2))
    bytes_ = (steps.cumsum(0) % 9 + 97).ravel()
    source = text.source_of(text.Corpus("test", bytes_[:7000], bytes_[7000:], ""), 8)
    config = ModelConfig(width=18, num_layers=1, num_heads=3, ffn_width=24, max_len=8)
    trains = training.TrainConfig(
        steps=400, batch_size=32, length=8, seeds=(0,), warmup_steps=5, learning_rate=0.01,
        log_every=50, eval_every=400, checkpoint_every=400, eval_windows=64, curve_windows=64,
    )  # fmt: skip
    one_device = functools.partial(training.shard.data_mesh, jax.devices()[:1])
    monkeypatch.setattr(training.shard, "data_mesh", one_device)
    model, task = config.build(), tasks.TASKS["causal_lm"]
    learnt = training.trial(model, task, trains, source)
    assert learnt.result.heldout["loss"] < 1.2
    params = jax.tree.map(np.array, learnt.params())
    rows = jnp.asarray(source.heldout(64)["tokens"])
    loss = lambda p: token_loss(config, p, rows[:, :-1], targets=rows[:, 1:])
    worth = jax.jit(lambda p: ablations(loss(p), gates_of(config)))
    needed = int(jnp.argmax(worth(params)))
    silent, noisy = (n for n in range(3) if n != needed)
    written = params["layers"]["attention"]["o"][0]
    written[silent], written[noisy] = 0, np.random.default_rng(1).normal(0, 1, written[0].shape)
    params = jax.tree.map(jnp.asarray, params)
    assert worth(params)[0, needed] > 0.3

    gated, pressure = Gated(model, every_gate(config)), 0.3
    still = dataclasses.replace(trains, frozen=".")
    made = training.make_optimizer(still)
    pulled = made._replace(transform=with_gates(made.transform, pressure=pressure, rate=0.05))
    run = training.trial(gated, task, still, source, params=gated.around(params), optimizer=pulled)
    found = run.params()
    assert all(map(np.array_equal, *map(jax.tree.leaves, (found["model"], params))))
    values = np.asarray(gate_values(found["gates"]["heads"]))
    assert values[0, [silent, noisy]].tolist() == [0, 0]
    assert values[0, needed] > 0.98
    # What the run is scored by is the loss alone, of gates that are not drawn.
    edit = gated.edit({"heads": values})
    np.testing.assert_allclose(run.result.heldout["loss"], loss(params)(edit).mean(), rtol=1e-4)
    small = close_gates(config, params, gated.gates, {"heads": values})
    assert small.config.num_heads == 1
    least = token_loss(small.config, small.params, rows[:, :-1], targets=rows[:, 1:])
    np.testing.assert_allclose(least({}), loss(params)(edit), rtol=1e-5)
