"""Which head of one layer does what a head of another layer does, and heads in that order."""

from collections.abc import Sequence

import jax
import numpy as np

from attnlab.conversion import permute_heads
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.spec import HeadSpec, absorption
from attnlab.sharing.mixing import Params


def align_heads(params: Params, target: Params, spec: HeadSpec) -> np.ndarray:
    """The order of the heads of `params` that agrees best with those of `target`.

    Two heads agree as far as their matrices W_Q W_K^T and W_V W_O point the same way (cosine): the
    function of a head, in whatever basis its q, k and v are written. The best order is found
    exactly (Hungarian method).

    Args:
      params: of one attention, weight -> array.
      target: of another attention with the same layout.
      spec: the head layout of both.

    Returns:
      [N] integers: head order[n] of `params` corresponds to head n of `target`.

    Raises:
      ValueError: heads of this layout cannot be permuted one by one.
    """
    _check_can_align(spec)
    from scipy.optimize import linear_sum_assignment

    steps = absorption(spec)
    last = steps[-1].spec if steps else spec
    axes = {name: one.axes for name, one in last.maps.items() if "N" in one.axes and one.drawn}
    if any(set(letters) & set("HVMPQR") for letters in axes.values()):
        raise ValueError(
            f"layout {spec.layout!r} has no form in which a head is its matrices alone, in "
            "whatever basis they are written; use merge='mean'"
        )
    agreement = np.zeros((spec.num_heads, spec.num_heads))
    whole = (target, params)
    for step in steps:
        whole = step.weights(whole[0]), step.weights(whole[1])
    for name, letters in axes.items():
        ours, theirs = (
            _unit_rows(np.moveaxis(np.asarray(w[name], np.float64), letters.index("N"), 0))
            for w in whole
        )
        agreement += ours @ theirs.T
    order: np.ndarray = linear_sum_assignment(-agreement)[1]
    return order


def reorder_heads(params: Params, order: Sequence[int] | np.ndarray, spec: HeadSpec) -> Params:
    """The same attention with head order[n] as head n, rows and columns of talking heads included.

    Raises:
      ValueError: as `permute_heads`.
    """
    numbers = [int(n) for n in order]
    moved = permute_heads({name: params[name] for name in spec.shapes}, spec, numbers)
    if "mix" in params:
        index = np.asarray(numbers)
        moved["mix"] = jax.tree.map(lambda a: a[index][:, index], params["mix"])
    return params | moved


def _check_can_align(spec: HeadSpec) -> None:
    if "C" in LAYOUTS[spec.layout].letters:
        raise ValueError(
            f"layout {spec.layout!r}: each head reads its own slice of x, so heads cannot be "
            "permuted; use merge='mean'"
        )
    if spec.sizes["K"] != spec.num_heads or not spec.output or spec.qk_norm:
        raise ValueError(
            "heads are aligned one by one, which heads that share keys, heads without an output "
            "projection and heads with q/k norms do not allow; use merge='mean'"
        )


def _unit_rows(a: np.ndarray) -> np.ndarray:
    """[N, ...] as [N, size], each row of length 1."""
    rows = a.reshape(len(a), -1)
    unit: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return unit
