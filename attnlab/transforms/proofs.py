"""Proofs that no weights of one head layout are the function of another's. Few, and certain.

Facts are equations that every set of weights of a built-in target fulfils, such as "a query that
attends to one key gives an output that does not depend on the query". The source, which may be any
layout, is called as a black box at inputs where it breaks the equation.

Ranks: functions x, y -> softmax(x A y^T) of different score matrices A are linearly independent, so
heads without norms, gates or sinks determine the A_n of all heads that differ and have an effect. A
target whose score matrices have lower ranks is then another function.

A proof must hold by far more than rounding: `FAR` of the largest output, and `NOISE` times what
changes when the weights change in their last digits. Else `convert` returns `Undecided`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from attnlab.heads import (
    Alt,
    ExtraKeys,
    Gate,
    GroupedTied,
    Latent,
    Layout,
    LowRankQuery,
    Narrow,
    Sink,
    TalkingHeads,
    TensorProduct,
)
from attnlab.heads.standard import Separate
from attnlab.transforms.dtypes import eps
from attnlab.transforms.forms import canonical, extra_of, is_known, untied
from attnlab.transforms.matrices import stacked_scores
from attnlab.transforms.measure import (
    NUM_KEYS,
    NUM_QUERIES,
    CallOptions,
    Floats,
    Inputs,
    Weights,
    measure,
    random_inputs,
)

FAR, NOISE = 1e-6, 100.0
LARGE = 0.05
"""Standard deviation of the scores that a proof by ranks is about, for inputs of deviation 1."""
GAP = 0.01
"""Singular values below this share of the largest are not counted."""

Kind = Literal["bias", "one_key", "slices", "scaling", "rank"]


@dataclasses.dataclass(frozen=True)
class NotEquivalent:
    """A proof that no weights of the target compute this function.

    Attributes:
      kind: what differs. "bias": an output that only a bias could make. "one_key": what a query
        gets that attends to one key, which gates, sinks and extra keys change. "slices": heads that
        read more than a slice of x. "scaling": inputs of another size. "rank": of the scores of a
        head.
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
      absorb: weights of `layout` -> `absorbed` weights of the same function, with scale 1 in them.
    """

    w: Weights
    layout: Layout
    target: Layout
    call: CallOptions
    rng: np.random.Generator
    dtype: np.dtype[np.floating]
    absorb: Callable[[Weights], Weights | None]

    @functools.cached_property
    def free(self) -> Layout:
        """The target without ties, canonical."""
        return untied(canonical(self.target))

    def has(self, *kinds: type[Gate] | type[Sink] | type[ExtraKeys] | type[TalkingHeads]) -> bool:
        """Has the target one of these extras?"""
        return any(extra_of(self.target, kind) is not None for kind in kinds)

    @functools.cached_property
    def nearby(self) -> list[Weights]:
        """The weights with other last digits."""
        size = max(1e-10, eps(self.dtype))
        return [
            {n: a * (1 + size * self.rng.normal(size=a.shape)) for n, a in self.w.items()}
            for _ in range(3)
        ]

    @functools.cached_property
    def far(self) -> float:
        """The smallest difference that counts, relative to the largest output."""
        return max(FAR, NOISE * eps(self.dtype))

    def output(self, w: Weights, inputs: Inputs, seen: int | None = None) -> Floats:
        """The output of the source, where queries attend to the first `seen` keys."""
        mask = np.broadcast_to(
            np.arange(NUM_KEYS) < (NUM_KEYS if seen is None else seen),
            (len(inputs.x), 1, NUM_QUERIES, NUM_KEYS),
        )
        return measure(w, self.layout, self.call, inputs, mask).output

    def breaks(self, difference: Callable[[Weights], Floats], size: float) -> float | None:
        """The largest of these numbers, which are 0 in every target, relative to `size`; None if it
        could be rounding."""
        found = difference(self.w)
        largest = float(np.max(np.abs(found)))
        noise = max(float(np.max(np.abs(difference(w) - found))) for w in self.nearby)
        clear = largest > self.far * size and largest > NOISE * noise
        return largest / size if clear else None  # NaN is not clear


def prove(question: Question) -> NotEquivalent | None:
    """The first proof that holds, or None."""
    with np.errstate(all="ignore"):
        if not is_known(question.target) or question.free.norm_eps == 0 or question.call.score_mods:
            return None
        return next(itertools.chain(facts(question), ranks(question)), None)


# Facts --------------------------------------------------------------------------------------------


def facts(ask: Question) -> Iterator[NotEquivalent]:
    """Equations of the target that the source breaks."""
    one, two = (random_inputs(ask.layout, ask.rng, 3) for _ in range(2))
    size = float(np.max(np.abs(ask.output(ask.w, one))))
    if not np.isfinite(size) or size == 0 or ask.has(TalkingHeads):
        return
    for kind, words, difference in equations(ask, one, two):
        found = ask.breaks(difference, size)
        if found is not None:
            reason = f"{words}; here it does by {found:.2g} of the largest output"
            yield NotEquivalent(kind, reason, found, 0.0)


def equations(
    ask: Question, one: Inputs, two: Inputs
) -> Iterator[tuple[Kind, str, Callable[[Weights], Floats]]]:
    """(kind, a property of every target, the numbers that are then 0)."""
    f, biases, extra_keys = ask.output, ask.free.biases, ask.has(ExtraKeys)
    no_values, no_query = one._replace(values=0 * one.values), one._replace(x=0 * one.x)
    if "v" not in biases and not extra_keys:
        words = "without a value bias, values of zero do not change the output"
        yield "bias", words, lambda w: f(w, no_values) - f(w, no_values, 0)
    if "o" not in biases and not extra_keys:
        words = "without an output bias, a query that attends to no key does not have an output"
        yield "bias", words, lambda w: f(w, one, 0)
    if "q" not in biases and not extra_keys and not _norm_bias(ask.free):
        words = "without a query bias, the output of a query of zero does not depend on the keys"
        yield "bias", words, lambda w: f(w, no_query) - f(w, no_query._replace(keys=two.keys))
    if not ask.has(Gate, Sink, ExtraKeys):
        words = "without gate, sink and extra keys, the output for one key does not depend on x"
        yield "one_key", words, lambda w: f(w, one, 1) - f(w, two._replace(values=one.values), 1)
    norm = getattr(ask.free, "qk_norm", None)
    apart = isinstance(ask.free, Narrow) and not (norm is not None and norm.over == "all")
    if apart and not isinstance(ask.free, Alt) and not ask.has(Gate):
        words = "heads read a slice each, so two slices do not change the output together"
        yield "slices", words, lambda w: _mixed_differences(ask, w, one, two)
    linear = not isinstance(ask.free, TensorProduct) and not _latent_norm(ask.free)
    twice = one._replace(values=2 * one.values)
    powers = isinstance(ask.free, TensorProduct) and "factors" not in biases
    if linear or powers:
        times = 4 if powers else 2
        words = f"twice the value input does not change values other than by a factor of {times}"
        rest = times - 1
        yield "scaling", words, lambda w: f(w, twice) - times * f(w, one) + rest * f(w, no_values)
    if linear and norm is None and not {"q", "k"} & set(biases) and not ask.has(Gate, ExtraKeys):
        scaled = one._replace(x=2 * one.x, keys=one.keys / 2)
        words = "queries of 2 x and keys of y / 2 do not change scores that are linear in both"
        yield "scaling", words, lambda w: f(w, scaled) - f(w, one)


def _norm_bias(layout: Layout) -> bool:
    norm = getattr(layout, "qk_norm", None)
    return norm is not None and norm.bias


def _latent_norm(layout: Layout) -> bool:
    return isinstance(layout, Latent | LowRankQuery) and layout.latent_norm


def _mixed_differences(ask: Question, w: Weights, one: Inputs, two: Inputs) -> Floats:
    """f(a b') + f(a' b) - f(a b) - f(a' b') for slice a against the rest b, of every slice."""
    heads = ask.free.num_heads

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
    found = ask.absorb(ask.w)
    again = [ask.absorb(w) for w in ask.nearby]
    if found is None or any(a is None for a in again):
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


def ranks(ask: Question) -> Iterator[NotEquivalent]:
    """A head whose scores have a rank that no head of the target can have."""
    target, call = ask.free, ask.call
    plain = not (ask.layout.extras or target.extras) and call.shift_invariant and not call.rotary
    normed = getattr(target, "qk_norm", None) is not None or _latent_norm(target)
    if not plain or normed or isinstance(target, TensorProduct):
        return
    found = clear_scores(ask)
    # Few more heads than there are could not approximate one head of higher rank to 1e-9.
    if found is None or target.num_heads > len(found) + 2:
        return
    largest = score_rank(target)
    values = np.linalg.svd(found, compute_uv=False)
    # A lower bound of the rank, whatever the rounding is.
    counts = np.sum(values > np.maximum(GAP * values[:, :1], LARGE), axis=1)
    n = int(np.argmax(counts))
    if counts[n] > largest:
        yield NotEquivalent(
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
