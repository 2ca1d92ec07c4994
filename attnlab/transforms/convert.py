"""Exact conversion between head layouts: the same function with other weights, or the reason why
there is none."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array

from attnlab.attention import ScoreMod
from attnlab.heads import Absorbed, Layout, Params, all_weights, init, weight_shapes
from attnlab.transforms.dtypes import common_dtype, eps, in_float64
from attnlab.transforms.forms import Goal, canonical, untied
from attnlab.transforms.measure import (
    CallOptions,
    Floats,
    Weights,
    compare,
    float64,
    generator,
    weight_gradients,
)
from attnlab.transforms.proofs import NotEquivalent, Question, prove
from attnlab.transforms.search import State, search

EXACT = 1e-9
"""Largest relative error of an exact conversion, computed in float64."""
ROUNDED = 32
"""Largest relative error of the weights as returned, in units of eps of their dtype; at least
`EXACT`. float32: 4e-6; bfloat16: 0.25; float16: 0.03."""

FIRST = (
    "mix", "q_down", "kv_down", "q", "qk", "q_rotary", "mixing", "v", "k", "k_rotary",
)  # fmt: skip
"""Weights that become random where they and what they are multiplied with are zero, in this order:
of a pair such as q and k, or v and o, the other one stays zero."""

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
    >>> from attnlab.heads import Standard, init
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

    Searches for the shortest chain of exact steps (`search`), those that need weights of some
    structure last, in float64. A chain is returned only if its measured forward and gradient
    errors are finite and below a bound: 1e-9 relative, for weights of ordinary size, before
    weights are cast to the dtype of `params`, and `error_bound(dtype)` for the weights as
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
      TypeError: weights that are not of a float dtype, or arguments in another order.
      ValueError: weights that are not those of `layout` or not finite; layouts whose inputs or
        outputs differ in width.

    >>> from attnlab.heads import Narrow, Wide, init
    >>> narrow, wide = Narrow(width=6, num_heads=2), Wide(width=6, num_heads=2)
    >>> import jax
    >>> found = convert(init(jax.random.key(0), narrow), narrow, wide)
    >>> found.steps
    ('to standard', 'pad', 'rescale')
    """
    _check_widths(layout, target)
    call = CallOptions(rotary, logits_soft_cap, tuple(score_mods))
    w, restore = in_float64(params, layout)
    for which in (layout, target):
        if rotary and which.rotary_size is None:
            return Undecided(f"rotary positions cannot rotate the keys of {which}")
    rng = generator(key)
    goal = Goal(canonical(target), untied(canonical(target)), call)
    with float64():
        found = State(layout, w) if layout == target else search(w, layout, goal)
        if found is None:
            absorb = functools.partial(absorbed, layout=layout, call=call, rng=rng)
            proof = prove(Question(w, layout, target, call, rng, common_dtype(params), absorb))
            if proof is not None:
                return proof
            return Undecided(
                f"no chain of steps leads from {layout} to {target}, and no proof that there is no "
                "conversion holds"
            )
        made = {name: found.params[name] for name in weight_shapes(target)}
        if layout != target:
            same = lambda new: compare(new, target, w, layout, call, rng).below(EXACT)
            made = learnable(made, target, call, same, jax.random.key(0) if key is None else key)
        exact = compare(made, target, w, layout, call, rng)
        if not exact.below(EXACT):
            return Undecided(
                f"the steps {', '.join(found.steps)} have an error above {EXACT}", *exact
            )
        returned = restore(made)
        errors = compare(returned, target, w, layout, call, rng)
        bound = error_bound(common_dtype(params))
        if not errors.below(bound) or not all(np.all(np.isfinite(np.asarray(a, np.float64)))
                                              for a in returned.values()):  # fmt: skip
            return Undecided(
                f"exact in float64, but not in {common_dtype(params)}: the error is above "
                f"{bound:.2g}; convert weights of a wider dtype", *errors
            )  # fmt: skip
        return Conversion(returned, target, found.steps, *errors)


def learnable(
    w: dict[str, Floats],
    layout: Layout,
    call: CallOptions,
    same: Callable[[Weights], bool],
    key: Array,
) -> dict[str, Floats]:
    """The weights with the initial values of `init(key, layout)` in columns that are zero and whose
    gradient is zero, as long as the function is the same."""
    weights, new = all_weights(layout), init(key, layout)
    for name in FIRST:
        if name not in w:
            continue
        first = len(weights[name].per)
        reads = tuple(range(first, first + len(weights[name].reads)))
        dead = ~np.any(w[name], axis=reads, keepdims=True)
        if np.any(dead):
            gradient = weight_gradients(w, layout, call)[name]
            dead &= ~np.any(gradient, axis=reads, keepdims=True)
        made = w | {name: np.where(dead, np.asarray(new[name], np.float64), w[name])}
        if np.any(dead) and same(made):
            w = made
    return w


def absorbed(
    w: Weights, layout: Layout, call: CallOptions, rng: np.random.Generator
) -> Weights | None:
    """The same function as `absorbed` weights whose scores need no scale; None if there is none."""
    biases = tuple(b for b in ("o", "q", "v") if b in untied(canonical(layout)).biases)
    width, key_width, value_width = layout.input_widths
    target = Absorbed(
        width=width, key_width=key_width, value_width=value_width, num_heads=layout.num_heads,
        out_width=layout.size("out_width"), biases=biases, scale=1.0, extras=layout.extras,
    )  # fmt: skip
    found = search(w, layout, Goal(canonical(target), canonical(target), call))
    if found is None or not compare(found.params, target, w, layout, call, rng).below(EXACT):
        return None
    return found.params


def _check_widths(layout: Layout, target: Layout) -> None:
    """Both must be layouts that read the same inputs and write outputs of one width."""
    for name, value in (("layout", layout), ("target", target)):
        if not isinstance(value, Layout):
            raise TypeError(
                f"convert(params, layout, target): {name} must be a Layout such as "
                f"Wide(width=64, num_heads=4), not {type(value).__name__}"
            )
    one, two = ((*a.input_widths, a.size("out_width")) for a in (layout, target))
    names = "width", "key_width", "value_width", "out_width"
    for name, ours, theirs in zip(names, one, two, strict=True):
        if ours != theirs:
            raise ValueError(
                f"layout has {name} {ours}, target {theirs}: they cannot be the same function; "
                "give both the same widths"
            )
