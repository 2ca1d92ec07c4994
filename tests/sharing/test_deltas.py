"""A low-rank difference: nothing at first, the nearest one by SVD, any shape of weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from attnlab.sharing.deltas import add_delta, delta_shapes, fit_delta, init_delta

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape) * 3)


TREE = {"q": (6, 2, 5), "o": (2, 7, 6), "q_bias": (2, 5), "norm": {"scale": (6,)}, "up": (6, 11)}


def make():
    return jax.tree.map(lambda shape: draw(*shape), TREE, is_leaf=lambda a: isinstance(a, tuple))


def test_a_new_delta_changes_nothing(x64):
    w = make()
    delta = init_delta(jax.random.key(0), w, rank=3)
    got = add_delta(w, delta)
    jax.tree.map(np.testing.assert_array_equal, got, w)
    assert float(jnp.abs(delta["q"]["down"]).max()) > 0.1  # or its gradients would all be zero
    np.testing.assert_allclose(
        jnp.std(init_delta(jax.random.key(0), {"q": jnp.ones((400, 300))}, 50)["q"]["down"]),
        400**-0.5,
        rtol=0.02,
    )


@pytest.mark.parametrize("rank", [1, 3, 100])
def test_no_matrix_of_the_rank_is_nearer(rank, x64):
    """Eckart and Young: what is left over is the smaller singular values, nothing of vectors."""
    target, w = make(), make()
    near = add_delta(w, fit_delta(target, w, rank))
    for name, sizes in {"q": (6, 10), "o": (14, 6), "up": (6, 11)}.items():
        difference = np.reshape(target[name] - w[name], sizes)
        values = np.linalg.svd(difference, compute_uv=False)
        left = np.sum((target[name] - near[name]) ** 2)
        np.testing.assert_allclose(left, np.sum(values[rank:] ** 2), rtol=1e-9, atol=1e-20)
    for name in ("q_bias", "norm"):
        assert_close(near[name], target[name])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("q", (6, 2, 5), {"down": (6, 4), "up": (4, 10)}),  # D by N H
        ("o", (2, 5, 6), {"down": (10, 4), "up": (4, 6)}),  # N V by D
        ("down", (11, 6), {"down": (11, 4), "up": (4, 6)}),
        ("m", (3, 9), {"down": (3, 3), "up": (3, 9)}),  # no more than the matrix has
        *((name, (2, 5), {"whole": (2, 5)}) for name in ("k_bias", "q_norm", "scale")),
        ("sink", (5,), {"whole": (5,)}),
    ],
)
def test_where_a_weight_is_cut(name, shape, expected):
    assert delta_shapes(name, shape, rank=4) == expected


def test_what_the_delta_does_not_name_stays():
    w = {"attention": {"q": jnp.ones((2, 3))}, "ffn": {"up": jnp.ones((2, 3))}}
    delta = {"up": {"down": jnp.ones((2, 1)), "up": jnp.ones((1, 3))}}
    got = add_delta(w, {"ffn": delta, "empty": {}})
    assert got["attention"] is w["attention"]
    assert float(got["ffn"]["up"][1, 2]) == 2


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"w": jnp.ones((2, 3))}, "delta has the weight 'w', the parameters have q"),
        ({"q": jnp.ones(3)}, r"delta of 'q' is \(3,\); the weight has \(2, 3\)"),
        ({"q": {"down": jnp.ones((3, 1)), "up": jnp.ones((1, 2))}}, r"delta of 'q'.* \(3, 1\)"),
    ],
)
def test_deltas_of_other_weights_are_refused(delta, message):
    with pytest.raises(ValueError, match=message):
        add_delta({"q": jnp.ones((2, 3))}, delta)
