"""Heads: x -> q, k, v and heads -> output, for every row of `layouts.LAYOUTS`.

The letters of the axes stand at the top of `attnlab/layouts.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.layouts import INPUT_AXES, LAYOUTS, Layout, Weights
from attnlab.heads.spec import MEMORY_NAMES, WEIGHT_NAMES, HeadSpec, weight_axes
from attnlab.norms import NORM_KINDS


def init_heads(
    key: Array, spec: HeadSpec, *, std: float | None = None, dtype=jnp.float32
) -> Weights:
    """Fresh weights: normal with standard deviation 1/sqrt(fan in), biases zero, norms one.

    The fan is the number of inputs that one output sums over: D (q), E (k), W (v), the chunk C
    where a head reads its chunk, and N*V (o). So q, k, v and scores start with unit variance for
    unit-variance x in every layout (default initialisers take a wrong fan on 3-D weights).
    `std` replaces 1/sqrt(fan in) by one number for all matrices.

    >>> w = init_heads(jax.random.key(0), HeadSpec("standard", width=8, num_heads=2, biases="o"))
    >>> {name: a.shape for name, a in w.items()}
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    if not isinstance(spec, HeadSpec):
        kind = type(spec).__name__
        raise TypeError(f"init_heads(key, spec): the key comes first; spec is a {kind}")
    weights: Weights = {}
    names = weight_axes(spec)
    for (name, axes), k in zip(names, jax.random.split(key, len(names)), strict=True):
        if name.endswith("_bias"):
            weights[name] = jnp.zeros(spec.shapes[name], dtype)
        elif name.endswith("_norm"):
            weights[name] = jnp.ones(spec.shapes[name], dtype)
        else:
            fan = math.prod(spec.sizes[a] for a in set(axes) & set(INPUT_AXES[name]))
            # The mixing vectors of collaborative heads are no map: they sum over nothing.
            scale = std if std and INPUT_AXES[name] else fan**-0.5
            weights[name] = jax.random.normal(k, spec.shapes[name], dtype) * scale
    return weights


