"""Parameters of a layout: shapes, initial values, checks."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from attnlab.heads.layout import Layout, check_params
from attnlab.heads.weights import Params

LARGE = 2**16
"""Numbers of an array that `normal` draws in its own shape."""


def weight_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name.

    >>> from attnlab.heads import Standard
    >>> weight_shapes(Standard(width=8, num_heads=2, biases=("o",)))
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    return dict(layout.shapes)


def init(
    key: Array,
    layout: Layout,
    *,
    std: float | None = None,
    residual_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> dict[str, Array]:
    """Initial parameters: normal with standard deviation 1/sqrt(fan-in), biases 0, norm scales 1.

    The fan-in is the number of inputs that one output sums over: D for q, N*V for the output
    projection, D/N for heads that read a slice. So q, k, v and scores have unit variance for
    unit-variance x in every layout. Initializers of Flax take another fan-in for 3-D weights.

    Args:
      key: random key.
      layout: what to make weights for.
      std: one standard deviation for all matrices in place of 1/sqrt(fan-in).
      residual_scale: multiplies the matrices that make the output.
      dtype: of the weights.

    Returns:
      Weights by name.

    Raises:
      TypeError: key is not a random key, or layout is not a `Layout`.

    >>> from attnlab.heads import Wide
    >>> init(jax.random.key(0), Wide(width=4, num_heads=2))["q"].shape
    (4, 2, 4)
    """
    if not isinstance(layout, Layout):
        name = type(layout).__name__
        raise TypeError(f"the arguments are (key, layout): layout must be a Layout, not {name}")
    weights, made = layout.all_weights, {}
    keys = jax.random.split(key, len(weights))
    for k, (name, weight) in zip(keys, weights.items(), strict=True):
        shape = layout.sizes(weight.axes)
        if weight.identity:
            made[name] = jnp.eye(shape[0], dtype=dtype)
        elif weight.constant is not None:
            made[name] = jnp.full(shape, weight.constant, dtype)
        else:
            reads, means = layout.sizes(weight.in_axes), layout.sizes(weight.mean_axes)
            fan_in = math.prod(reads) / math.prod(means)
            default = fan_in**-0.5 if std is None else float(std)  # NumPy's would widen `dtype`
            made[name] = normal(k, shape, dtype) * (default if weight.std is None else weight.std)
            if weight.residual:
                made[name] = made[name] * float(residual_scale)
    return made


def normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
    """`jax.random.normal`, the same bits, by a program that compiles faster.

    XLA takes long to compile random bits of several short axes: the initial parameters of a model
    of width 16 take 6.4 s on a CPU, 2.6 s drawn in one axis. A large array is drawn in its own
    shape, which can be sharded.

    >>> key = jax.random.key(0)
    >>> bool((normal(key, (2, 3, 4)) == jax.random.normal(key, (2, 3, 4))).all())
    True
    """
    size = math.prod(shape)
    if size > LARGE:
        return jax.random.normal(key, shape, dtype)
    return jax.random.normal(key, (size,), dtype).reshape(shape)


def check_stacked_params(params: Params, layout: Layout) -> None:
    """`check_params` for weights that may have axes in front, such as those of stacked layers."""
    ranks = {name: len(shape) for name, shape in layout.shapes.items()}
    one: dict[str, Array] = {}
    for name, a in params.items():
        shape = getattr(a, "shape", ())
        stacked = len(shape) - ranks.get(name, len(shape))
        one[name] = jnp.empty(shape[stacked:]) if stacked > 0 else a
    check_params(one, layout)


def kv_weight_names(layout: Layout) -> list[str]:
    """Weights that make keys and values, and no queries: what layers with shared keys share.

    >>> from attnlab.heads import Absorbed, Standard
    >>> [kv_weight_names(kind(width=6, num_heads=2)) for kind in (Standard, Absorbed)]
    [['k', 'v'], []]
    """
    makes_kv = {"project_kv", "keys_values"}
    return [name for name, weight in layout.all_weights.items() if set(weight.stages) <= makes_kv]


def loss_names(layout: Layout) -> tuple[str, ...]:
    """Names of the auxiliary losses that training adds to its loss.

    >>> from attnlab.heads import Standard
    >>> loss_names(Standard(width=6, num_heads=2))
    ()
    """
    return tuple(name for extra in layout.extras for name in extra.losses)
