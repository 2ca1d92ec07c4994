"""Learning rates per matrix by 1/fan-in: against hand-computed values, and a coordinate check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep

from attnlab import heads
from attnlab.models import FFN, Compute, ModelConfig, matrix_axes
from attnlab.training import OptimizerConfig, ScheduleConfig, TrainConfig, make_optimizer

CONSTANT = ScheduleConfig(name="constant", warmup_steps=0)
# Layout -> weight -> its fan-in: q, k and v read D = 8 or a head's slice of x, o reads N V.
FAN_IN = {
    heads.Standard(num_heads=3, head_dim=4): {"q": 8, "k": 8, "v": 8, "o": 12},
    heads.Narrow(num_heads=2): {"q": 4, "k": 4, "v": 4, "o": 8},
}


def train_config(**fields):
    fields = dict(learning_rate=0.5, clip_norm=0.0, base_fan_in=16, weight_decay=0.0) | fields
    return TrainConfig(steps=10, optimizer=OptimizerConfig(**fields), schedule=CONSTANT)


@pytest.mark.parametrize("layout", deep(FAN_IN, next(iter(FAN_IN))))
def test_first_update_is_the_rate_times_base_over_fan_in(layout):
    """The first Adam update is the sign of the gradient times the learning rate; the decay of the
    matrices is learning rate x weight decay x weight, whatever the fan-in."""
    model = ModelConfig(width=8, heads=layout, ffn=FFN(width=20), num_layers=2, sharing="albert")
    params = model.build().init(jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    transform = make_optimizer(train_config(weight_decay=0.1), matrix_axes(model)).transform
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = transform.update(ones, transform.init(params), params)
    sizes, seen = FAN_IN[layout] | {"up": 8, "down": 20}, set()
    for (path, update), weight in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        rate = 0.5 * 16 / sizes[name] if name in sizes else 0.5
        decayed = not name.endswith(("bias", "scale", "norm"))
        expected = -rate - (0.5 * 0.1 * weight if decayed else 0)
        np.testing.assert_allclose(update, jnp.broadcast_to(expected, update.shape), rtol=2e-5)
        seen.add(name)
    assert seen >= set(sizes)


def residual_changes(width, base, steps):
    """Root mean square change of the residual stream of the last layer after each of `steps`."""
    config = ModelConfig(
        width=width,
        heads=heads.Standard(num_heads=width // 16),
        ffn=FFN(width=4 * width),
        num_layers=1,
        max_len=16,
        compute=Compute(remat=False),
    )
    model, tokens = config.build(), jax.random.randint(jax.random.key(1), (4, 17), 0, 256)
    train = train_config(learning_rate=0.0003, base_fan_in=base)
    transform = make_optimizer(train, matrix_axes(config)).transform
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

    @jax.jit
    def residual(params):
        out = model.apply({"params": params}, tokens[:, :-1], capture=("residual",))
        return out.captured["residual"][-1]

    first, state, found = residual(params), transform.init(params), []
    for i in range(1, max(steps) + 1):
        params, state = step(params, state)
        if i in steps:
            found.append(float(jnp.sqrt(jnp.mean((residual(params) - first) ** 2))))
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