def project_heads(
    w: Weights,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    value_context: Float[Array, "B S W"] | None = None,
    *,
    spec: HeadSpec,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S Kk H"], Float[Array, "B S Kv V"]]:
    """x -> q; context (default x) -> k; value_context (default context) -> v.

    Each query head n uses key head n // (N/Kk) and value head n // (N/Kv): `collaborative`,
    `bilinear` and `absorbed` have one key head. The weights are cast to the input's dtype, so x
    decides the precision of the products.

    >>> import jax
    >>> spec = HeadSpec("narrow", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> [a.shape for a in project_heads(w, jax.numpy.ones((1, 5, 6)), spec=spec)]
    [(1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3)]

    Raises ValueError for weights and inputs that do not fit the spec.
    """
    check_arrays(w, x, context, value_context, spec)
    row = LAYOUTS[spec.layout]
    x, context, value_context = _prepare(row, w, x, context, value_context)
    return _query(w, x, spec), *_memory(w, context, value_context, spec)


def project_query(
    w: Weights, x: Float[Array, "B T D"], *, spec: HeadSpec
) -> Float[Array, "B T N H"]:
    """The q of `project_heads` alone.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> project_query(init_heads(jax.random.key(0), spec), jnp.ones((1, 5, 6)), spec=spec).shape
    (1, 5, 2, 3)
    """
    check_arrays(w, x, None, None, spec)
    return _query(w, LAYOUTS[spec.layout].prepare(w, x), spec)


def project_memory(
    w: Weights, context: Float[Array, "B S E"], *, spec: HeadSpec
) -> tuple[Float[Array, "B S Kk H"], Float[Array, "B S Kv V"]]:
    """The k and v of `project_heads` alone, both of one text.

    >>> spec = HeadSpec("standard", width=6, num_heads=2, num_kv_heads=1)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> [a.shape for a in project_memory(w, jnp.ones((1, 5, 6)), spec=spec)]
    [(1, 5, 1, 3), (1, 5, 1, 3)]
    """
    ready = LAYOUTS[spec.layout].prepare(w, context)
    return _memory(w, ready, ready, spec)


def _query(w: Weights, x: Array, spec: HeadSpec) -> Array:
    return _normalise(w, "q_norm", LAYOUTS[spec.layout].query(w, x, spec), spec)


def _memory(w: Weights, x: Array, y: Array, spec: HeadSpec) -> tuple[Array, Array]:
    k, v = LAYOUTS[spec.layout].memory(w, x, y, spec)
    return _normalise(w, "k_norm", k, spec), v


def _normalise(w: Weights, name: str, a: Array, spec: HeadSpec) -> Array:
    """Over the width of each head, as in the sources; epsilon 1e-6 is Flax's."""
    return NORM_KINDS[spec.qk_norm]({"scale": w[name]}, a, eps=1e-6) if spec.qk_norm else a


def split_memory(w: Weights) -> tuple[Weights, Weights]:
    """(the rest, what makes keys and values) of the weights of heads.

    >>> [sorted(part) for part in split_memory({"q": 1, "k": 2, "v": 3, "o": 4, "norm": 5})]
    [['norm', 'o', 'q'], ['k', 'v']]
    """
    memory = {name: a for name, a in w.items() if name in MEMORY_NAMES}
    return {name: a for name, a in w.items() if name not in memory}, memory


def merge_heads(
    w: Weights, heads: Float[Array, "B T N V"], *, spec: HeadSpec
) -> Float[Array, "B T O"]:
    """Heads -> output: sum_i heads_i W_O[i], which is concat(heads) W_O.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> merge_heads(w, jnp.ones((1, 5, 2, 3)), spec=spec).shape
    (1, 5, 6)
    """
    return LAYOUTS[spec.layout].merge(w, heads, spec)


def check_arrays(w: Weights, x: Any, context: Any, value_context: Any, spec: HeadSpec) -> None:
    """Raises ValueError, naming the array, its shape and what the spec asks for."""
    shapes = spec.shapes
    # A tree may hold more (a layer's norm), but no weight of heads that the spec does not know of.
    if odd := sorted(set(shapes) - set(w) | (set(w) - set(shapes)) & WEIGHT_NAMES):
        raise ValueError(
            f"weights {sorted(w)} are not those of the spec, {sorted(shapes)}: see {odd}; make "
            "them with init_heads(key, spec)"
        )
    for name, shape in shapes.items():
        if w[name].shape != shape:
            raise ValueError(f"weight {name} has shape {w[name].shape}, the spec asks for {shape}")
    keys = x if context is None else context
    values = keys if value_context is None else value_context
    inputs = (("x", x, "width", "D"), ("context", keys, "key_width", "E"))
    for name, a, field, letter in (*inputs, ("value_context", values, "value_width", "W")):
        if len(a.shape) != 3:
            raise ValueError(f"{name} {a.shape} must be [batch, length, width]")
        if a.shape[2] != spec.sizes[letter]:
            raise ValueError(f"{name} {a.shape} must end in {field} {spec.sizes[letter]}")
        if a.shape[0] != x.shape[0]:
            raise ValueError(f"{name} {a.shape} and x {x.shape} must have one batch size")
    if values.shape[1] != keys.shape[1]:
        raise ValueError(f"value_context {values.shape} must be as long as context {keys.shape}")


def _prepare(row: Layout, w: Weights, x: Array, context, value_context) -> tuple[Array, ...]:
    """Every input prepared, each array once."""
    ready = row.prepare(w, x)
    key = ready if context is None or context is x else row.prepare(w, context)
    if value_context is None or value_context is context:
        return ready, key, key
    return ready, key, ready if value_context is x else row.prepare(w, value_context)
