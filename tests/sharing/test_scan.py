"""One scan equals the loop over layers, under every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import Plan, init_stacked
from attnlab.sharing import Stack, run_stacks


def test_every_group_has_its_own_random_key():
    plan = Plan(attention=(0, 1, 0), ffn=(0, 1, 2))
    init = {p: lambda key: {"w": jax.random.normal(key, (4,))} for p in plan}
    stacked = jax.jit(lambda key: init_stacked(init, key, plan))(jax.random.key(0))
    assert (stacked["attention"]["w"].shape, stacked["ffn"]["w"].shape) == ((2, 4), (3, 4))
    rows = np.concatenate([stacked["attention"]["w"], stacked["ffn"]["w"]])
    assert len(np.unique(rows)) == rows.size


ONE = {"scale": jnp.ones(1)}


@pytest.mark.parametrize(
    ("order", "rows", "stacked"),
    [("aaa", 2, ONE), ("aaa", 4, ONE), ("aa", 3, ONE), ("aaaa", 3, ONE), ("", 3, ONE),
     ("aaba", 3, ONE), ("aaa", 3, {"scale": jnp.ones(0)}), ("aaa", 3, {})],
)  # fmt: skip
def test_layers_and_parameters_that_do_not_fit_the_plan(order, rows, stacked):
    """JAX clamps an index past the end, so the last row would be used twice."""
    stack = Stack(lambda *given: given, stacked, Plan(scale=(0,) * 3), jnp.arange(rows))
    with pytest.raises(ValueError, match=r"order|per_layer|scale"):
        run_stacks({"a": stack}, order, jnp.ones(2), {"a": None})


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("order", ["aaa", "aabaaba", "abaaba", "abcabcab", "abbbac", "b"])
def test_layer_types_in_any_order(order, unroll):
    """Runs and repeating patterns equal a loop: x, the state of each type, what its layers capture
    in the order of its layers, though a scan runs over the pattern."""

    def block(params, x, state, layer):
        return x * params["w"] + layer, state + x, (layer, x)

    counts = {name: order.count(name) for name in sorted(set(order))}
    w = {name: np.array([2.0, 0.5, 3.0]) + i for i, name in enumerate(counts)}
    plans = {name: Plan(w=[i % min(n, 3) for i in range(n)]) for name, n in counts.items()}
    x, states, captured = 1.0, dict.fromkeys(counts, 0.0), {name: [] for name in counts}
    for name in order:
        layer = len(captured[name])
        group = plans[name]["w"][layer]
        made, states[name], values = block({"w": w[name][group]}, x, states[name], layer)
        captured[name].append(values)
        x = made
    stacks = {n: Stack(block, {"w": w[n]}, plans[n], np.arange(counts[n])) for n in counts}
    zeros = {name: jnp.zeros(()) for name in counts}
    run = jax.jit(lambda x: run_stacks(stacks, list(order), x, state=zeros, unroll=unroll))
    (got, got_states), got_captured = run(jnp.ones(()))
    np.testing.assert_allclose(got, x, rtol=1e-6)
    for name in counts:
        np.testing.assert_allclose(got_states[name], states[name], rtol=1e-6)
        np.testing.assert_allclose(np.transpose(got_captured[name]), captured[name], rtol=1e-6)
