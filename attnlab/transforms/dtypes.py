"""Parameters to NumPy float64 and back to the dtype that they had."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.heads import Layout, Params
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.layout import check_params
from attnlab.transforms.measure import float64

Restore = Callable[[Weights], dict[str, Array]]


def in_float64(params: Params, layout: Layout) -> tuple[dict[str, Floats], Restore]:
    """Parameters in NumPy float64, and a function that casts others back.

    The function returns arrays of the dtype that holds all of `params`: NumPy arrays if all of them
    are, else JAX arrays.

    Raises:
      ValueError: params that are not those of the layout, NaN or inf among them.
      TypeError: params that are not of a float dtype, which could not hold the result.
    """
    check_params(params, layout)
    for name, a in params.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(
                f"weight {name!r} has dtype {a.dtype}, which cannot hold the result; convert "
                "params to a float dtype first"
            )
    w = {name: np.asarray(a).astype(np.float64) for name, a in params.items()}
    for name, wide in w.items():
        if not np.all(np.isfinite(wide)):
            raise ValueError(f"weight {name!r} holds NaN or inf; conversion needs finite weights")
    numpy = all(isinstance(a, np.ndarray) for a in params.values())
    dtype = common_dtype(params)

    def restore(made: Mapping[str, Floats]) -> dict[str, Array]:
        with np.errstate(over="ignore"):
            cast = {name: a.astype(dtype) for name, a in made.items()}
        if numpy:
            return cast  # type: ignore[return-value]  # NumPy arrays in, NumPy arrays out
        with float64(), jax.default_device(None):  # not on the CPU, where they were computed
            return {name: jnp.asarray(a) for name, a in cast.items()}

    return w, restore


def common_dtype(params: Params) -> np.dtype[np.floating]:
    """The dtype that holds all of them."""
    with float64():
        found: np.dtype[np.floating] = jnp.result_type(*params.values())
    return found


def eps(dtype: np.dtype[np.floating]) -> float:
    """The distance from 1 to the next number of this dtype."""
    return float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]
