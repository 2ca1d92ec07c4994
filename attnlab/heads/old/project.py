"""Heads: x -> q, k, v and heads -> output, for every row of `layouts.LAYOUTS`.

The letters of the axes stand at the top of `attnlab/heads/old/layouts.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from attnlab.heads.old import beside
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Held, Map, Weights
from attnlab.heads.old.spec import HeadSpec
from attnlab.heads.positions import rotate
from attnlab.norms import STARTS


def init_heads(
    key: Array,
    spec: HeadSpec,
    *,
    std: float | None = None,
    residual_scale: float = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> dict[str, Array]:
    """Fresh weights: normal with standard deviation 1/sqrt(fan in), biases zero, norms one.

    The fan is the number of inputs that one output sums over: D (q), E (k), W (v), the chunk C
    where a head reads its chunk, and N*V (o). So q, k, v and scores start with unit variance for
    unit-variance x in every layout (default initialisers take a wrong fan on 3-D weights).
    `std` replaces 1/sqrt(fan in) by one number for all matrices; `residual_scale` multiplies those
    that write into the residual stream.

    >>> w = init_heads(jax.random.key(0), HeadSpec("standard", width=8, num_heads=2, biases="o"))
    >>> {name: a.shape for name, a in w.items()}
    {'q': (8, 2, 4), 'k': (8, 2, 4), 'v': (8, 2, 4), 'o': (2, 4, 8), 'o_bias': (8,)}
    """
    if not isinstance(spec, HeadSpec):
        kind = type(spec).__name__
        raise TypeError(f"init_heads(key, spec): the key comes first; spec is a {kind}")

    def draw(key: Array, one: Map, shape: tuple[int, ...]) -> Array:
        scale = (std or one.fan(spec.sizes) ** -0.5) if one.start is None else one.start
        if spec.qk_norm and one.fields == ("qk_norm",):
            scale = STARTS[spec.qk_norm]
        if not one.drawn:
            return jnp.full(shape, scale, dtype)
        a = jax.random.normal(key, shape, dtype) * scale
        return a * residual_scale if one.makes == "O" else a

    maps, shapes = spec.maps, spec.shapes
    keys = jax.random.split(key, len(maps))
    return {n: draw(k, maps[n], shapes[n]) for n, k in zip(maps, keys, strict=True)}


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
    q, held = query_and_store(w, x, context, value_context, spec=spec)
    return q, *LAYOUTS[spec.layout].read(w, held, spec)


def query_and_store(
    w: Weights,
    x: Array,
    context: Array | None = None,
    value_context: Array | None = None,
    *,
    spec: HeadSpec,
    rotary: tuple[Array | None, Array | None] = (None, None),
) -> tuple[Array, Held]:
    """q, and what a cache would keep of the context; turned by the angles for q and for keys.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> q, held = query_and_store(w, jnp.ones((1, 5, 6)), spec=spec)
    >>> {name: a.shape for name, a in held.items()}
    {'k': (1, 5, 2, 3), 'v': (1, 5, 2, 3)}
    """
    row = LAYOUTS[spec.layout]
    ready = row.prepare(w, x)
    keys = ready if context is None or context is x else row.prepare(w, context)
    if value_context is None or value_context is context:
        values = keys
    else:
        values = ready if value_context is x else row.prepare(w, value_context)
    for_q, for_k = map(turning, rotary)
    return row.query(w, ready, spec, for_q), row.store(w, keys, values, spec, for_k)


def query_alone(
    w: Weights, x: Float[Array, "B T D"], *, spec: HeadSpec, rotary: Array | None = None
) -> Float[Array, "B T N H"]:
    """The q of `query_and_store`.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> query_alone(init_heads(jax.random.key(0), spec), jnp.ones((1, 5, 6)), spec=spec).shape
    (1, 5, 2, 3)
    """
    row = LAYOUTS[spec.layout]
    return row.query(w, row.prepare(w, x), spec, turning(rotary))


def make_memory(
    w: Weights, context: Float[Array, "B S E"], *, spec: HeadSpec, rotary: Array | None = None
) -> Held:
    """What the layout stores of one text, turned by the angles `rotary`: what a call of
    `multi_head_attention` takes as `memory`.

    >>> spec = HeadSpec("standard", width=6, num_heads=2, num_kv_heads=1)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> {name: a.shape for name, a in make_memory(w, jnp.ones((1, 5, 6)), spec=spec).items()}
    {'k': (1, 5, 1, 3), 'v': (1, 5, 1, 3)}
    """
    row = LAYOUTS[spec.layout]
    ready = row.prepare(w, context)
    return row.store(w, ready, ready, spec, turning(rotary))


def turning(angles: Array | None) -> Callable[[Array], Array]:
    """The `turn` of a row: [B, T, ..., H] by the angles of its positions; None turns nothing."""
    if angles is None:
        return lambda a: a
    as_heads = lambda a: a.reshape(*a.shape[:2], -1, a.shape[-1])
    return lambda a: rotate(as_heads(a), angles).reshape(a.shape)


def split_memory(w: Weights, spec: HeadSpec) -> tuple[Weights, Weights]:
    """(the rest, what makes keys and values) of the weights of heads.

    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> [sorted(part) for part in split_memory(dict(q=1, k=2, v=3, o=4, norm=5), spec)]
    [['norm', 'o', 'q'], ['k', 'v']]
    """
    names = memory_names(spec)
    return (
        {name: a for name, a in w.items() if name not in names},
        {name: a for name, a in w.items() if name in names},
    )


def memory_names(spec: HeadSpec) -> list[str]:
    """The weights that make keys and values: those that `store` and `read` apply.

    >>> memory_names(HeadSpec("absorbed", width=6, num_heads=2))
    []
    """
    return [name for name, one in spec.maps.items() if one.runs in ("store", "read")]


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
    known = {name for row in LAYOUTS.values() for name in row.maps} | set(beside.MAPS)
    if odd := sorted(set(shapes) - set(w) | (set(w) - set(shapes)) & known):
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
