"""Relaxed sharing: a low-rank difference (LoRA) for each layer that uses shared parameters.

A delta is a tree with the names of the weights. A matrix has two factors, `down` [rows, r] and `up`
[r, columns], whose product is added to it (Hu et al. 2021, arXiv 2106.09685; for shared layers Bae
et al. 2024, arXiv 2410.20672). A vector (bias, scale of a norm) has its own vector. An array with
more axes is read as the matrix of its first axes by the rest, split where the factors are smallest.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from attnlab.sharing.plan import Plan
from attnlab.sharing.scan import Params, PyTree, select_params


def init_delta(key: Array, like: Params, rank: int) -> Params:
    """An initial delta, which changes nothing: `up` and vectors are zero.

    `down` is normal with standard deviation 1/sqrt(rows).

    Args:
      key: random key.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s.
      rank: r; reduced where a matrix is smaller.

    Returns:
      The tree of `like`, with {"down", "up"} for each matrix.

    >>> like = {"q": jnp.ones((6, 2, 3)), "q_bias": jnp.ones((2, 3))}
    >>> delta = init_delta(jax.random.key(0), like, rank=2)
    >>> jax.tree.map(jnp.shape, delta)
    {'q': {'down': (6, 2), 'up': (2, 6)}, 'q_bias': (2, 3)}
    """
    keys = dict(zip(like, jax.random.split(key, len(like)), strict=True))

    def init(name: str, a: PyTree) -> PyTree:
        if isinstance(a, dict):
            return init_delta(keys[name], a, rank)
        shapes = delta_shapes(name, a.shape, rank)
        if "whole" in shapes:
            return jnp.zeros(a.shape, a.dtype)
        down = jax.random.normal(keys[name], shapes["down"], a.dtype) * shapes["down"][0] ** -0.5
        return {"down": down, "up": jnp.zeros(shapes["up"], a.dtype)}

    return {name: init(name, a) for name, a in like.items()}


def add_delta(params: Params, delta: Params) -> Params:
    """params + down up, for every weight; weights that the delta does not name are unchanged.

    The sum is computed once per call, so a delta works with every head layout.

    Raises:
      ValueError: the delta has a weight that `params` have not, or one of another shape.

    >>> delta = {"q": {"down": jnp.ones((2, 1)), "up": jnp.ones((1, 3))}}
    >>> float(add_delta({"q": jnp.zeros((2, 3)), "k": jnp.ones(4)}, delta)["q"][0, 0])
    1.0
    """
    # An FFN of width 0 has an empty delta and no parameters.
    if unknown := [n for n in delta if n not in params and jax.tree.leaves(delta[n])]:
        raise ValueError(
            f"the delta has the weight {unknown[0]!r}, the parameters have {', '.join(params)}"
        )
    return {n: _add(n, a, delta[n]) if n in delta else a for n, a in params.items()}


def layer_params(stacked: Params, plan: Plan, layer: int) -> dict[str, Params]:
    """The parameters that one layer computes with: its groups, plus its delta.

    Args:
      stacked: sublayer -> parameters [G, ...].
      plan: the sharing plan.
      layer: counted from 0.

    Returns:
      sublayer -> parameters [...].

    >>> plan = Plan(attention=(0, 1, 0), ffn=(0, 0, 0))
    >>> stacked = {"attention": {"q": jnp.array([5.0, 7.0])}, "ffn": {"up": jnp.array([2.0])}}
    >>> float(layer_params(stacked, plan, 1)["attention"]["q"])
    7.0
    """
    indices = {name: plan.indices(name)[layer] for name in plan if name in stacked}
    params = select_params(stacked, indices)
    return add_delta(params, params.pop("delta")) if "delta" in params else params


def fit_delta(target: Params, params: Params, rank: int) -> Params:
    """The delta of rank `rank` with which `params` comes nearest to `target`.

    Least squares, by the truncated SVD of each difference (arXiv 2410.20672, section 2.2); exact if
    the rank suffices.

    Args:
      target: weight -> array.
      params: weight -> array of the same shape.
      rank: r; reduced where a matrix is smaller.

    Returns:
      The tree of `target`, with {"down", "up"} for each matrix.

    >>> delta = fit_delta({"q": jnp.full((2, 3), 5.0)}, {"q": jnp.ones((2, 3))}, rank=1)
    >>> round(float(add_delta({"q": jnp.ones((2, 3))}, delta)["q"][1, 2]), 4)
    5.0
    """

    def fit(name: str, a: PyTree, b: PyTree) -> PyTree:
        if isinstance(a, dict):
            return fit_delta(a, b, rank)
        difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        shapes = delta_shapes(name, a.shape, rank)
        if "whole" in shapes:
            return jnp.asarray(difference, a.dtype)
        rows, r = shapes["down"]
        left, sizes, right = np.linalg.svd(difference.reshape(rows, -1), full_matrices=False)
        root = np.sqrt(sizes[:r])
        down, up = left[:, :r] * root, root[:, None] * right[:r]
        return {"down": jnp.asarray(down, a.dtype), "up": jnp.asarray(up, a.dtype)}

    return {name: fit(name, a, params[name]) for name, a in target.items()}


def delta_shapes(name: str, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the delta of one weight: {"down", "up"} of a matrix, {"whole"} of a vector.

    Args:
      name: of the weight; those whose name ends in "bias", "scale" or "norm" count as vectors.
      shape: of the weight.
      rank: r; reduced where the matrix is smaller.

    >>> delta_shapes("o", (2, 3, 6), rank=4)
    {'down': (6, 4), 'up': (4, 6)}
    """
    if len(shape) < 2 or name.endswith(("bias", "scale", "norm")):
        return {"whole": shape}
    rows, columns = min(_splits(shape), key=sum)
    rank = min(rank, rows, columns)
    return {"down": (rows, rank), "up": (rank, columns)}


def _splits(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and columns of an array that is read as a matrix of its first axes by the rest."""
    return [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]


def _add(name: str, a: PyTree, delta: PyTree) -> PyTree:
    if isinstance(a, dict):
        return add_delta(a, delta)
    if not isinstance(delta, dict):
        if delta.shape != a.shape:
            raise ValueError(f"the delta of {name!r} is {delta.shape}; the weight has {a.shape}")
        return a + delta
    rows, columns = delta["down"].shape[0], delta["up"].shape[-1]
    if (rows, columns) not in _splits(a.shape):
        one, two = delta["down"].shape, delta["up"].shape
        raise ValueError(f"the delta of {name!r} is {one} times {two}; the weight has {a.shape}")
    # Highest precision: the product is part of a weight, not an activation.
    product = jnp.matmul(delta["down"], delta["up"], precision=lax.Precision.HIGHEST)
    return a + product.reshape(a.shape)
