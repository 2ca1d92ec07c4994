"""FLOPs of the matrix products in a traced function, loops included.

XLA's own count takes the body of a loop once, whatever its length, so it cannot compare a program
that works block by block with one that does not.
"""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def matmul_flops(jaxpr: Any) -> float | None:
    """2 for each multiply-add of every product, as `attnlab.accounting` counts.

    A scan counts as often as it runs, a branch as its dearest case. None where a loop's length
    is not known before it runs.

    >>> import jax, jax.numpy as jnp
    >>> matmul_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5))))
    60.0
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        inner = [matmul_flops(j) for p in equation.params.values() for j in _jaxprs(p)]
        if any(count is None for count in inner):
            return None
        known = [count for count in inner if count is not None]
        name = equation.primitive.name
        if name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in left)
            total += 2.0 * summed * equation.outvars[0].aval.size
        elif name == "while" and any(known):
            return None
        elif name == "cond":
            total += max(known, default=0.0)
        else:
            total += equation.params.get("length", 1) * sum(known) if name == "scan" else sum(known)
    return total


def _jaxprs(parameter: object) -> list[ClosedJaxpr | Jaxpr]:
    if isinstance(parameter, (ClosedJaxpr, Jaxpr)):
        return [parameter]
    if isinstance(parameter, (tuple, list)):
        return [j for p in parameter for j in _jaxprs(p)]
    return []
