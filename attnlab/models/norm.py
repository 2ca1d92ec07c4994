"""Norms of the residual stream."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.models.specs import Norm
from attnlab.norms import NORM_KINDS, STARTS
from attnlab.sharing import Params


def normalize(params: Params, x: Float[Array, "... D"], norm: Norm) -> Float[Array, "... D"]:
    """The norm of kind `norm.kind` of x, times a scale and plus a bias.

    >>> params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    >>> normalize(params, jnp.array([1.0, 3.0]), Norm(eps=0.0)).tolist()
    [-1.0, 1.0]
    """
    return NORM_KINDS[norm.kind](params, x, eps=norm.eps)


def init_normalize(width: int, norm: Norm) -> dict[str, Array]:
    """Initial parameters: a neutral scale, and a zero bias if the norm has one."""
    if not norm.scale:
        return {}
    bias = {"bias": jnp.zeros(width)} if norm.has_bias else {}
    return {"scale": jnp.full(width, STARTS[norm.kind])} | bias


def norm_shapes(width: int, norm: Norm) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of one norm by name; none without a scale."""
    names = ("scale", "bias") if norm.has_bias else ("scale",)
    return dict.fromkeys(names if norm.scale else (), (width,))
