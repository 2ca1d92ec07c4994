"""Parameters of a layout: shapes, initial values, checks."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from attnlab.heads.layout import Layout, all_weights
from attnlab.heads.registry import LAYOUTS
from attnlab.heads.weights import Params, Weight

LARGE = 2**16
"""Numbers of an array that `normal` draws in its own shape."""


def weight_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by name.

    >>> from attnlab.heads import Standard
    >>> weight_shapes(Standard(width=8, num_heads=2, biases=("o",)))
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    return {name: layout.shape(weight) for name, weight in all_weights(layout).items()}


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
        raise TypeError(
            f"init(key, layout): layout must be a Layout such as Wide(width=64, num_heads=4), not "
            f"{type(layout).__name__}"
        )
    weights = all_weights(layout)
    try:
        keys = jax.random.split(key, len(weights))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"init(key, layout): key must be a random key such as jax.random.key(0), not {key!r}: "
            f"{error}"
        ) from None
    return {
        name: _initial(k, weight, layout, std, residual_scale, dtype)
        for k, (name, weight) in zip(keys, weights.items(), strict=True)
    }


def _initial(
    key: Array,
    weight: Weight,
    layout: Layout,
    std: float | None,
    residual_scale: float,
    dtype: DTypeLike,
) -> Array:
    shape = layout.shape(weight)
    if weight.identity:
        rows, columns = shape
        return jnp.eye(rows, columns, dtype=dtype)
    if weight.constant is not None:
        return jnp.full(shape, weight.constant, dtype)
    reads, averaged = (math.prod(map(layout.size, a)) for a in (weight.reads, weight.averaged_over))
    fan_in = reads / averaged
    scale = weight.std if weight.std is not None else std or fan_in**-0.5
    drawn = normal(key, shape, dtype) * scale
    return drawn * residual_scale if weight.makes == ("out_width",) else drawn


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


def check_params(params: Params, layout: Layout) -> None:
    """Raises an error if `params` are not those of the layout.

    Nested dicts in `params`, such as adapters, are not checked.

    Raises:
      TypeError: `params` is not a dict.
      ValueError: a weight is missing, superfluous or of another shape.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            "params must be a dict of weights, as init(key, layout) returns, not "
            f"{type(params).__name__}; the order of arguments is (params, x, layout)"
        )
    shapes = weight_shapes(layout)
    missing = [name for name in shapes if name not in params]
    unknown = [n for n, a in params.items() if n not in shapes and not isinstance(a, Mapping)]
    if missing or unknown:
        owners = _layouts_with(set(params))
        hint = f"; these look like weights of layout {owners}" if owners else ""
        raise ValueError(
            f"{layout} has the weights {', '.join(shapes)}; params "
            + (f"have no {missing[0]!r}" if missing else f"also have {unknown[0]!r}")
            + f"{hint}; make them with init(key, layout), or convert them with attnlab.convert"
        )
    for name, shape in shapes.items():
        if not hasattr(params[name], "dtype"):
            kind = type(params[name]).__name__
            raise TypeError(f"weight {name!r} must be an array, not a {kind}")
        if jnp.shape(params[name]) != shape:
            raise ValueError(
                f"weight {name!r} has shape {jnp.shape(params[name])}; {layout} needs {shape}; "
                "make params with init(key, layout), or convert them with attnlab.convert"
            )


def check_stacked_params(params: Params, layout: Layout) -> None:
    """`check_params` for weights that may have axes in front, such as those of stacked layers."""
    ranks = {name: len(shape) for name, shape in weight_shapes(layout).items()}
    one: dict[str, Array] = {}
    for name, a in params.items():
        stacked = 0 if isinstance(a, Mapping) or name not in ranks else a.ndim - ranks[name]
        one[name] = jnp.empty(a.shape[stacked:]) if stacked > 0 else a
    check_params(one, layout)


def _layouts_with(names: set[str]) -> str:
    """Registered layouts that have exactly these weights, biases aside."""
    without_biases = {name for name in names if not name.endswith("_bias")}
    found = []
    for name, kind in LAYOUTS.items():
        try:
            example = kind(width=8, num_heads=2)
        except (TypeError, ValueError):
            continue
        if set(example.weights()) == without_biases:
            found.append(repr(name))
    return " or ".join(found)


def kv_weight_names(layout: Layout) -> list[str]:
    """Weights that make keys and values, and no queries: what layers with shared keys share.

    >>> from attnlab.heads import Absorbed, Standard
    >>> [kv_weight_names(kind(width=6, num_heads=2)) for kind in (Standard, Absorbed)]
    [['k', 'v'], []]
    """
    makes_kv = {"project_kv", "keys_values"}
    return [name for name, weight in all_weights(layout).items() if set(weight.methods) <= makes_kv]


def loss_names(layout: Layout) -> tuple[str, ...]:
    """Names of the tapped scalars that training adds to its loss.

    >>> from attnlab.heads import Standard
    >>> loss_names(Standard(width=6, num_heads=2))
    ()
    """
    return tuple(name for extra in layout.extras for name in extra.losses)
