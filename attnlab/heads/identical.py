"""`identical_heads`: weights with which all heads compute the same."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.heads.layout import Layout
from attnlab.heads.params import check_stacked_params
from attnlab.heads.weights import Params, Weight
from attnlab.names import lookup

OF_SCORES = {"q", "k", "scores"}
OF_HEADS = OF_SCORES | {"probs", "v", "heads"}
COMPUTED_FROM: Mapping[str, set[str]] = MappingProxyType({
    "q": {"q"}, "k": {"k"}, "v": {"v"}, "scores": OF_SCORES, "probs": OF_SCORES | {"probs"},
    "heads": OF_HEADS, "outputs": OF_HEADS | {"outputs"},
})  # fmt: skip
"""Value of `HEAD_VALUES` -> it, and the values that it is computed from."""


def identical_heads(
    params: Params, layout: Layout, names: Iterable[str] = ("outputs",)
) -> dict[str, Array]:
    """Parameters with which these values are the same in every head: those of the first head.

    In each weight that one of the values depends on (`Weight.changed`), every head becomes a copy
    of the first. Heads that read a slice of x each, as in the layout `Narrow`, then have the same
    weights; their values are equal where the slices are.

    Args:
      params: weights by name, perhaps stacked: with more axes in front.
      layout: the heads.
      names: values of `HEAD_VALUES`. ("probs",) makes all heads attend alike, ("q", "k", "v")
        makes their queries, keys and values equal, ("heads",) makes everything equal but the output
        projection, ("outputs",) everything.

    Returns:
      The parameters; weights that stay, and nested dicts such as adapters, are the same objects.

    Raises:
      ValueError: heads have no value of one of these names, or `params` are not its weights.

    >>> from attnlab.heads import Standard, init
    >>> layout = Standard(width=4, num_heads=2)
    >>> same = identical_heads(init(jax.random.key(0), layout), layout, ("q", "k"))
    >>> [bool((same[n][:, 0] == same[n][:, 1]).all()) for n in ("q", "k", "v")]
    [True, True, False]
    """
    weights = layout.all_weights
    check_stacked_params(params, layout)
    values = set().union(*(lookup(COMPUTED_FROM, name, what="value of heads") for name in names))
    same = dict(params)
    for name, weight in weights.items():
        if values & set(weight.changed):
            same[name] = _first_head(params[name], layout, weight)
    return same


def _first_head(a: Array, layout: Layout, weight: Weight) -> Array:
    """`a` with every head replaced by the first."""
    shape = a.shape
    made = set(weight.batch_axes + weight.out_axes) & set(layout.head_axes)
    heads = made or set(weight.in_axes) & set(layout.head_axes)
    first = len(weight.batch_axes) + len(weight.in_axes)
    for i, axis in enumerate(weight.axes):
        # A weight that mixes heads reads all of them and makes the same of each.
        mixes = made and len(weight.batch_axes) <= i < first
        if axis in heads and not mixes:
            at = a.ndim - len(weight.axes) + i
            a = jax.lax.slice_in_dim(a, 0, 1, axis=at)
    return jnp.broadcast_to(a, shape)
