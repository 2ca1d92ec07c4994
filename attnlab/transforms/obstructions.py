"""Proofs that no weights of one head layout are the function of another's. Few, and certain.

Facts are equations that every set of weights of a built-in target fulfils, such as "a query that
attends to one key gives an output that does not depend on the query". The source, which may be any
layout, is called as a black box at inputs where it breaks the equation.

Forms: functions x, y -> softmax(x A y^T) of different score matrices A are linearly independent, so
heads without norms, gates or sinks settle A_n and W_V W_O of all heads that differ and have an
effect, up to their order. A target whose heads have lower ranks is then another function.

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
    Bilinear,
    Collaborative,
    ExtraKeys,
    Gate,
    GroupedTied,
    Latent,
    Layout,
    LowRankQuery,
    Narrow,
    Sink,
    Standard,
    TalkingHeads,
    TensorProduct,
)
from attnlab.heads.standard import Separate
from attnlab.transforms.dtypes import eps
from attnlab.transforms.forms import canonical, extra_of, is_known, untied
from attnlab.transforms.matrices import rank_at_least, stacked_scores
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
"""Standard deviation of the scores that a proof by forms is about, for inputs of deviation 1."""
GAP = 0.01
"""Singular values below this share of the largest are not counted."""

Kind = Literal["bias", "one_key", "slices", "scaling", "rank", "heads"]


@dataclasses.dataclass(frozen=True)
class NotEquivalent:
    """A proof that no weights of the target are this function.

    Attributes:
      kind: what differs. "bias": an output that only a bias could make. "one_key": what a query
        gets that attends to one key, which gates, sinks and extra keys change. "slices": heads that
        read more than a slice of x. "scaling": inputs of another size. "rank": the rank of the
        scores of a head, or of heads that share keys and values. "heads": their number.
      reason: the fact, and by how much these weights break it.
      found: what was measured.
      allowed: what the target can have.
    """

    kind: Kind
    reason: str
    found: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class Question:
    """Are there weights of `target` that are the function of `layout` with weights `w`?

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
        proofs = itertools.chain(facts(question), forms(question))
        return next(proofs, None)


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
    """(kind, what does not happen in the target, the numbers that are then 0)."""
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
    if isinstance(ask.free, Narrow) and not isinstance(ask.free, Alt) and not ask.has(Gate):
        words = "heads read a slice each, so two slices do not change the output together"
        yield "slices", words, lambda w: _mixed_differences(ask, w, one, two)
    linear = not isinstance(ask.free, TensorProduct) and not _latent_norm(ask.free)
    twice = one._replace(values=2 * one.values)
    powers = isinstance(ask.free, TensorProduct) and "factors" not in biases
    if linear or powers:
        times = 4 if powers else 2
        words = f"twice the value input does not change values other than by a factor of {times}"
        yield (
            "scaling",
            words,
            lambda w: f(w, twice) - times * f(w, one) + (times - 1) * f(w, no_values),
        )
    norm = getattr(ask.free, "qk_norm", None)
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


# Forms --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Forms:
    """Score matrices [n, D (+1), E] and values W_V W_O [n, W, O] of heads that clearly differ and
    have an effect; `others` other heads have, or may have, an effect too."""

    scores: Floats
    values: Floats
    others: int


def clear_forms(ask: Question) -> Forms | None:
    """The heads of the source that the function settles."""
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
    kept: list[tuple[Floats, Floats, bool]] = []
    for a, b, good in zip(scores, values, sure, strict=True):
        twin = next((i for i, k in enumerate(kept) if _norm(k[0] - a) <= 1e-10 * _norm(a)), None)
        if twin is None:
            kept.append((a, b, bool(good)))
        else:
            kept[twin] = kept[twin][0], kept[twin][1] + b, False  # their sum may be rounding
    largest = max(_norm(b) for _, b, _ in kept)
    clear = []
    for i, (a, b, good) in enumerate(kept):
        apart = min((_norm(a - k[0]) for j, k in enumerate(kept) if j != i), default=np.inf)
        large = 2 * LARGE <= _norm(a) <= 100 and _norm(b) >= GAP * largest
        if good and large and apart >= 2 * LARGE:
            clear.append(i)
    if not clear:
        return None
    return Forms(
        np.stack([kept[i][0] for i in clear]),
        np.stack([kept[i][1] for i in clear]),
        len(kept) - len(clear),
    )


