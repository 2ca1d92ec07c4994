"""Exact conversion between head layouts: the same function with other weights, or the reason why
there is none."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import jax
import numpy as np
from jaxtyping import Array

from attnlab.attention import ScoreMod
from attnlab.heads import Layout, Params, init
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.weights import Stage
from attnlab.transforms.measure import (
    CallOptions,
    Errors,
    common_dtype,
    compare,
    eps,
    float64,
    generator,
    in_float64,
    weight_gradients,
)
from attnlab.transforms.meet import Candidate, candidates
from attnlab.transforms.proofs import NotEquivalent, Question, prove

EXACT = 1e-9
"""Largest relative error of an exact conversion, computed in float64."""
ROUNDED = 32
"""Largest relative error of the weights as returned, in units of eps of their dtype; at least
`EXACT`. float32: 4e-6; bfloat16: 0.25; float16: 0.03."""

__all__ = ["EXACT", "ROUNDED", "Conversion", "NotEquivalent", "Undecided", "convert", "error_bound"]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The same function in another layout.

    The errors are of the weights as returned, relative to the largest expected value, over random
    inputs of standard deviations 0.1, 1 and 4: 5 queries that attend to 7 keys, to the first 3 of
    them, and to a random choice that leaves one query no key. Query, key and value input differ.

    Attributes:
      params: weights of `layout`, in the dtype of those that were converted.
      layout: the target.
      steps: what was done, in order.
      forward_error: of the output.
      gradient_error: of the gradients of a random sum of the output with respect to all inputs.

    >>> import jax
    >>> from attnlab.heads import Narrow, Standard, init
    >>> narrow, standard = Narrow(width=6, num_heads=2), Standard(width=6, num_heads=2)
    >>> found = convert(init(jax.random.key(0), narrow), narrow, standard)
    >>> found.params["q"].shape, found.forward_error < error_bound(np.float32)
    ((6, 2, 3), True)
    """

    params: dict[str, Array]
    layout: Layout
    steps: tuple[str, ...]
    forward_error: float
    gradient_error: float


@dataclasses.dataclass(frozen=True)
class Undecided:
    """Neither an exact conversion nor a proof that there is none was found.

    Attributes:
      reason: what was tried.
      forward_error, gradient_error: of the best weights found; NaN where there are none.

    >>> import jax
    >>> from attnlab.heads import Absorbed, Standard, init
    >>> layout, target = Standard(width=6, num_heads=2), Absorbed(width=6, num_heads=2)
    >>> convert(init(jax.random.key(0), layout), layout, target, rotary=True).reason
    'rotary positions cannot rotate the keys of Absorbed(width=6, num_heads=2)'
    """

    reason: str
    forward_error: float = math.nan
    gradient_error: float = math.nan


def error_bound(dtype: np.dtype[np.floating] | type) -> float:
    """Below it, weights of this dtype are an exact conversion.

    >>> error_bound(np.float64)
    1e-09
    """
    return max(EXACT, ROUNDED * eps(np.dtype(dtype)))


