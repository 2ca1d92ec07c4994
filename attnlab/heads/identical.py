"""`identical_heads`: weights with which all heads compute the same."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import Layout, all_weights
from attnlab.heads.multihead import multi_head_attention
from attnlab.heads.params import check_stacked_params, weight_shapes
from attnlab.heads.weights import Params, Weight
from attnlab.tap import capture


def identical_heads(
    params: Params, layout: Layout, names: Iterable[str] = ("outputs",)
) -> dict[str, Array]:
    """Parameters with which these values are the same in every head: those of the first head.

    In each weight that one of the values depends on, every head becomes a copy of the first. Heads
    that read a slice of x each, as in the layout `Narrow`, then have the same weights; their values
    are equal where the slices are.

    Args:
      params: weights by name, perhaps stacked: with more axes in front.
      layout: the heads.
      names: values of `head_values(layout)`. ("probs",) makes all heads attend alike, ("q", "k",
        "v") makes their queries, keys and values equal, ("heads",) makes everything equal but the
        output projection, ("outputs",) everything.

    Returns:
      The parameters; weights that stay are the same arrays.

    Raises:
      ValueError: the layout has no value of one of these names, or `params` are not its weights.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=4, num_heads=2)
    >>> same = identical_heads(init(jax.random.key(0), layout), layout, ("q", "k"))
    >>> [bool((same[n][:, 0] == same[n][:, 1]).all()) for n in ("q", "k", "v")]
    [True, True, False]
    """
    weights = all_weights(layout)
    check_stacked_params(params, layout)
    changed = dependencies(layout, names)
    return {
        name: _first_head(a, layout, weights[name]) if name in changed else a
        for name, a in params.items()
    }


def dependencies(layout: Layout, names: Iterable[str]) -> set[str]:
    """Weights on which values of a call depend, by tracing it.

    Args:
      layout: the heads.
      names: values of `head_values(layout)`.

    >>> from attnlab.heads import Collaborative
    >>> sorted(dependencies(Collaborative(width=4, num_heads=2), ("q",)))
    ['mixing', 'q']
    """
    wanted = tuple(names)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {name: array(shape) for name, shape in weight_shapes(layout).items()}
    x, y, z = (array((1, 1, width)) for width in layout.input_widths)
    context = y if y.shape == z.shape else (y, z)

    def values(params: Params, x: Array, context: Array | tuple[Array, Array]) -> dict[str, Array]:
        _, captured = capture(
            multi_head_attention, params, x, layout, context, order="factored", names=wanted
        )
        return captured

    traced = jax.make_jaxpr(values)(params, x, context).jaxpr
    needed = set(map(id, traced.outvars))
    for equation in reversed(traced.eqns):
        if needed & set(map(id, equation.outvars)):
            needed |= set(map(id, equation.invars))
    # Arguments are flattened in the order of the names.
    return {name for name, v in zip(sorted(params), traced.invars, strict=False) if id(v) in needed}


def _first_head(a: Array, layout: Layout, weight: Weight) -> Array:
    """`a` with every head replaced by the first."""
    shape = a.shape
    made = set(weight.per + weight.makes) & set(layout.head_axes)
    heads = made or set(weight.reads) & set(layout.head_axes)
    first = len(weight.per) + len(weight.reads)
    for i, axis in enumerate(weight.axes):
        # A weight that mixes heads reads all of them and makes the same of each.
        mixes = made and len(weight.per) <= i < first
        if axis in heads and not mixes:
            at = a.ndim - len(weight.axes) + i
            a = jax.lax.slice_in_dim(a, 0, 1, axis=at)
    return jnp.broadcast_to(a, shape)
