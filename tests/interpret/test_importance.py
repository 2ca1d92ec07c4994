"""Gates, ablation and pruning: against one call at a time, per application and per slot."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from interpreted_models import config_of, random_params

from attnlab import interpret
from attnlab.interpret import HeadGates, ablation_effects, head_gates, mean_heads, token_loss
from attnlab.models import EncoderConfig, OutputHead

CONFIG = config_of(num_heads=2, sharing="cycle:2")
TOKENS = jnp.asarray([[4, 1, 7, 2, 2, 0], [10, 3, 5, 6, 1, 8], [1, 1, 4, 3, 9, 9]])
WEIGHTS = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])


@functools.cache
def case():
    """(params, loss of an edit, mean loss of gates [L, N] by the model's own head_mask)."""
    params = random_params(CONFIG)
    loss = token_loss(CONFIG, params, TOKENS[:, :-1], targets=TOKENS[:, 1:], weights=WEIGHTS)
    apply = functools.partial(jax.jit(CONFIG.build().apply), {"params": params}, TOKENS[:, :-1])

    def by_hand(gate):
        logits = np.asarray(apply(head_mask=gate).logits, np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = -np.take_along_axis(logs, np.asarray(TOKENS)[:, 1:, None], axis=2)[..., 0]
        return (each * WEIGHTS).sum(1) / np.asarray(WEIGHTS).sum(1)

    return params, loss, by_hand


def spread(by, gate):
    return np.asarray(gate)[list(head_gates(CONFIG, by=by).rows)]


@pytest.mark.parametrize("by", deep(["layer", "group"], "group"))
def test_one_head_at_a_time(by):
    _, loss, by_hand = case()
    gates = head_gates(CONFIG, by=by)
    assert gates.shape == {"layer": (3, 2), "group": (2, 2)}[by]
    whole, got = by_hand(np.ones((3, 2))).mean(), jax.jit(lambda: ablation_effects(loss, gates))()
    felt = jax.jit(lambda: interpret.head_importance(loss, gates))()
    for place in np.ndindex(gates.shape):
        gate = np.ones(gates.shape)
        gate[place] = 0
        np.testing.assert_allclose(got[place], by_hand(spread(by, gate)).mean() - whole, atol=1e-5)
        step = 3e-3
        two = []
        for sign in (1, -1):
            gate[place] = 1 + sign * step
            two.append(by_hand(spread(by, gate)))
        slope = np.abs((two[0] - two[1]) / (2 * step)).mean()
        np.testing.assert_allclose(felt[place], slope, rtol=1e-2, atol=2e-4)


def test_what_stands_in_the_place_of_a_head():
    params, loss, _ = case()
    model, gates = CONFIG.build(), head_gates(CONFIG)

    def of_one(instead):
        place = lambda a, layer: jnp.where(layer == 1, a.at[:, :, 0].set(instead[1][:, :, 0]), a)
        return jnp.mean(loss({"heads": place})) - jnp.mean(loss({}))

    @jax.jit
    def run(params):
        outputs = model.apply({"params": params}, TOKENS[:, :-1], capture=("heads",))
        heads = outputs.captured["heads"]
        values = mean_heads(heads, WEIGHTS), interpret.resampled_heads(heads)
        found = jnp.stack([ablation_effects(loss, gates, one) for one in values])
        return heads, values[0], found, jnp.stack([of_one(one) for one in values])

    heads, mean, found, expected = map(np.asarray, run(params))
    np.testing.assert_allclose(found[:, 1, 0], expected, atol=1e-5)
    assert_close(mean[0, 0, 0], heads[0][np.asarray(WEIGHTS, bool)].mean(0))
    assert not np.allclose(*found, atol=1e-3)
    np.testing.assert_array_equal(interpret.resampled_heads(heads, 1), heads[:, [1, 2, 0]])
    with pytest.raises(ValueError, match="of 1 texts for its own replacement"):
        interpret.resampled_heads(heads[:, :1])
    with pytest.raises(ValueError, match="shift 3 takes each of 3 texts for its own replacement"):
        interpret.resampled_heads(heads, 3)
    with pytest.raises(ValueError, match=r"mask \(1, 5\) must be \(3, 5\)"):
        mean_heads(heads, WEIGHTS[:1])
    assert mean_heads(jnp.ones((1, 2, 40_000, 1, 1), jnp.float16)).item() == 1


def test_weights_of_a_loss_are_relative_and_targets_are_checked():
    params, loss, _ = case()
    given = CONFIG, params, TOKENS[:, :-1]
    targets = TOKENS[:, 1:]
    ignored = jnp.where(WEIGHTS == 0, -100, targets)
    small = token_loss(*given, targets=ignored, weights=0.1 * WEIGHTS)
    assert_close(*jax.jit(lambda: (small({}), loss({})))())
    for changes, message in (
        ({"targets": ignored}, r"target -100 at \[1, 3\] is out of range"),
        ({"targets": TOKENS}, r"targets \(3, 6\) must be \(3, 5\), one for each token"),
        ({"targets": targets, "weights": jnp.ones(5)}, r"weights \(5,\) must be \(3, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            token_loss(*given, **changes)
    hidden = dataclasses.replace(CONFIG, output=OutputHead(kind="none"))
    with pytest.raises(ValueError, match=r"output\.kind='none' has no logits"):
        token_loss(hidden, *given[1:], targets=targets)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 1, 3], [1, 2, 3, 4]])
def test_an_order_holds_every_head_once(order):
    gates = HeadGates("heads", (0,), 4)
    with pytest.raises(ValueError, match="must hold each of the 4 heads once, as 0 to 3"):
        interpret.pruning_curve(lambda patch: jnp.zeros(2), gates, np.array(order))


def test_counts_that_remove_nothing_or_more_than_all():
    gates, rest = HeadGates("heads", (0,), 4), {"key": jax.random.key(0), "count": 0}
    loss = lambda patch: jnp.zeros(2)
    curves = interpret.compare_pruning_orders(loss, gates, {"one": jnp.arange(4)}, **rest)
    assert (curves.by_order["one"].shape, curves.random.shape) == ((5,), (0, 5))
    with pytest.raises(ValueError, match=r"loss \(\) must be \[B\], one number for each text"):
        interpret.head_importance(lambda patch: jnp.zeros(()), gates)
    with pytest.raises(ValueError, match="count is 0"):
        interpret.compare_pruning_orders(loss, gates, {}, **rest)
    assert interpret.least_important(np.ones((2, 3)), 0) == {0: [], 1: []}
    for count in (-1, 4):
        with pytest.raises(ValueError, match=f"count is {count}; a row has 0 to 3 heads"):
            interpret.least_important(np.ones((2, 3)), count)


def test_a_greedy_order_has_every_head_where_losses_are_infinite():
    gates = HeadGates("heads", (0,), 4)

    def loss(patch):
        kept = jnp.sum(patch["heads"](jnp.ones((1, 1, 4, 1)), 0))
        return jnp.where(kept < 3, jnp.inf, -kept)[None]

    order, curve = interpret.greedy_order(loss, gates)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert curve.tolist() == [-4, -3, np.inf, np.inf, np.inf]


@pytest.mark.slow
def test_curves_beside_random_orders():
    _, loss, by_hand = case()
    gates = head_gates(CONFIG, by="group")

    @jax.jit
    def run():
        order = interpret.ascending_order(ablation_effects(loss, gates))
        greedy, curve = interpret.greedy_order(loss, gates)
        orders = {"once": order, "greedy": greedy}
        rest = {"key": jax.random.key(0), "count": 5}
        curves = interpret.compare_pruning_orders(loss, gates, orders, **rest)
        return order, greedy, curve, curves, interpret.pruning_curve(loss, gates, order)

    order, greedy, curve, curves, alone = run()
    assert_close(curves.by_order["greedy"], curve)
    assert_close(curves.by_order["once"], alone)
    gate, mean_loss = np.ones(4), lambda a: by_hand(spread("group", a.reshape(2, 2))).mean()
    for step, head in enumerate(np.asarray(greedy)):
        np.testing.assert_allclose(curve[step], mean_loss(gate), rtol=1e-5)
        left = {n: mean_loss(gate - np.eye(4)[n]) for n in np.flatnonzero(gate)}
        assert min(left, key=left.get) == head
        gate[head] = 0
    assert sorted(np.asarray(order)) == [0, 1, 2, 3]
    random = np.asarray(curves.random)
    assert random.shape == (5, 5)
    assert len({tuple(row) for row in random}) > 1
    # All begin with every head and end with none.
    assert np.ptp(np.r_[random[:, 0], curve[0]]) < 1e-5
    assert np.ptp(np.r_[random[:, -1], curve[-1]]) < 1e-5


def test_heads_of_an_encoder_decoder():
    encoder = EncoderConfig(num_layers=2, num_heads=3, sharing="separate")
    config = config_of(
        num_heads=2, kind="encoder_decoder", sharing="albert", encoder=encoder, head_dim=4
    )
    assert head_gates(config, "cross.heads", by="group") == HeadGates("cross.heads", (0, 0, 0), 2)
    assert head_gates(config, "encoder.heads", by="group") == HeadGates("encoder.heads", (0, 1), 3)
    with pytest.raises(ValueError, match=r"has no 'cross\.heads'"):
        head_gates(CONFIG, "cross.heads")
