"""One scan equals the loop over layers, under every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab import Plan, init_stacked, run_stack
from attnlab.sharing import Stack, run_stacks


def test_every_group_has_its_own_random_key():
    plan = Plan(attention=(0, 1, 0), ffn=(0, 1, 2))
    init = {p: lambda key: {"w": jax.random.normal(key, (4,))} for p in plan}
    stacked = jax.jit(lambda key: init_stacked(init, key, plan))(jax.random.key(0))
    assert (stacked["attention"]["w"].shape, stacked["ffn"]["w"].shape) == ((2, 4), (3, 4))
    rows = np.concatenate([stacked["attention"]["w"], stacked["ffn"]["w"]])
    assert len(np.unique(rows)) == rows.size


@pytest.mark.parametrize(
    ("order", "rows", "stacked"),
    [
        ("aaa", 2, {"scale": jnp.ones(1)}),
        ("aaa", 4, {"scale": jnp.ones(1)}),
        ("aa", 3, {"scale": jnp.ones(1)}),
        ("aaaa", 3, {"scale": jnp.ones(1)}),
        ("", 3, {"scale": jnp.ones(1)}),
        ("aaba", 3, {"scale": jnp.ones(1)}),
        ("aaa", 3, {"scale": jnp.ones(0)}),
        ("aaa", 3, {}),
    ],
)
def test_layers_and_parameters_that_do_not_fit_the_plan(order, rows, stacked):
    """JAX clamps an index past the end, so the last row would be used twice."""
    stack = Stack(indexed, stacked, Plan(scale=(0,) * 3), jnp.arange(rows))
    with pytest.raises(ValueError, match=r"order|per_layer|scale"):
        run_stacks({"a": stack}, order, jnp.ones(2), {"a": None})


def indexed(params, x, state, layer):
    """Captures its layer index, and an auxiliary loss that depends on its parameters."""
    x = x * params["scale"]
    return x, state, {"index": layer, "loss": jnp.sum(x**2) * layer}


def test_a_block_gets_its_traced_layer_index_and_its_losses_leave_the_scan(x64):
    plan, scale = Plan(scale=(0, 1, 0, 1)), jnp.asarray([2.0, 3.0])

    def total(scale):
        _, captured = run_stack(
            indexed, {"scale": scale}, plan, jnp.ones(2), per_layer=np.arange(4)
        )
        return jnp.sum(captured["loss"]), captured

    (loss, captured), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(scale)
    np.testing.assert_array_equal(captured["index"], [0, 1, 2, 3])
    np.testing.assert_array_equal(captured["loss"], [0, 72, 2 * 288, 3 * 2592])
    assert loss == 72 + 576 + 7776
    # 2 a^2 b^2 + 4 a^4 b^2 + 6 a^4 b^4 at a = 2, b = 3
    expected = [
        4 * 2 * 9 + 16 * 8 * 9 + 24 * 8 * 81,
        4 * 4 * 3 + 8 * 16 * 3 + 24 * 16 * 27,
    ]
    assert_close(gradient, jnp.asarray(expected, jnp.float64))


@pytest.mark.parametrize("unroll", [1, 2])
def test_layer_types_that_alternate_capture_by_their_own_layers(unroll):
    """Runs of two, one and a rest: rows of each stack stay in the order of its layers."""
    order = ["a", "a", "b", "a", "a", "b", "a"]
    add = lambda params, x, state, layer: (x + params["w"], state + 1, (layer, x))
    double = lambda params, x, state, layer: (x * params["w"], state + 10, (layer, x))
    stacks = {
        "a": Stack(add, {"w": jnp.ones(1)}, Plan(w=(0,) * 5), np.arange(5)),
        "b": Stack(double, {"w": jnp.full(1, 2.0)}, Plan(w=(0, 0)), np.arange(2)),
    }
    state = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    run = lambda x: run_stacks(stacks, order, x, state=state, unroll=unroll)
    (x, state), captured = jax.jit(run)(jnp.ones(()))
    assert (float(x), float(state["a"]), float(state["b"])) == (17.0, 5.0, 20.0)
    np.testing.assert_array_equal(captured["a"][0], range(5))
    np.testing.assert_array_equal(captured["a"][1], [1, 2, 6, 7, 16])
    np.testing.assert_array_equal(captured["b"][0], range(2))
    np.testing.assert_array_equal(captured["b"][1], [3, 8])


def test_captured_values_of_a_type_that_comes_twice_in_a_pattern():
    """In the order a b a a b a: layer i of a stack captures row i, though a scan runs over the
    pattern a b a."""

    def block(params, x, state, per_layer):
        return x + params["w"], state, (per_layer, x)

    numbers = {"a": np.arange(4), "b": np.arange(2)}
    stacks = {
        name: Stack(block, {"w": jnp.full(1, w)}, Plan(w=(0,) * len(numbers[name])), numbers[name])
        for name, w in (("a", 1.0), ("b", 10.0))
    }
    _, captured = run_stacks(stacks, list("abaaba"), jnp.zeros(()), state=dict.fromkeys(stacks))
    assert [part.tolist() for part in captured["a"]] == [[0, 1, 2, 3], [0, 11, 12, 23]]
    assert [part.tolist() for part in captured["b"]] == [[0, 1], [1, 13]]
