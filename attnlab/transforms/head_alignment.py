"""Matches the heads of one layer with those of another."""

import dataclasses

import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from attnlab.heads import Layout, Params, TalkingHeads
from attnlab.heads.layout import all_weights
from attnlab.heads.params import check_params
from attnlab.heads.rewrites import chain
from attnlab.transforms.forms import kv_heads_of, reads_slices

HEAD_AND_INPUTS = {"num_heads", "width", "key_width", "value_width", "out_width"}
"""Axes of a weight that does not depend on the basis of a head."""


def align_heads(params: Params, target: Params, layout: Layout) -> NDArray[np.int64]:
    """The order of the heads of `params` that agrees best with those of `target`.

    The agreement of two heads is the cosine between their matrices W_Q W_K^T plus that between
    W_V W_O: the function of a head, independent of the basis of q, k and v. The best order is found
    exactly (Hungarian method); `permute_heads` applies it.

    Args:
      params: weights of one attention.
      target: weights of another attention with the same layout.
      layout: of both.

    Returns:
      [N] integers: head order[n] of `params` corresponds to head n of `target`.

    Raises:
      ValueError: `params` or `target` are not weights of this layout, or its heads cannot be
        permuted one by one.

    >>> import jax
    >>> from attnlab.heads import Standard, init
    >>> from attnlab.transforms import permute_heads
    >>> layout = Standard(width=6, num_heads=3)
    >>> params = init(jax.random.key(0), layout)
    >>> align_heads(permute_heads(params, layout, [2, 0, 1]), params, layout).tolist()
    [1, 2, 0]
    """
    check_params(params, layout)
    check_params(target, layout)
    _check_can_align(layout)
    # Talking heads see a key bias, which the form of a head alone leaves out.
    extras = tuple(extra for extra in layout.extras if not isinstance(extra, TalkingHeads))
    layout = dataclasses.replace(layout, extras=extras)
    from scipy.optimize import linear_sum_assignment

    pair = target, params
    for step in chain(layout)[0]:
        layout, pair = step.layout, (step.params(pair[0]), step.params(pair[1]))
    weights = {
        name: weight
        for name, weight in all_weights(layout).items()
        if "num_heads" in weight.axes and weight.constant is None
    }
    if any(set(weight.axes) - HEAD_AND_INPUTS for weight in weights.values()):
        raise ValueError(
            f"layout {layout.name!r} has no form in which each head has its own matrices, "
            "independent of a basis; use merge='mean'"
        )
    agreement = np.zeros((layout.num_heads, layout.num_heads))
    for name, weight in weights.items():
        axis = weight.axes.index("num_heads")
        ours, theirs = (_unit_rows(w[name], axis) for w in pair)
        agreement += ours @ theirs.T
    order: NDArray[np.int64] = linear_sum_assignment(-agreement)[1]
    return order


def _check_can_align(layout: Layout) -> None:
    if reads_slices(layout):
        raise ValueError(
            f"layout {layout.name!r}: each head reads its own slice of x, so heads cannot be "
            "permuted; use merge='mean'"
        )
    shared = kv_heads_of(layout) != layout.num_heads
    if shared or not layout.output_projection or getattr(layout, "qk_norm", None):
        raise ValueError(
            "heads that share keys, heads without an output projection and heads with q/k norms "
            "cannot be aligned one by one; use merge='mean'"
        )


def _unit_rows(a: Array, axis: int) -> NDArray[np.float64]:
    """The heads of a weight as rows of length 1: [N, size]."""
    rows = np.moveaxis(np.asarray(a, np.float64), axis, 0).reshape(np.shape(a)[axis], -1)
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))
