"""A function as the affine map that it is once the statistics of its norms are held fixed.

A norm divides by a root of its input. With that root held at its value the norm is linear, and so
are the projections of heads around it. The function is read as JAX traces it, so layouts need not
declare anything for it, and layouts from outside the package work too.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Jaxpr = jax.extend.core.Jaxpr
Atom: TypeAlias = jax.extend.core.Var | jax.extend.core.Literal

ROOTS = frozenset({"rsqrt", "sqrt"})
"""Primitives that norms divide by."""
LINEAR = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum",
    "dynamic_slice", "expand_dims", "name", "neg", "optimization_barrier", "reduce_sum", "reshape",
    "pad", "rev", "slice", "split", "squeeze", "sub", "transpose",
})  # fmt: skip
"""Primitives that are linear in all operands together."""
SUMS = frozenset({"add", "add_any", "sub", "concatenate", "pad"})
"""Of these, the ones that combine an operand with a constant."""
PRODUCTS = {"mul": (0, 1), "dot_general": (0, 1), "div": (0,), "gather": (0,)}
"""Primitive -> operands in one of which it is linear while the others are constants."""
CALLS = frozenset({
    "pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call",
})  # fmt: skip

Kind: TypeAlias = str
"""CONSTANT, HOMOGENEOUS, AFFINE, or the name of the primitive that is not linear."""
CONSTANT, HOMOGENEOUS, AFFINE = "", "homogeneous", "affine"


class AffineMap(NamedTuple):
    """f(x) = linear(x) + constant, with the statistics of its norms held fixed."""

    value: Array
    """f at `inputs`."""
    linear: Callable[..., Array]
    """Of the arguments of f."""
    constant: Array | None
    """None where f adds no constant."""
    inputs: tuple[Array, ...]
    """The arguments at which the statistics were taken."""

    def apply(self, terms: Array, argument: int = 0) -> Array:
        """The linear part at each of several terms [*X, ...] of one argument [...], the other
        arguments zero: [*X, ...]."""
        shape = self.inputs[argument].shape
        lead = terms.shape[: terms.ndim - len(shape)]

        def one(a: Array) -> Array:
            zeros = [jnp.zeros_like(x) for x in self.inputs]
            return self.linear(*zeros[:argument], a, *zeros[argument + 1 :])

        return jax.vmap(one)(terms.reshape(-1, *shape)).reshape(*lead, *self.value.shape)


def linearize_at(
    f: Callable[..., Array], *xs: Array, what: str = "it", hold_norms: bool = True
) -> AffineMap:
    """f as an affine map, exact at `xs`: linear(*xs) + constant is f(*xs).

    Args:
      f: function of arrays.
      *xs: its arguments.
      what: begins the error message.
      hold_norms: hold every root in f at its value; else f must be affine as it is.

    Raises:
      ValueError: f is not affine, such as a product of two factors that both depend on x.

    >>> norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2)) + 1
    >>> affine = linearize_at(norm, jnp.array([3.0, 1.0]))
    >>> [round(float(a), 4) for a in affine.linear(jnp.array([3.0, 0.0])) + affine.constant]
    [2.3416, 1.0]
    """
    closed = jax.make_jaxpr(f)(*xs)
    kinds: list[Kind] = []

    def run(*xs: Array) -> Array:
        inputs = [(x, HOMOGENEOUS) for x in xs]
        roots = ROOTS if hold_norms else frozenset[str]()
        ((value, kind),) = _run(closed.jaxpr, closed.consts, inputs, roots)
        kinds.append(kind)
        return value

    value, linear = jax.linearize(run, *xs)
    kind = kinds[0]
    if kind not in (CONSTANT, HOMOGENEOUS, AFFINE):
        raise ValueError(f"{what} is not linear in its input: {kind}")
    return AffineMap(value, linear, value - linear(*xs) if kind == AFFINE else None, xs)


def _run(
    jaxpr: Jaxpr, consts: Sequence[Array], inputs: list[tuple[Array, Kind]], roots: frozenset[str]
) -> list[tuple[Array, Kind]]:
    """(value, kind) of each output. No derivative goes through `roots`."""
    known = dict(zip(jaxpr.constvars, ((c, CONSTANT) for c in consts), strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Atom) -> tuple[Array, Kind]:
        if isinstance(atom, jax.extend.core.Literal):
            return cast(Array, atom.val), CONSTANT
        return known[atom]

    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        name, params = equation.primitive.name, equation.params
        inner = next((p for p in params.values() if _is_jaxpr(p)), None)
        if inner is not None and name in CALLS:
            closed = hasattr(inner, "consts")
            found = _run(
                inner.jaxpr if closed else inner, inner.consts if closed else (), operands, roots
            )
        else:
            values = equation.primitive.bind(*(a for a, _ in operands), **params)
            values = values if equation.primitive.multiple_results else [values]
            kinds = [read(v)[1] for v in equation.invars if not (name in SUMS and _is_zero(v))]
            kind = CONSTANT if name in roots else _kind(name, kinds)
            if name in roots:
                values = [jax.lax.stop_gradient(a) for a in values]
            found = [(a, kind) for a in values]
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _is_zero(atom: Atom) -> bool:
    """Is it the constant 0 with which a sum begins?"""
    return isinstance(atom, jax.extend.core.Literal) and not np.any(atom.val)


def _kind(name: str, operands: list[Kind]) -> Kind:
    """Kind of the result of a primitive whose operands have these kinds."""
    varying = [i for i, kind in enumerate(operands) if kind]
    if not varying:
        return CONSTANT
    if odd := [k for k in operands if k not in (CONSTANT, HOMOGENEOUS, AFFINE)]:
        return odd[0]
    combined = AFFINE if AFFINE in operands else HOMOGENEOUS
    if name in LINEAR:
        return AFFINE if name in SUMS and len(varying) < len(operands) else combined
    if name == "select_n" and set(varying) <= {1, 2}:
        return combined if len(varying) == 2 else AFFINE
    is_product = len(varying) == 1 and varying[0] in PRODUCTS.get(name, ())
    return combined if is_product else name
