"""Functions of each position alone: dense layers, dropout, norms of the residual stream."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.linear import add_bias
from attnlab.models.specs import Norm
from attnlab.norms import NORM_KINDS, STARTS
from attnlab.sharing import Params


def dense(
    params: Mapping[str, Array], name: str, x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
    """x W + b with W = params[name]; b = params[name_bias], if there is one.

    >>> dense({"up": jnp.ones((2, 1)), "up_bias": jnp.ones(1)}, "up", jnp.array([3.0, 4.0]))
    Array([8.], dtype=float32)
    """
    return add_bias(params, name, x @ params[name].astype(x.dtype))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """0 with probability `rate`, else x / (1 - rate). Without a key, x.

    >>> dropout(jnp.ones(2), 0.5, None).tolist()
    [1.0, 1.0]
    """
    if not rate or key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def normalize(params: Params, x: Float[Array, "... D"], norm: Norm) -> Float[Array, "... D"]:
    """The norm of kind `norm.kind` of x, times a scale and plus a bias.

    >>> params = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
    >>> normalize(params, jnp.array([1.0, 3.0]), Norm(eps=0.0)).tolist()
    [-1.0, 1.0]
    """
    return NORM_KINDS[norm.kind](params, x, eps=norm.eps)


def norm_shapes(width: int, norm: Norm) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of one norm by name; none without a scale."""
    names = ("scale", "bias") if norm.has_bias else ("scale",)
    return dict.fromkeys(names if norm.scale else (), (width,))


def init_norm(width: int, norm: Norm) -> dict[str, Array]:
    """Initial parameters: a neutral scale, and a zero bias if the norm has one."""
    starts = {"scale": STARTS[norm.kind], "bias": 0.0}
    # With a dtype: JAX calls an array of a Python number weakly typed, and so compiles anew for the
    # parameters of the second step.
    return {n: jnp.full(shape, starts[n], float) for n, shape in norm_shapes(width, norm).items()}
