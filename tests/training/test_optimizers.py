"""Optimizers against optax and numbers by hand: rates, decay, clipping, frozen weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep
from optax import contrib

from attnlab import heads, models
from attnlab.training import OPTIMIZERS, SCHEDULES, OptimizerConfig, ScheduleConfig, TrainConfig
from attnlab.training.config import make_optimizer
from attnlab.training.optimizers import axes_by_shape

OPTIMIZER = OptimizerConfig(learning_rate=0.5, clip_norm=0.0)
SCHEDULE = ScheduleConfig(final_learning_rate=0.1, warmup_steps=3)
LINEAR = dataclasses.replace(SCHEDULE, name="linear")
CONSTANT = ScheduleConfig(name="constant", warmup_steps=0)
# Three groups of projections with heads, one plain matrix, a table, biases and scales: their shapes
# and the axes of their matrices.
WEIGHTS = {
    "layers": {
        "q": ((3, 4, 2, 5), (1, 2)),
        "o": ((3, 2, 5, 4), (2, 1)),
        "chunks": ((3, 2, 4, 6), (1, 1)),
        "q_bias": ((3, 2, 5), (0, 2)),
        "norm": {"scale": ((3, 4), (0, 1))},
    },
    "pooler": ((4, 6), (1, 1)),
    "embedding": ((7, 4), (1, 1)),
}
is_weight = lambda a: isinstance(a, tuple)


def random(seed, weights=WEIGHTS):
    rng = np.random.default_rng(seed)
    draw = lambda pair: jnp.asarray(rng.normal(size=pair[0]), jnp.float32)
    return jax.tree.map(draw, weights, is_leaf=is_weight)


def axes(params):
    """Those of WEIGHTS, with holes where `params` has them."""
    flat = dict(jax.tree_util.tree_flatten_with_path(WEIGHTS, is_leaf=is_weight)[0])
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[path][1], params)


def made(name, schedule=SCHEDULE, axes=axes, **fields):
    if name == "adam":
        fields = {"weight_decay": 0.0} | fields
    optimizer = dataclasses.replace(OPTIMIZER, name=name, **fields)
    return make_optimizer(TrainConfig(steps=10, optimizer=optimizer, schedule=schedule), axes)


def updates(optimizer, params, grads):
    """What the transform makes of a list of gradients, the weights as they are."""
    state, found = optimizer.transform.init(params), []
    step = jax.jit(lambda g, state: optimizer.transform.update(g, state, params))
    for g in grads:
        update, state = step(g, state)
        found.append(update)
    return found


STEPS = np.arange(10)
POINTS = {
    "cosine": lambda s: 0.1 + 0.4 * (1 + np.cos(np.pi * (s - 3) / 7)) / 2,
    "linear": lambda s: 0.5 - 0.4 * (s - 3) / 7,
    "constant": lambda s: 0.5 + 0 * s,
    "inverse_sqrt": lambda s: 0.5 * (4 / (s + 1)) ** 0.5,
    "warmup_stable_decay": lambda s: np.where(s < 6, 0.5, 0.5 - 0.4 * (s - 6) / 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name):
    rate = made("adamw", dataclasses.replace(SCHEDULE, name=name, decay_share=0.4)).schedule
    if name == "flat_inverse_sqrt":
        expected = 0.5 * (4 / np.maximum(STEPS + 1, 4)) ** 0.5
    else:
        expected = np.where(STEPS < 3, 0.5 * (STEPS + 1) / 4, POINTS[name](STEPS))
    np.testing.assert_allclose([float(rate(step)) for step in STEPS], expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(rate))(jnp.asarray(STEPS)), expected, rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_short_runs_are_numbers(name):
    """Also where a decay has no step of its own."""
    for steps, warmup, share in ((1, 0, 0.01), (1, 0, 1.0), (3, 2, 0.2), (2, 0, 1e-9)):
        schedule = ScheduleConfig(name=name, warmup_steps=warmup, decay_share=share)
        rate = make_optimizer(TrainConfig(steps=steps, schedule=schedule)).schedule
        assert all(0 <= float(rate(step)) <= 3.001e-3 for step in range(steps))


# One step of a plain matrix, by optax alone.
OF_OPTAX = {
    "adamw": lambda r: optax.adamw(r, b1=0.9, b2=0.99, weight_decay=0.1),
    "adam": lambda r: optax.adam(r, b1=0.9, b2=0.99),
    "adafactor": lambda r: optax.adafactor(r, decay_rate=0.8),
    "lamb": lambda r: optax.lamb(r, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1),
    "lion": lambda r: optax.lion(r, b1=0.9, b2=0.99, weight_decay=0.1),
    "muon": lambda r: contrib.muon(r, beta=0.9, weight_decay=0.1, consistent_rms=0.2),
    "sgd": lambda r: optax.sgd(r, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_is_optax_on_a_plain_matrix(name):
    """At the rates that are logged: warm-up, largest, decay."""
    plain = {"pooler": ((130, 140), ())}  # large enough for Adafactor to factor
    grads = [random(seed, plain) for seed in range(1, 7)]
    decay = 0.0 if name in ("adam", "adafactor", "sgd") else 0.1
    ours = made(name, LINEAR, weight_decay=decay)
    assert len({float(ours.schedule(step)) for step in range(len(grads))}) == 6
    peer = OF_OPTAX[name](ours.schedule)
    expected = updates(ours._replace(transform=peer), random(0, plain), grads)
    assert_close(updates(ours, random(0, plain), grads), expected)


def newton_schulz(g):
    """Five steps on one matrix, by hand (Jordan et al. 2024)."""
    x = np.asarray(g, float) / np.linalg.norm(g)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def test_per_head_muon_by_hand():
    """Each head of q is a matrix [4, 5]; o [2 heads, 5, 4] stays one matrix of 10 x 4."""
    grads = random(1)
    optimizer = made("muon", CONSTANT, per_head=True, weight_decay=0.0)
    got = updates(optimizer, random(0), [grads])[0]["layers"]
    of = lambda g: -0.5 * 0.2 * max(g.shape) ** 0.5 * newton_schulz(g)
    for group in range(3):
        for head in range(2):
            expected = of(grads["layers"]["q"][group, :, head])
            assert_close(got["q"][group, :, head], expected, loosen=100)
        expected = of(grads["layers"]["o"][group].reshape(10, 4))
        assert_close(got["o"][group].reshape(10, 4), expected, loosen=100)


def flat(layers, group, per_head):
    """The weights of a group of layers as plain matrices and vectors."""
    heads_of_q = [layers["q"][group].reshape(4, 10)]
    if per_head:
        heads_of_q = [layers["q"][group, :, n] for n in range(2)]
    return {
        "q": heads_of_q,
        "o": layers["o"][group].reshape(10, 4),
        "chunks": [layers["chunks"][group, n] for n in range(2)],
        "q_bias": layers["q_bias"][group].ravel(),
        "norm": {"scale": layers["norm"]["scale"][group]},
    }


STACKED = deep([*OPTIMIZERS, "muon per head"], "adafactor", "lamb", "muon", "muon per head")


@pytest.mark.parametrize("name", STACKED)
def test_stacked_matrices_are_updated_separately(name):
    """Group by group, and heads as a plain matrix of D x (N H), with `per_head` each head of q as a
    matrix of D x H and o as one of (N H) x D: the same updates."""
    name, _, per_head = name.partition(" per ")
    grads = [random(seed) for seed in range(1, 4)]
    got = updates(made(name, per_head=bool(per_head)), random(0), grads)[-1]["layers"]
    for group in range(3):
        params, *one = (flat(a["layers"], group, per_head) for a in (random(0), *grads))
        expected = updates(made(name, axes=axes_by_shape), params, one)[-1]
        assert_close(flat(got, group, per_head), expected, loosen=5)


# Layout -> weight -> its fan-in: q, k and v read D = 8 or a head's slice of x, o reads N V.
FAN_IN = {
    heads.Standard(num_heads=3, head_dim=4): {"q": 8, "k": 8, "v": 8, "o": 12},
    heads.Narrow(num_heads=2): {"q": 4, "k": 4, "v": 4, "o": 8},
}


@pytest.mark.parametrize("layout", deep(FAN_IN, next(iter(FAN_IN))))
def test_first_update_is_the_rate_times_base_over_fan_in(layout):
    """The first Adam update is the sign of the gradient times the learning rate; tables and output
    heads keep it. The decay of a matrix is learning rate x weight decay x weight, whatever the
    fan-in."""
    output = models.OutputHead(kind="own", pooler="each", num_classes=3)
    fields = dict(ffn=models.FFN(width=20), num_layers=2, sharing="albert", output=output)
    model = models.ModelConfig(width=8, heads=layout, **fields)
    params = jax.tree.map(lambda a: jnp.full(a.shape, 2.0), models.param_shapes(model))
    optimizer = made("adamw", CONSTANT, models.matrix_axes(model), base_fan_in=16)
    [found] = updates(optimizer, params, [jax.tree.map(jnp.ones_like, params)])
    fan_in, seen = FAN_IN[layout] | {"up": 8, "down": 20}, set()
    for path, update in jax.tree_util.tree_leaves_with_path(found):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        decay = 0 if name.endswith(("bias", "scale", "norm")) else 0.5 * 0.1 * 2
        np.testing.assert_allclose(update, -0.5 * 16 / fan_in.get(name, 16) - decay, rtol=2e-5)
        seen.add(name)
    assert seen > {*fan_in, "embedding", "positions", "scale", "lm_head", "classifier"}


def residual_changes(width, base, steps):
    """Root mean square change of the residual stream of the last layer after each of `steps`."""
    config = models.ModelConfig(
        width=width, heads=heads.Standard(num_heads=width // 16), ffn=models.FFN(width=4 * width),
        num_layers=1, max_len=16, compute=models.Compute(remat=False),
    )  # fmt: skip
    model, tokens = config.build(), jax.random.randint(jax.random.key(1), (4, 17), 0, 256)
    options = dict(learning_rate=0.0003, base_fan_in=base, clip_norm=0.0, weight_decay=0.0)
    transform = made("adamw", CONSTANT, models.matrix_axes(config), **options).transform
    params = model.init(jax.random.key(0), tokens[:, :-1])["params"]
    for table in ("embedding", "positions"):  # coordinates of 1 at every width
        params[table] = params[table] * width**0.5

    def loss(params):
        logits = jax.nn.log_softmax(model.apply({"params": params}, tokens[:, :-1]).logits)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    @jax.jit
    def step(params, state):
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    def residual(params):
        return model.apply({"params": params}, tokens[:, :-1], capture=("residual",)).captured

    first, state, found = residual(params)["residual"][-1], transform.init(params), []
    for i in range(1, max(steps) + 1):
        params, state = step(params, state)
        if i in steps:
            found.append(jnp.sqrt(jnp.mean((residual(params)["residual"][-1] - first) ** 2)))
    return np.array(found)


@pytest.mark.slow
def test_coordinate_check():
    """With 1/fan-in the residual stream changes no more in a wider model; without, it does.

    The embeddings have coordinates of variance 1 here, as in muP. With attnlab's initial scale of
    1/sqrt(D) the change with the option grows by a factor of 1.6 from D = 32 to 512.
    """
    widths, steps = (32, 64, 128, 256, 512), (1, 5, 10)
    scaled = np.array([residual_changes(d, 32, steps) for d in widths])
    plain = np.array([residual_changes(d, None, steps) for d in widths])
    slope = lambda changes: np.polyfit(np.log(widths), np.log(changes), 1)[0]
    assert np.all(np.abs(slope(scaled)) < 0.05)
    assert np.all(slope(plain) > 0.8)


def test_clipping_is_by_the_norm_of_all():
    grads = random(1)
    norm = float(optax.tree.norm(grads))
    run = lambda clip: updates(made("sgd", weight_decay=0.0, clip_norm=clip), random(0), [grads])
    assert_close(run(0.5 * norm), jax.tree.map(lambda u: 0.5 * u, run(0.0)))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adam"])
def test_decay_leaves_sinks_alone(name):
    """Without a gradient a matrix shrinks, the logits of sinks stay, of shared layers too."""
    layout = heads.Standard(num_heads=2, extras=(heads.Sink(),))
    config = models.ModelConfig(width=8, num_layers=1, heads=layout)
    params = {"layers": {"attention": {"q": jnp.ones((1, 8, 2, 4)), "sink": jnp.ones((1, 2))}}}
    optimizer = made(name, CONSTANT, models.matrix_axes(config), weight_decay=0.5)
    [change] = updates(optimizer, params, [jax.tree.map(jnp.zeros_like, params)])
    assert not change["layers"]["attention"]["sink"].any()
    assert (change["layers"]["attention"]["q"] < 0).all()


def test_frozen_weights_stay_to_the_bit_and_all_others_move():
    """Under decay too, and the frozen do not count in the norm that is clipped."""
    params = {"attention": {n: jnp.ones(3) for n in ("q", "k_bias", "v", "q_norm")}}
    grads = jax.tree.map(lambda a: 1e-4 * a, params)
    grads["attention"]["q"] *= 1e9
    fields = {"weight_decay": 0.5, "clip_norm": 1e-3}
    frozen = made("sgd", frozen=r"attention\.[qk](_bias)?$", **fields)
    change = updates(frozen, params, [grads] * 3)[-1]["attention"]
    assert not np.stack([change["q"], change["k_bias"]]).any()
    moving = {"attention": {n: params["attention"][n] for n in ("v", "q_norm")}}
    alone = updates(made("sgd", **fields), moving, [jax.tree.map(lambda a: 1e-4 * a, moving)] * 3)
    assert_close({n: change[n] for n in moving["attention"]}, alone[-1]["attention"])
    assert all(u.all() for u in jax.tree.leaves(alone[-1]))
