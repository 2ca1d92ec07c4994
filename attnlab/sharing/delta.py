"""Shared weights, relaxed: a difference of low rank for each layer that uses them.

The delta of a tree of weights has its names. In place of a matrix stand `down` [rows, r] and `up`
[r, columns], whose product is added to it (LoRA; Hu et al. 2021, arXiv 2106.09685); a vector (bias,
scale of a norm) has a vector of its own. A weight of more axes is the matrix of all axes up to some
place by the rest, cut where the two factors are smallest.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnlab.sharing.dictionary import taken
from attnlab.sharing.plan import Plan

Weights = dict[str, Any]


def init_delta(key: jax.Array, like: Weights, rank: int) -> Weights:
    """A delta that changes nothing yet: `down` normal with standard deviation 1/sqrt(rows), `up`
    and the vectors zero.

    `like` is a tree of arrays or of `jax.ShapeDtypeStruct`s; a rank that exceeds a matrix is cut.

    >>> like = {"q": jnp.ones((6, 2, 3)), "q_bias": jnp.ones((2, 3))}
    >>> delta = init_delta(jax.random.key(0), like, rank=2)
    >>> jax.tree.map(jnp.shape, delta)
    {'q': {'down': (6, 2), 'up': (2, 6)}, 'q_bias': (2, 3)}
    """
    keys = dict(zip(like, jax.random.split(key, len(like)), strict=True))

    def make(name: str, a: Any) -> Any:
        if isinstance(a, dict):
            return init_delta(keys[name], a, rank)
        shapes = delta_shapes(name, a.shape, rank)
        if "whole" in shapes:
            return jnp.zeros(a.shape, a.dtype)
        down = jax.random.normal(keys[name], shapes["down"], a.dtype) * shapes["down"][0] ** -0.5
        return {"down": down, "up": jnp.zeros(shapes["up"], a.dtype)}

    return {name: make(name, a) for name, a in like.items()}


def add_delta(w: Weights, delta: Weights) -> Weights:
    """w + down up, matrix by matrix; what the delta does not name stays.

    The sum is made once a call and then read as any weights, so a delta fits every layout.

    >>> delta = {"q": {"down": jnp.ones((2, 1)), "up": jnp.ones((1, 3))}}
    >>> float(add_delta({"q": jnp.zeros((2, 3)), "k": jnp.ones(4)}, delta)["q"][0, 0])
    1.0
    """
    return {name: _add(a, delta[name]) if name in delta else a for name, a in w.items()}


def applied(pool: Weights, plan: Plan, layer: int) -> dict[str, Weights]:
    """part -> what `layer` computes with, of a pool [G, ...]: its slots, or what is mixed of them,
    and its delta added.

    >>> plan = Plan(attention=(0, 1, 0), ffn=(0, 0, 0))
    >>> pool = {"attention": {"q": jnp.array([5.0, 7.0])}, "ffn": {"up": jnp.array([2.0])}}
    >>> float(applied(pool, plan, 1)["attention"]["q"])
    7.0
    """
    w = taken(pool, {part: plan.indices(part)[layer] for part in plan if part in pool})
    return add_delta(w, w.pop("delta")) if "delta" in w else w


def fit_delta(target: Weights, w: Weights, rank: int) -> Weights:
    """The delta of `rank` that brings `w` nearest to `target` (least squares: truncated SVD of the
    difference; Bae et al. 2024, arXiv 2410.20672, section 2.2). Exact where the rank suffices.

    >>> delta = fit_delta({"q": jnp.full((2, 3), 5.0)}, {"q": jnp.ones((2, 3))}, rank=1)
    >>> round(float(add_delta({"q": jnp.ones((2, 3))}, delta)["q"][1, 2]), 4)
    5.0
    """

    def fit(name: str, a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return fit_delta(a, b, rank)
        difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        shapes = delta_shapes(name, a.shape, rank)
        if "whole" in shapes:
            return jnp.asarray(difference, a.dtype)
        rows, cut = shapes["down"]
        left, sizes, right = np.linalg.svd(difference.reshape(rows, -1), full_matrices=False)
        root = np.sqrt(sizes[:cut])
        down, up = left[:, :cut] * root, root[:, None] * right[:cut]
        return {"down": jnp.asarray(down, a.dtype), "up": jnp.asarray(up, a.dtype)}

    return {name: fit(name, a, w[name]) for name, a in target.items()}


def delta_shapes(name: str, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """What stands for the weight `name` in a delta: its two factors, or a vector whole.

    >>> delta_shapes("o", (2, 3, 6), rank=4)
    {'down': (6, 4), 'up': (4, 6)}
    """
    if len(shape) < 2 or name.endswith(("bias", "scale", "norm")):
        return {"whole": shape}
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    rows, columns = min(cuts, key=sum)
    rank = min(rank, rows, columns)
    return {"down": (rows, rank), "up": (rank, columns)}


def _add(a: Any, delta: Any) -> Any:
    if isinstance(a, dict):
        return add_delta(a, delta)
    if not isinstance(delta, dict):
        return a + delta
    # The highest precision: it is the weight, not a step of the model.
    product = jnp.matmul(delta["down"], delta["up"], precision=lax.Precision.HIGHEST)
    return a + product.reshape(a.shape)
