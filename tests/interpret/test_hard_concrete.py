"""Hard-concrete gates: numbers by hand, gates by parameter group, and the smaller model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep
from interpreted_models import TOKENS, config_of, random_params
from scipy.special import expit as sigmoid

from attnlab import interpret
from attnlab.interpret import GatedModel, all_head_gates, gate_values, hard_concrete
from attnlab.models import FFN, Compute, EncoderConfig

ALPHAS = np.array([-4.0, -2.5, -1.0, 0.0, 0.7, 2.3, 2.5, 5.0])


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
    for gates in (hard_concrete([-9, 9], key), gate_values([-9, 9])):
        assert gates.tolist() == [0, 1]  # whole numbers are numbers
    expected = np.where((free > 0) & (free < 1), 1.2 * s * (1 - s) * 1.5, 0)
    np.testing.assert_allclose(slope, expected, rtol=1e-8, atol=1e-12)


def test_draws_are_open_as_often_as_is_said():
    """1e5 draws of each gate: P(z > 0) within four standard errors."""
    count = 100_000
    drawn = np.asarray(jax.jit(hard_concrete)(jnp.tile(ALPHAS, (count, 1)), jax.random.key(0)))
    share = np.asarray(interpret.open_probability(ALPHAS))
    np.testing.assert_allclose(share, sigmoid(ALPHAS + np.log(11) / 1.5), rtol=1e-6)
    mean = interpret.expected_open_share({"a": ALPHAS[:3], "b": ALPHAS[3:]})
    np.testing.assert_allclose(mean, share.mean(), 1e-6)
    error = np.sqrt(share * (1 - share) / count)
    assert (np.abs((drawn > 0).mean(0) - share) < 4 * error).all()
    in_the_end = np.clip(1.2 * sigmoid(ALPHAS) - 0.1, 0, 1)
    np.testing.assert_allclose(gate_values(ALPHAS), in_the_end, atol=1e-6)


class Heads:
    """In the place of a model: gives the gates that its layers would have multiplied."""

    def __init__(self, config):
        self.config = config

    def apply(self, variables, texts, *, patch, deterministic, rngs):
        ones = jnp.ones((len(texts), 2, self.config.heads.num_heads, 1))
        return [patch["heads"](ones, i)[..., 0] for i in range(self.config.num_layers)]


@pytest.mark.parametrize("by", ["layer", "group"])
def test_one_gate_in_all_uses_of_a_head(by):
    config = config_of(num_heads=16, num_layers=5, width=16, sharing="cycle:2")
    gated = GatedModel(Heads(config), all_head_gates(config, by=by))
    alphas = jnp.zeros({"layer": (5, 16), "group": (2, 16)}[by])
    params = {"model": None, "gates": {"heads": alphas}}
    key = lambda n: {"dropout": jax.random.key(n)}
    texts = jnp.ones((3, 2))
    run = lambda **options: np.asarray(gated.apply({"params": params}, texts, **options))
    drawn = run(deterministic=False, rngs=key(0))
    assert (drawn == drawn[:, :1, :1]).all()  # one draw for all texts and tokens
    of_layer = drawn[:, 0, 0]
    same = [[np.array_equal(a, b) for b in of_layer] for a in of_layer]
    slots = np.arange(5) % 2 if by == "group" else np.arange(5)
    assert np.array_equal(same, slots[:, None] == slots)
    assert not np.array_equal(drawn, run(deterministic=False, rngs=key(1)))
    assert (run() == 0.5).all()
    with pytest.raises(ValueError, match="gates are sampled: pass rngs"):
        run(deterministic=False)
    with pytest.raises(ValueError, match="the gates patch heads"):
        gated.apply({"params": params}, texts, patch={"heads": lambda heads, layer: heads})


def test_the_pull_is_the_gradient_of_the_penalty():
    """One step on a loss that feels the gates, as on loss + penalty * open_share; the weights'
    own optimizer sees them alone."""
    gates, rate = {"a": jnp.array([[-1.0, 2.0]]), "b": jnp.array([[0.5]])}, 0.3
    loss = lambda p: jnp.sum(p["model"]["w"] ** 2) + jnp.sum(jnp.sin(p["gates"]["a"])) / 9
    params = {"model": {"w": jnp.array([1.0, 2.0])}, "gates": gates}
    together = interpret.gated_optimizer(optax.sgd(0.5), penalty=0.7, learning_rate=rate)
    whole = lambda g: jnp.sum(jnp.sin(g["a"])) / 9 + 0.7 * interpret.expected_open_share(g)
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


SHUT, HALF, OPEN = -3.0, 0.4, 4.0
ROW = [SHUT, OPEN, HALF, SHUT, OPEN, SHUT]
OTHER = [HALF, SHUT, OPEN, SHUT, HALF, SHUT]
CLOSED = {
    # Every layer of a group has the same gates, which go into its output projection.
    "group": ({"sharing": "albert"}, "group", {"heads": [ROW]}, 3, ()),
    "layer": ({"sharing": "separate"}, "layer", {"heads": [ROW, OTHER]}, 3, ()),
    # Layers of a group differ: heads that are closed in all of them go, the rest stays a patch, and
    # a group that keeps fewer is filled up.
    "uses": (
        {"sharing": "cycle:2", "num_layers": 3}, "layer",
        {"heads": [ROW, [SHUT] * 5 + [OPEN], OTHER]}, 4, ("heads",),
    ),
    "three": (
        {"kind": "encoder_decoder", "encoder": EncoderConfig(num_layers=2), "sharing": "albert"},
        "layer",
        {"heads": [ROW, OTHER], "cross.heads": [ROW, ROW], "encoder.heads": [OTHER, OTHER]},
        4,
        ("heads",),
    ),
}  # fmt: skip


def gated_config(**fields):
    base = {"num_heads": 6, "num_layers": 2, "ffn": FFN(width=0)}
    return config_of(**base | {"compute": Compute(dtype="float64")} | fields)


@pytest.mark.parametrize("case", deep(CLOSED, "uses"))
def test_closed_gates_make_a_smaller_model(case, x64):
    fields, by, alphas, kept, left = CLOSED[case]
    config = gated_config(**fields)
    gates, model, params = all_head_gates(config, by=by), config.build(), random_params(config)
    source = {"source": TOKENS[:, :4]} if config.encoder is not None else {}
    gated = GatedModel(model, gates)
    alphas = {name: jnp.asarray(rows) for name, rows in alphas.items()}
    assert {n: a.shape for n, a in alphas.items()} == {one.name: one.shape for one in gates}
    values = {name: gate_values(a) for name, a in alphas.items()}
    small = interpret.remove_closed_heads(config, params, gates, values)
    got = jax.jit(functools.partial(small.config.build().apply, patch=small.patch))
    both = {"params": {"model": params, "gates": alphas}}
    expected = jax.jit(gated.apply)(both, TOKENS, **source)
    assert_close(got({"params": small.params}, TOKENS, **source).logits, expected.logits)
    assert expected.logits.dtype == np.float64
    assert small.config.heads.num_heads == kept
    assert tuple(small.patch) == left
    sizes = [sum(a.size for a in jax.tree.leaves(tree)) for tree in (small.params, params)]
    assert sizes[0] < sizes[1]


def test_what_cannot_become_smaller_raises(x64):
    config = gated_config()
    gates = all_head_gates(config)
    assert gates == (interpret.head_gates(config),)
    one = np.ones((2, 6))
    one[0, 3] = 0
    with pytest.raises(ValueError, match="no smaller"):
        interpret.remove_closed_heads(config, random_params(config), gates, {"heads": one})
    config = gated_config(kind="encoder_decoder", encoder=EncoderConfig(shares_decoder=True))
    with pytest.raises(ValueError, match="untie_encoder"):
        interpret.remove_closed_heads(config, {}, all_head_gates(config), {})