def _norm(a: Floats) -> float:
    return float(np.linalg.norm(a))


def _norms(a: Floats) -> Floats:
    return np.asarray(np.linalg.norm(a.reshape(len(a), -1), axis=1))


def rank(a: Floats) -> int:
    """A lower bound of the rank of score matrices, whatever their rounding is."""
    values = np.linalg.svd(a, compute_uv=False)
    return int(np.sum(values > max(GAP * values[0], LARGE)))


def forms(ask: Question) -> Iterator[NotEquivalent]:
    """Ranks and numbers of heads that the target cannot have."""
    target, call = ask.free, ask.call
    plain = not (ask.layout.extras or target.extras) and call.shift_invariant and not call.rotary
    normed = getattr(target, "qk_norm", None) is not None or _latent_norm(target)
    if not plain or normed or isinstance(target, TensorProduct):
        return
    found = clear_forms(ask)
    # Few more heads than there are could not approximate one head of higher rank to 1e-9.
    if found is None or target.num_heads > len(found.scores) + 2:
        return
    largest = score_rank(target)
    ranks = [rank(a) for a in found.scores]
    if max(ranks) > largest:
        yield NotEquivalent(
            "rank",
            f"the scores of a head of the target have a rank of at most {largest}; here a head has "
            f"{max(ranks)}, of singular value {largest + 1} "
            f"{_singular_value(found.scores[int(np.argmax(ranks))], largest):.2g}",
            max(ranks),
            largest,
        )
    yield from count_heads(target, found)
    if len(found.scores) == target.num_heads and not found.others:
        yield from groups(target, found)


def _singular_value(a: Floats, index: int) -> float:
    return float(np.linalg.svd(a, compute_uv=False)[index])


def score_rank(target: Layout) -> int:
    """The highest rank of [A_n; b_n] that a head of the target can have."""
    rows = target.width + ("q" in target.biases)
    most = min(rows, target.input_widths[1])
    if isinstance(target, GroupedTied | Latent):
        most = min(most, target.size("head_dim") + target.size("rotary_dim"))
    elif isinstance(target, Separate):
        most = min(most, target.size("head_dim"))
    return most


def count_heads(target: Layout, found: Forms) -> Iterator[NotEquivalent]:
    """A head of values of rank r takes r / V heads of the target, rounded up."""
    width = target.size("value_dim") if hasattr(target, "value_dim") else target.size("out_width")
    largest = max(float(np.linalg.norm(b, 2)) for b in found.values)
    values = [np.linalg.svd(b, compute_uv=False) for b in found.values]
    needed = sum(-(-int(np.sum(v > GAP * largest)) // width) for v in values)
    if needed > target.num_heads:
        yield NotEquivalent(
            "heads",
            f"{len(found.scores)} different heads with values of ranks "
            f"{[int(np.sum(v > GAP * largest)) for v in values]} take {needed} heads of value_dim "
            f"{width}; the target has {target.num_heads}",
            needed,
            target.num_heads,
        )


def groups(target: Layout, found: Forms) -> Iterator[NotEquivalent]:
    """Heads that share keys and values: a head that fits to no other cannot be in a group."""
    heads = target.num_heads
    if not isinstance(target, Standard | Bilinear) or target.size("num_kv_heads") == heads:
        return
    shares_keys = isinstance(target, Standard) and not isinstance(target, Collaborative)
    units = found.values / _norms(found.values)[:, None, None]

    def fit(n: int, m: int) -> bool:
        pair = np.concatenate([found.scores[n], found.scores[m]])
        keys = not shares_keys or rank(pair) <= target.size("head_dim")
        together = np.concatenate([units[n], units[m]], axis=1)
        return keys and rank_at_least(together, LARGE) <= target.size("value_dim")

    for n in range(heads):
        if not any(fit(n, m) for m in range(heads) if m != n):
            size = heads // target.size("num_kv_heads")
            reason = f"{size} heads of the target share keys and values; head {n} fits to no other"
            yield NotEquivalent("rank", reason, 1, 0)
            return
