"""Weights that keep their first values."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import assert_close

from attnlab.training import OptimizerConfig, ScheduleConfig, TrainConfig, make_optimizer
from attnlab.training.optimizers import frozen_mask


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
        updates, state = transform.update(grads, state, now)
        now = optax.apply_updates(now, updates)
    moved = {n: bool((a != 1).all()) for n, a in now["layers"]["attention"].items()}
    assert moved == {"q": False, "k_bias": False, "v": True, "q_norm": True}
    momentum_free = OptimizerConfig(
        name="sgd", frozen=pattern, beta1=0.0, weight_decay=0.0, clip_norm=1e-3
    )
    sgd = make_optimizer(dataclasses.replace(config, optimizer=momentum_free)).transform
    updates, _ = sgd.update(grads, sgd.init(params), params)
    unfrozen = dataclasses.replace(momentum_free, frozen="")
    whole = dataclasses.replace(config, optimizer=unfrozen)
    alone = {"v": jnp.full(3, 1e-4), "q_norm": jnp.full(3, 1e-4)}
    whole = make_optimizer(whole).transform
    plain, _ = whole.update(alone, whole.init(alone), alone)
    assert_close({n: updates["layers"]["attention"][n] for n in plain}, plain)


def test_a_pattern_that_matches_no_parameter_is_refused():
    with pytest.raises(ValueError, match=r"attention\.w"):
        frozen_mask("attention.w", {"embedding": jnp.ones(3)})
