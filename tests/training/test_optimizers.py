"""Each optimizer against optax and against numbers by hand; the logged rate is the one used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_close, deep
from optax import contrib

from attnlab import heads
from attnlab.models import ModelConfig, OutputHead, matrix_axes
from attnlab.training import (
    OPTIMIZERS,
    SCHEDULES,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    make_optimizer,
    optimizers,
)

OPTIMIZER = OptimizerConfig(learning_rate=0.5, clip_norm=0.0)
SCHEDULE = ScheduleConfig(final_learning_rate=0.1, warmup_steps=3)
LINEAR = dataclasses.replace(SCHEDULE, name="linear")
# Three groups of projections with heads, one plain matrix, a table, biases and scales.
SHAPES = {
    "layers": {
        "q": (3, 4, 2, 5),
        "o": (3, 2, 5, 4),
        "chunks": (3, 2, 4, 6),
        "q_bias": (3, 2, 5),
        "norm": {"scale": (3, 4)},
    },
    "pooler": (4, 6),
    "embedding": (7, 4),
}
AXES = {
    "layers": {
        "q": (1, 2),
        "o": (2, 1),
        "chunks": (1, 1),
        "q_bias": (0, 2),
        "norm": {"scale": (0, 1)},
    },
    "pooler": (1, 1),
    "embedding": (1, 1),
}
is_shape = lambda a: isinstance(a, tuple)


def random(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, shapes, is_leaf=is_shape)


def axes(params):
    """AXES, with holes where `params` has them."""
    flat = dict(jax.tree_util.tree_flatten_with_path(AXES, is_leaf=is_shape)[0])
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[path], params)


def updates(optimizer, params, grads):
    """What the transform makes of a list of gradients, the weights as they are."""
    state, found = optimizer.init(params), []
    step = jax.jit(lambda g, state: optimizer.update(g, state, params))
    for g in grads:
        update, state = step(g, state)
        found.append(update)
    return found


def config(name, schedule=SCHEDULE, steps=10, **fields):
    if name == "adam":
        fields = {"weight_decay": 0.0} | fields
    optimizer = dataclasses.replace(OPTIMIZER, name=name, **fields)
    return TrainConfig(steps=steps, optimizer=optimizer, schedule=schedule)


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
    schedule = dataclasses.replace(SCHEDULE, name=name, decay_share=0.4)
    made = make_optimizer(config("adamw", schedule)).schedule
    got = [float(made(step)) for step in STEPS]
    if name == "flat_inverse_sqrt":
        expected = 0.5 * (4 / np.maximum(STEPS + 1, 4)) ** 0.5
    else:
        expected = np.where(STEPS < 3, 0.5 * (STEPS + 1) / 4, POINTS[name](STEPS))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(made))(jnp.asarray(STEPS)), expected, rtol=1e-5)


@pytest.mark.parametrize("name", deep(OPTIMIZERS, "adafactor", "adamw", "muon"))
def test_the_logged_rate_is_the_one_that_runs(name):
    """Every update is linear in the rate: beside a constant rate of 1 the schedule is left."""
    grads = [random(seed) for seed in range(1, 8)]
    made = make_optimizer(config(name, LINEAR), axes)
    one = OPTIMIZERS[name](config(name).optimizer, lambda step: 1.0, axes)
    pairs = zip(
        updates(made.transform, random(0), grads), updates(one, random(0), grads), strict=True
    )
    for step, (got, unit) in enumerate(pairs):
        rate = make_optimizer(config(name, LINEAR)).schedule(step)
        assert_close(got, jax.tree.map(lambda u: rate * u, unit))  # noqa: B023


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
    plain = {"w": (130, 140)}  # large enough for Adafactor to factor
    grads = [random(seed, plain) for seed in range(1, 4)]
    decay = 0.0 if name in ("adam", "adafactor", "sgd") else 0.1
    made = make_optimizer(
        config(name, weight_decay=decay, schedule=dataclasses.replace(SCHEDULE, name="constant"))
    )
    expected = updates(OF_OPTAX[name](made.schedule), random(0, plain), grads)
    assert_close(updates(made.transform, random(0, plain), grads), expected)


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
    fields = dict(weight_decay=0.0, schedule=dataclasses.replace(SCHEDULE, name="constant"))
    transform = make_optimizer(config("muon", per_head=True, **fields), axes).transform
    grads = random(1)
    [got] = updates(transform, random(0), [grads])
    rate = 0.5 / 4  # of the first of three steps of warm-up
    for group in range(3):
        for head in range(2):
            g = np.asarray(grads["layers"]["q"][group, :, head])
            expected = -rate * 0.2 * 5**0.5 * newton_schulz(g)
            assert_close(got["layers"]["q"][group, :, head], expected, loosen=100)
        whole = np.asarray(grads["layers"]["o"][group]).reshape(10, 4)
        expected = -rate * 0.2 * 10**0.5 * newton_schulz(whole)
        assert_close(got["layers"]["o"][group].reshape(10, 4), expected, loosen=100)


@pytest.mark.parametrize("name", deep(OPTIMIZERS, "adafactor", "lamb", "muon"))
def test_stacked_matrices_are_updated_separately(name):
    """Group by group, and heads as a plain matrix of D x (N H): the same updates."""
    made = make_optimizer(config(name), axes)
    grads = [random(seed) for seed in range(1, 4)]
    got = updates(made.transform, random(0), grads)[-1]["layers"]
    for group in range(3):
        flat = lambda a: {
            "q": a["q"][group].reshape(4, 10),  # noqa: B023
            "o": a["o"][group].reshape(10, 4),  # noqa: B023
            **{f"chunk{n}": a["chunks"][group, n] for n in range(2)},  # noqa: B023
            "q_bias": a["q_bias"][group].ravel(),  # noqa: B023
            "scale": a["norm"]["scale"][group],  # noqa: B023
        }
        apart = make_optimizer(config(name))  # knows plain matrices
        one = [flat(g["layers"]) for g in grads]
        expected = updates(apart.transform, flat(random(0)["layers"]), one)[-1]
        assert_close(flat(got), expected, loosen=5)


def test_output_heads_are_no_hidden_matrices():
    """Muon gives them to Adam, and their learning rate is not scaled by fan-in."""
    config = ModelConfig(
        width=8, num_layers=1, output=OutputHead(kind="own", pooler="each", num_classes=3)
    )
    shapes = jax.eval_shape(
        lambda: config.build().init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    )
    mask = optimizers.hidden_matrix_mask(matrix_axes(config), shapes)
    flat = jax.tree_util.tree_flatten_with_path(mask)[0]
    inside = {jax.tree_util.keystr(path[-1:], simple=True) for path, on in flat if on}
    assert inside == {"q", "k", "v", "o", "up", "down"}
    assert {"lm_head", "classifier"} <= shapes.keys()


def test_clipping_is_by_the_norm_of_all():
    grads = random(1)
    norm = float(optax.tree.norm(grads))
    clipped = make_optimizer(config("sgd", weight_decay=0.0, clip_norm=0.5 * norm))
    plain = make_optimizer(config("sgd", weight_decay=0.0))
    got, whole = (updates(o.transform, random(0), [grads])[0] for o in (clipped, plain))
    assert_close(got, jax.tree.map(lambda u: 0.5 * u, whole))


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_of_short_runs_are_numbers(name):
    """Also where a decay has no step of its own."""
    for steps, warmup, share in ((1, 0, 0.01), (1, 0, 1.0), (3, 2, 0.2), (2, 0, 1e-9)):
        schedule = ScheduleConfig(name=name, warmup_steps=warmup, decay_share=share)
        rate = make_optimizer(TrainConfig(steps=steps, schedule=schedule)).schedule
        assert all(0 <= float(rate(step)) <= 3.001e-3 for step in range(steps))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"optimizer": {"name": "adamm"}}, "adamm"),
        ({"schedule": {"name": "cosin"}}, "cosin"),
        ({"optimizer": {"name": "adam"}}, "optimizer.weight_decay"),
        ({"optimizer": {"frozen": "("}}, "optimizer.frozen"),
        ({"optimizer": {"per_head": True}}, "optimizer.per_head"),
        ({"evaluation": {"rows": 9}}, "rows"),
    ],
)
def test_impossible_optimizers_name_the_field(fields, named):
    with pytest.raises(ValueError, match=named):
        TrainConfig.from_dict(fields)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adam"])
def test_decay_leaves_sinks_alone(name):
    """Without a gradient a matrix shrinks, the logits of sinks stay, of shared layers too."""
    config = ModelConfig(
        width=8, num_layers=1, heads=heads.Standard(num_heads=2, extras=(heads.Sink(),))
    )
    params = {"layers": {"attention": {"q": jnp.ones((1, 8, 2, 4)), "sink": jnp.ones((1, 2))}}}
    optimizer = OptimizerConfig(name=name, weight_decay=0.5, learning_rate=0.1)
    transform = optimizers.make_transform(optimizer, lambda step: 0.1, matrix_axes(config))
    [change] = updates(transform, params, [jax.tree.map(jnp.zeros_like, params)])
    assert not change["layers"]["attention"]["sink"].any()
    assert (change["layers"]["attention"]["q"] < 0).all()


def test_frozen_weights_stay_to_the_bit_and_all_others_move():
    """Under clipping and decay too; the frozen do not count in the norm that is clipped."""
    pattern = r"attention\.[qk](_bias)?$"
    config = TrainConfig(
        steps=9,
        schedule=ScheduleConfig(warmup_steps=1),
        optimizer=OptimizerConfig(frozen=pattern, weight_decay=0.5, clip_norm=1e-3),
    )
    params = {"layers": {"attention": {n: jnp.ones(3) for n in ("q", "k_bias", "v", "q_norm")}}}
    transform = make_optimizer(config).transform
    grads = jax.tree.map(lambda a: 1e-4 * a, params)
    grads["layers"]["attention"]["q"] *= 1e9
    state, now = transform.init(params), params
    for _ in range(3):
        change, state = transform.update(grads, state, now)
        now = optax.apply_updates(now, change)
    moved = {n: bool((a != 1).all()) for n, a in now["layers"]["attention"].items()}
    assert moved == {"q": False, "k_bias": False, "v": True, "q_norm": True}
    sgd = dict(name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=1e-3)
    frozen, free = (
        make_optimizer(dataclasses.replace(config, optimizer=OptimizerConfig(**sgd, frozen=one)))
        for one in (pattern, "")
    )
    alone = {"v": jnp.full(3, 1e-4), "q_norm": jnp.full(3, 1e-4)}
    [got], [plain] = (
        updates(frozen.transform, params, [grads]),
        updates(free.transform, alone, [alone]),
    )
    assert_close({n: got["layers"]["attention"][n] for n in plain}, plain)


def test_a_pattern_that_matches_no_parameter_is_refused():
    with pytest.raises(ValueError, match=r"attention\.w"):
        optimizers.frozen_mask("attention.w", {"embedding": jnp.ones(3)})
