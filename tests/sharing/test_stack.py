"""One scan equals the loop over layers, under every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, diagonal

from attnlab import Plan, init_pool, plan_names, run_stack
from attnlab.sharing.named import named

ALL_PLANS = {name: named(name, 5) for name in [*plan_names(), "cycle_rev:2"]} | {
    "by hand": Plan(attention=(0, 1, 0, 2, 1), ffn=(0, 0, 1, 1, 0)),
}


def block(w, x, state, own, shared):
    """A small block that uses everything: state, own row, shared value, and shows something."""
    h = jnp.tanh(x @ w["attention"]["a"]) * own["gate"]
    x = x + h + jnp.sin(x @ w["ffn"]["b"]) * shared
    return x, state + jnp.sum(x), jnp.mean(h)


def make(plan):
    rng = np.random.default_rng(0)
    counts = plan.num_slots
    pool = {
        "attention": {"a": jnp.asarray(rng.normal(size=(counts["attention"], 3, 3)))},
        "ffn": {"b": jnp.asarray(rng.normal(size=(counts["ffn"], 3, 3)))},
    }
    x, gate = jnp.asarray(rng.normal(size=(2, 3))), jnp.asarray(rng.normal(size=5))
    return pool, x, {"gate": gate}


@pytest.mark.parametrize(("name", "remat"), diagonal(ALL_PLANS, [True, False]))
def test_equals_the_unrolled_model(name, remat, x64):
    plan = ALL_PLANS[name]
    pool, x, layer = make(plan)

    def scanned(pool):
        options = {"layer": layer, "shared": 0.7, "state": jnp.zeros(()), "remat": remat}
        (y, state), seen = run_stack(block, pool, plan, x, **options)
        return jnp.sum(jnp.square(y)) + state, (y, seen)

    def unrolled(pool):
        y, state, seen = x, jnp.zeros(()), []
        for i in range(5):
            w = {p: jax.tree.map(lambda a: a[plan[p][i]], pool[p]) for p in plan}  # noqa: B023
            y, state, shown = block(w, y, state, {"gate": layer["gate"][i]}, 0.7)
            seen.append(shown)
        return jnp.sum(jnp.square(y)) + state, (y, jnp.stack(seen))

    got = jax.jit(jax.value_and_grad(scanned, has_aux=True))(pool)
    assert_close(got, jax.jit(jax.value_and_grad(unrolled, has_aux=True))(pool))


def test_shared_gradient_is_the_sum_of_the_copies(x64):
    plan = named("albert", 5)
    pool, x, layer = make(plan)
    copies = jax.tree.map(lambda a: jnp.repeat(a, 5, axis=0), pool)

    def loss(pool, plan):
        options = {"layer": layer, "shared": 0.7, "state": jnp.zeros(())}
        return jnp.sum(jnp.square(run_stack(block, pool, plan, x, **options)[0][0]))

    shared = jax.jit(lambda s: jax.grad(loss)(s, plan))(pool)
    separate = jax.jit(lambda s: jax.grad(loss)(s, named("separate", 5)))(copies)
    assert_close(shared, jax.tree.map(lambda a: a.sum(axis=0, keepdims=True), separate))


def test_slots_are_drawn_one_by_one():
    plan = Plan(attention=(0, 1, 0), ffn=(0, 1, 2))
    init = {p: lambda key: {"w": jax.random.normal(key, (4,))} for p in plan}
    pool = jax.jit(lambda key: init_pool(init, key, plan))(jax.random.key(0))
    assert (pool["attention"]["w"].shape, pool["ffn"]["w"].shape) == ((2, 4), (3, 4))
    rows = np.concatenate([pool["attention"]["w"], pool["ffn"]["w"]])
    assert len(np.unique(rows)) == rows.size


def test_plans_that_do_not_fit_the_pool():
    plan = named("separate", 5)
    pool, x, layer = make(named("albert", 5))
    with pytest.raises(ValueError, match="'attention': the plan uses 5 slots, there are 1"):
        run_stack(block, pool, plan, x, layer=layer)
    with pytest.raises(ValueError, match="names part 'ffn', the pool holds"):
        run_stack(block, {"attention": pool["attention"]}, named("albert", 5), x, layer=layer)