def convert(
    params: Params,
    layout: Layout,
    target: Layout,
    *,
    rotary: bool = False,
    logits_soft_cap: float | None = None,
    score_mods: Sequence[ScoreMod] = (),
    key: Array | None = None,
) -> Conversion | NotEquivalent | Undecided:
    """Weights of `target` that compute the same function as `params`, or the reason why not.

    Each layout has a more general one (`Layout.general`). Both layouts climb this chain until they
    meet; there the weights get the sizes of the target, and they come back down by
    `Layout.inverse`, all in float64. A result is returned only if its measured forward and
    gradient errors are finite and below a bound: 1e-9 relative, for weights of ordinary size,
    before weights are cast to the dtype of `params`, and `error_bound(dtype)` for the weights as
    returned. Both layouts are called as black boxes, so this holds for layouts from outside too.

    New heads and new columns can learn: those of q and v have the initial values of
    `init(key, target)`, those of k and o are zero. The function is the same, the gradients of k and
    o are not zero, and after one step neither are those of q and v. In new heads k is random too.

    The conversion is of these very weights: a float32 product of two matrices has full rank, since
    its rounding has.

    Args:
      params: weights of `layout`, of float dtype and finite.
      layout, target: head layouts of equal input and output widths.
      rotary: rotary positions are applied. They see head_dim, so fewer steps apply.
      logits_soft_cap, score_mods: of the attention calls. With one, a key bias no longer cancels.
      key: for new weights and for the random inputs of the measurement; None is
        `jax.random.key(0)`.

    Returns:
      `Conversion`; `NotEquivalent` with a proof; or `Undecided`.

    Raises:
      TypeError: weights that are not of a float dtype.
      ValueError: weights that are not those of `layout` or not finite; layouts whose inputs or
        outputs differ in width.

    >>> from attnlab.heads import Narrow, Wide, init
    >>> narrow, wide = Narrow(width=6, num_heads=2), Wide(width=6, num_heads=2)
    >>> import jax
    >>> found = convert(init(jax.random.key(0), narrow), narrow, wide)
    >>> found.steps
    ('to standard', 'resize')
    """
    _check_widths(layout, target)
    call = CallOptions(rotary, logits_soft_cap, tuple(score_mods))
    w, restore = in_float64(params, layout)
    for which in (layout, target):
        if rotary and which.rotary_size is None:
            return Undecided(f"rotary positions cannot rotate the keys of {which}")
    dtype, rng = common_dtype(params), generator(key)
    with float64(), np.errstate(all="ignore"):

        def apart(made: Params | Weights) -> Errors:
            return compare(made, target, w, layout, call, rng)

        found = first_exact(candidates(w, layout, target, call), apart)
        if isinstance(found, Undecided):
            proof = prove(Question(w, layout, target, call, rng, dtype))
            reason = f"from {layout} to {target}: {found.reason}"
            return proof or dataclasses.replace(found, reason=reason)
        made = found.params
        if layout != target:
            new = init(jax.random.key(0) if key is None else key, target)
            made = learnable(made, target, call, new, lambda made: apart(made).below(EXACT))
        returned = restore(made)
        errors = apart(returned)
        finite = all(np.all(np.isfinite(np.asarray(a, np.float64))) for a in returned.values())
        if not (finite and errors.below(error_bound(dtype))):
            return Undecided(
                f"exact in float64, but not in {dtype}: the error is above "
                f"{error_bound(dtype):.2g}; convert weights of a wider dtype", *errors
            )  # fmt: skip
        return Conversion(returned, target, found.steps, *errors)


def first_exact(
    found: Iterable[Candidate], measured: Callable[[Weights], Errors]
) -> Candidate | Undecided:
    """The first candidate whose errors are below `EXACT`."""
    best = Undecided("no more general layout of both has the sizes for these weights")
    for one in found:
        errors = measured(one.params)
        if errors.below(EXACT):
            return one
        best = Undecided(f"the steps {', '.join(one.steps)} are not exact", *errors)
    return best


def learnable(
    w: dict[str, Floats],
    layout: Layout,
    call: CallOptions,
    new: Params,
    same: Callable[[Weights], bool],
) -> dict[str, Floats]:
    """The weights with those of `new` in columns that are zero and whose gradient is zero, as long
    as the function is the same.

    Weights are taken in the order in which a call uses them: of a pair such as q and k, or v and
    o, the first becomes random, and then the other has a gradient.
    """
    weights, stages = layout.all_weights, get_args(Stage)
    order = sorted(weights, key=lambda name: stages.index(weights[name].stages[0]))
    for name in (n for n in order if weights[n].constant is None):
        first = len(weights[name].batch_axes)
        reads = tuple(range(first, first + len(weights[name].in_axes)))
        dead = ~np.any(w[name], axis=reads, keepdims=True)
        if np.any(dead):
            gradient = weight_gradients(w, layout, call)[name]
            dead &= ~np.any(gradient, axis=reads, keepdims=True)
        made = w | {name: np.where(dead, np.asarray(new[name], np.float64), w[name])}
        if np.any(dead) and same(made):
            w = made
    return w


def _check_widths(layout: Layout, target: Layout) -> None:
    """Both must read inputs and write outputs of the same widths."""
    one, two = ((*a.input_widths, a.size("out_width")) for a in (layout, target))
    names = "width", "key_width", "value_width", "out_width"
    for name, ours, theirs in zip(names, one, two, strict=True):
        if ours != theirs:
            raise ValueError(f"layout has {name} {ours}, target {theirs}; give both the same")
