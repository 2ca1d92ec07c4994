"""Proofs that no weights of one head layout are the function of another's. Few, and certain.

Slices: heads of a target that read one slice of x each do not change the output together. The
source, which may be any layout, is called as a black box at inputs where two slices do.

Ranks: functions x, y -> softmax(x A y^T) of different score matrices A are linearly independent, so
heads without norms, gates or sinks determine the A_n of all heads that differ and have an effect. A
target whose score matrices have lower ranks is then another function.

A proof must hold by far more than rounding: `FAR` of the largest output, and `NOISE` times what
changes when the weights change in their last digits. Else `convert` returns `Undecided`.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from attnlab.heads import Alt, GroupedTied, Latent, Layout, Narrow, TensorProduct
from attnlab.heads.bilinear import stacked_scores
from attnlab.heads.factors import Floats, Weights
from attnlab.heads.standard import Separate
from attnlab.transforms.measure import CallOptions, Inputs, eps, measure, random_inputs
from attnlab.transforms.meet import absorbed

FAR, NOISE = 1e-6, 100.0
LARGE = 0.05
"""Standard deviation of the scores that a proof by ranks is about, for inputs of deviation 1."""
GAP = 0.01
"""Singular values below this share of the largest are not counted."""

Kind = Literal["slices", "rank"]


@dataclasses.dataclass(frozen=True)
class NotEquivalent:
    """A proof that no weights of the target compute this function.

    Attributes:
      kind: what differs. "slices": heads that read more than a slice of x. "rank": of the scores
        of a head.
      reason: the fact, and by how much these weights break it.
      found: what was measured.
      allowed: what the target can have.

    >>> import jax
    >>> from attnlab import convert
    >>> from attnlab.heads import Standard, init
    >>> standard, narrow = Standard(width=6, num_heads=2), Narrow(width=6, num_heads=2)
    >>> convert(init(jax.random.key(0), standard), standard, narrow).kind
    'slices'
    """

    kind: Kind
    reason: str
    found: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class Question:
    """Can weights of `target` compute the same function as `layout` with weights `w`?

    Attributes:
      dtype: of the weights as they were given: what of them is rounding.
    """

    w: Weights
    layout: Layout
    target: Layout
    call: CallOptions
    rng: np.random.Generator
    dtype: np.dtype[np.floating]

    @functools.cached_property
    def nearby(self) -> list[Weights]:
        """The weights with other last digits."""
        size = max(1e-10, eps(self.dtype))
        return [
            {n: a * (1 + size * self.rng.normal(size=a.shape)) for n, a in self.w.items()}
            for _ in range(3)
        ]

    def output(self, w: Weights, inputs: Inputs) -> Floats:
        """The output of the source."""
        return measure(w, self.layout, self.call, inputs).output


def prove(question: Question) -> NotEquivalent | None:
    """A proof that holds, or None."""
    with np.errstate(all="ignore"):
        target = question.target
        kind = type(target)  # a class from outside, of which nothing is known, has neither
        known = (kind.rewritten, kind.general) != (Layout.rewritten, Layout.general)
        if not known or target.extras or target.norm_eps == 0 or question.call.score_mods:
            return None
        return slices(question) or ranks(question)


# Slices -------------------------------------------------------------------------------------------


def slices(ask: Question) -> NotEquivalent | None:
    """Two slices of the inputs that change the output together, though the target keeps them apart.

    The largest of the numbers that are 0 in every target must be too large for rounding.
    """
    if not isinstance(ask.target, Narrow) or isinstance(ask.target, Alt):
        return None
    if ask.target.qk_norm is not None and ask.target.qk_norm.over == "all":
        return None
    one, two = (random_inputs(ask.layout, ask.rng, 3) for _ in range(2))
    size = float(np.max(np.abs(ask.output(ask.w, one))))
    found = _mixed_differences(ask, ask.w, one, two)
    largest = float(np.max(np.abs(found)))
    noise = max(
        float(np.max(np.abs(_mixed_differences(ask, w, one, two) - found))) for w in ask.nearby
    )
    far = max(FAR, NOISE * eps(ask.dtype))
    if not (0 < size < np.inf and largest > far * size and largest > NOISE * noise):
        return None  # NaN is not clear
    return NotEquivalent(
        "slices",
        "heads read a slice each, so two slices do not change the output together; here they do by "
        f"{largest / size:.2g} of the largest output",
        largest / size,
        0.0,
    )


def _mixed_differences(ask: Question, w: Weights, one: Inputs, two: Inputs) -> Floats:
    """f(a b') + f(a' b) - f(a b) - f(a' b') for slice a against the rest b, of every slice."""
    heads = ask.target.num_heads

    def mixed(a: Inputs, b: Inputs, n: int) -> Floats:
        made = []
        for first, second in zip(a, b, strict=True):
            parts = first.reshape(*first.shape[:2], heads, -1).copy()
            parts[:, :, n] = second.reshape(parts.shape)[:, :, n]
            made.append(parts.reshape(first.shape))
        return ask.output(w, Inputs(*made))

    both = ask.output(w, one) + ask.output(w, two)
    return np.stack([mixed(one, two, n) + mixed(two, one, n) - both for n in range(heads)])


# Ranks --------------------------------------------------------------------------------------------


def clear_scores(ask: Question) -> Floats | None:
    """The score matrices [n, D (+1), E] of the heads that clearly differ and have an effect."""
    found, *again = (absorbed(w, ask.layout, ask.call) for w in (ask.w, *ask.nearby))
    if found is None:
        return None
    scores, values = stacked_scores(found), found["vo"]
    sure = np.ones(len(scores), bool)  # is it no sum of larger numbers that cancel?
    for other in again:
        assert other is not None
        for a, b in ((scores, stacked_scores(other)), (values, other["vo"])):
            sure &= _norms(a - b) * NOISE <= _norms(a)
    apart = _norms((scores[:, None] - scores).reshape(-1, *scores.shape[1:]))
    apart = apart.reshape(len(scores), -1) + np.diag(np.full(len(scores), np.inf))
    sizes, effects = _norms(scores), _norms(values)
    large = (sizes >= 2 * LARGE) & (sizes <= 100) & (effects >= GAP * np.max(effects))
    clear = sure & large & (np.min(apart, axis=1) >= 2 * LARGE)
    return scores[clear] if np.any(clear) else None


def _norms(a: Floats) -> Floats:
    return np.asarray(np.linalg.norm(a.reshape(len(a), -1), axis=1))


def ranks(ask: Question) -> NotEquivalent | None:
    """A head whose scores have a rank that no head of the target can have."""
    target, call = ask.target, ask.call
    plain = not ask.layout.extras and call.shift_invariant and not call.rotary
    normed = target.qk_norm is not None or getattr(target, "latent_norm", False)
    if not plain or normed or isinstance(target, TensorProduct):
        return None
    found = clear_scores(ask)
    # Few more heads than there are could not approximate one head of higher rank to 1e-9.
    if found is None or target.num_heads > len(found) + 2:
        return None
    largest = score_rank(target)
    values = np.linalg.svd(found, compute_uv=False)
    # A lower bound of the rank, whatever the rounding is.
    counts = np.sum(values > np.maximum(GAP * values[:, :1], LARGE), axis=1)
    n = int(np.argmax(counts))
    if counts[n] <= largest:
        return None
    return NotEquivalent(
        "rank",
        f"the scores of a head of the target have a rank of at most {largest}; here a head has "
        f"{counts[n]}, of singular value {largest + 1} {values[n, largest]:.2g}",
        int(counts[n]),
        largest,
    )


def score_rank(target: Layout) -> int:
    """The highest rank of [A_n; b_n] that a head of the target can have."""
    rows = target.width + ("q" in target.biases)
    most = min(rows, target.input_widths[1])
    if isinstance(target, GroupedTied | Latent):
        most = min(most, target.size("head_dim") + target.size("rotary_dim"))
    elif isinstance(target, Separate):
        most = min(most, target.size("head_dim"))
    return most
