"""A function as the affine map that it is once the statistics of its norms are held.

A norm divides by a root of what it reads. With that root held at its value the norm is linear, and
so are the maps of heads around it. The function is taken as JAX traces it, so no layout says
anything about itself here: a row from outside is read like ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array

ROOTS = {"rsqrt", "sqrt"}
"""What a norm divides by."""
LINEAR = {
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum",
    "dynamic_slice", "expand_dims", "name", "neg", "optimization_barrier", "reduce_sum", "reshape",
    "pad", "rev", "slice", "split", "squeeze", "sub", "transpose",
}  # fmt: skip
"""Linear in all they read together."""
SUMS = {"add", "add_any", "sub", "concatenate", "pad"}
"""Of these, what adds or sets a constant beside it."""
PRODUCTS = {"mul": (0, 1), "dot_general": (0, 1), "div": (0,), "select_n": (1, 2), "gather": (0,)}
"""Linear in one of these operands, where the others are constants."""
CALLS = {"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"} | {
    "custom_jvp_call",
    "custom_vjp_call",
}

CONSTANT, HOMOGENEOUS, AFFINE = "", "homogeneous", "affine"


class Affine(NamedTuple):
    """f(x) = linear(x) + constant, the statistics of its norms held."""

    value: Array
    """f at the x that the statistics are of"""
    linear: Callable
    """Of the arguments of f."""
    constant: Array | None
    """None where f adds none."""
    at: tuple[Array, ...]
    """The arguments themselves"""

    def of(self, terms: Array, argument: int = 0) -> Array:
        """What f makes of each of terms [*X, ...] in the place of one argument [...], the others
        zero: [*X, ...], without the constant."""
        shape = self.at[argument].shape
        lead = terms.shape[: terms.ndim - len(shape)]

        def one(a: Array) -> Array:
            zeros = [jnp.zeros_like(x) for x in self.at]
            return self.linear(*zeros[:argument], a, *zeros[argument + 1 :])

        return jax.vmap(one)(terms.reshape(-1, *shape)).reshape(*lead, *self.value.shape)


def linear_at(f: Callable[..., Array], *xs: Array, why: str = "it", hold: bool = True) -> Affine:
    """f as the affine map that it is at `xs` once every root in it is held. Exact: linear(*xs) +
    constant is f(*xs). With `hold` False no root is held: f must be affine as it is.

    Raises ValueError where f is no such map, as a product of two things that read x; `why` begins
    that sentence.

    >>> norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2)) + 1
    >>> found = linear_at(norm, jnp.array([3.0, 1.0]))
    >>> [round(float(a), 4) for a in found.linear(jnp.array([3.0, 0.0])) + found.constant]
    [2.3416, 1.0]
    >>> linear_at(jnp.tanh, jnp.ones(2), why="this")
    Traceback (most recent call last):
    ValueError: this is not linear in what it reads: tanh
    """
    closed = jax.make_jaxpr(f)(*xs)
    kinds: list[str] = []

    def run(*xs: Array) -> Array:
        inputs = [(x, HOMOGENEOUS) for x in xs]
        ((value, kind),) = _run(closed.jaxpr, closed.consts, inputs, ROOTS if hold else set())
        kinds.append(kind)
        return value

    value, linear = jax.linearize(run, *xs)
    kind = kinds[0]
    if kind not in (CONSTANT, HOMOGENEOUS, AFFINE):
        raise ValueError(f"{why} is not linear in what it reads: {kind}")
    return Affine(value, linear, value - linear(*xs) if kind == AFFINE else None, xs)


def _run(
    jaxpr: Any, consts: Any, inputs: list[tuple[Any, str]], roots: set[str]
) -> list[tuple[Any, str]]:
    """(value, kind) of each output; a kind is CONSTANT, HOMOGENEOUS, AFFINE or what is not linear.

    `roots` are held: no derivative goes through them.
    """
    known = dict(zip(jaxpr.constvars, ((c, CONSTANT) for c in consts), strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda v: (v.val, CONSTANT) if isinstance(v, Literal) else known[v]
    for equation in jaxpr.eqns:
        given = [read(v) for v in equation.invars]
        name, params = equation.primitive.name, equation.params
        inner = next(
            (p for p in params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")), None
        )
        moves = any(kind != CONSTANT for _, kind in given)  # what does not is computed as it is
        if inner is not None and name not in CALLS and moves:
            raise ValueError(f"{name!r} cannot be read as a linear map: write it without")
        if inner is not None and name in CALLS:
            closed = hasattr(inner, "consts")
            made = _run(
                inner.jaxpr if closed else inner, inner.consts if closed else (), given, roots
            )
        else:
            values = equation.primitive.bind(*(a for a, _ in given), **params)
            values = values if equation.primitive.multiple_results else [values]
            kinds = [read(v)[1] for v in equation.invars if not (name in SUMS and _is_zero(v))]
            kind = CONSTANT if name in roots else _kind(name, kinds)
            if name in roots:
                values = [jax.lax.stop_gradient(a) for a in values]
            made = [(a, kind) for a in values]
        known |= dict(zip(equation.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_zero(v: Any) -> bool:
    """A constant that a sum begins with."""
    return isinstance(v, Literal) and jnp.ndim(v.val) == 0 and v.val == 0


def _kind(name: str, kinds: list[str]) -> str:
    """Of what the primitive `name` makes of operands of these kinds."""
    moving = [i for i, kind in enumerate(kinds) if kind]
    if not moving:
        return CONSTANT
    if odd := [k for k in kinds if k not in (CONSTANT, HOMOGENEOUS, AFFINE)]:
        return odd[0]
    beside = AFFINE if AFFINE in kinds else HOMOGENEOUS
    if name in LINEAR:
        return AFFINE if name in SUMS and len(moving) < len(kinds) else beside
    places = PRODUCTS.get(name, ())
    if name == "select_n" and set(moving) <= {1, 2}:
        return beside if len(moving) == 2 else AFFINE
    return beside if len(moving) == 1 and moving[0] in places else name
