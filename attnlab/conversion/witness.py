"""Why one set of heads is not another: statements about a function, measured on its weights.

The proofs are of two sorts. Some measure the *function*: every target keeps a rule (a head reads
its own chunk alone), the source breaks it by so much. Others use that a function of plain heads
has one form only (`forms.py`).
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from attnlab.conversion.factors import Refused, count_minors, diagonalised
from attnlab.conversion.forms import beyond, forms_of, ranks_of
from attnlab.conversion.measure import MEASURABLE, difference, dimension, draw, probabilities
from attnlab.conversion.question import Question, Witness
from attnlab.conversion.scaling import key_scale, value_scale
from attnlab.conversion.shares import gates, mass, shown
from attnlab.conversion.ties import shared_basis, squares
from attnlab.heads.old.layouts import LAYOUTS

# Weights up to which the degrees of freedom are counted: it takes a matrix of that size.
COUNTED = 1000
# Products of two numbers of the score matrices, all of which are made.
MINORS = 10**7


def prove(question: Question, tried: list[str]) -> Witness:
    """The first proof that holds, else "undecided"."""
    for found in itertools.chain.from_iterable(prover(question) for prover in PROVERS):
        return found
    notes = "; ".join(dict.fromkeys(tried)) or "no map leads to the target"
    reason = f"no map of MAPS applies and no proof is known ({notes})"
    return Witness("undecided", reason, "", math.nan, math.nan)


def biases(ask: Question) -> Iterator[Witness]:
    """Each bias alone moves something that the target holds still."""
    x, context, values = draw(ask.source, ask.rng)
    empty = ask.measure(x, context, values, mask=np.zeros((3, 1, 5, 7), bool))
    missing = shown(ask.source) - shown(ask.target)
    rules = {
        "o": ("the output of a row with nothing to attend to", empty, 0 * empty),
        "v": ("the output for values of zero", ask.measure(x, context, 0 * values), empty),
        "q": (
            "the output for queries of zero, when the keys change",
            ask.measure(0 * x, context, values),
            ask.measure(0 * x, -context, values),
        ),
    }
    for letter, (what, got, kept) in rules.items():
        found = float(np.max(np.abs(got - kept)))
        if letter in missing and found > MEASURABLE * max(np.max(np.abs(got)), 1e-300):
            reason = f"without a bias of {letter} {what} cannot move; it moves by {found:.2g}"
            yield Witness("bias", reason, f"{letter}_bias", found, 0.0)


def permutations(ask: Question) -> Iterator[Witness]:
    """Chunks in another order are heads in another order, where one projection serves them all."""
    s, of_heads = ask.target.sizes, ask.target.gate or ask.target.extra_keys
    if ask.target.layout != "narrow_tied" or ask.target.output:
        return
    if of_heads or ask.target.sink == "learnt":  # they know which head they are of
        return
    order = np.roll(np.arange(s["N"]), 1)

    def turn(a):
        return a.reshape(*a.shape[:2], s["N"], -1)[:, :, order].reshape(a.shape)

    inputs = draw(ask.source, ask.rng)
    plain = ask.measure(*inputs)
    found = difference(ask.measure(*map(turn, inputs)), turn(plain))
    if found > MEASURABLE:
        yield Witness(
            "permutation",
            "the target commutes with permuting the chunks of x; the source differs by "
            f"{found:.2g} of its largest output",
            "chunks of x and of the output",
            found,
            0.0,
        )


def chunks(ask: Question) -> Iterator[Witness]:
    """Heads that read chunks give a sum of functions of one chunk each: no mixed differences."""
    n = ask.target.num_heads
    if ask.target.layout not in ("narrow", "narrow_tied") or n == 1 or ask.target.gate:
        return
    first, second = (draw(ask.source, ask.rng) for _ in range(2))

    def mixed(a, b, chunk):
        made = []
        for one, two in zip(a, b, strict=True):
            parts = one.reshape(*one.shape[:2], n, -1).copy()
            parts[:, :, chunk] = two.reshape(parts.shape)[:, :, chunk]
            made.append(parts.reshape(one.shape))
        return ask.measure(*made)

    both = ask.measure(*first), ask.measure(*second)
    totals = [mixed(first, second, i) + mixed(second, first, i) for i in range(n)]
    found = max(difference(total, both[0] + both[1]) for total in totals)
    if found > MEASURABLE:
        yield Witness(
            "permutation",
            "each head of the target reads its own chunk alone, so changes of two chunks add up; "
            f"in the source they miss by {found:.2g} of its largest output",
            "each chunk against the others",
            found,
            0.0,
        )


def ties(ask: Question) -> Iterator[Witness]:
    """The same chunk everywhere gives the same probabilities in all heads of one projection."""
    if ask.target.layout != "narrow_tied" or ask.narrow is None:
        return
    if any(spec.gate or spec.sink or spec.extra_keys for spec in (ask.source, ask.target)):
        return
    w, spec = ask.narrow
    # A head whose values go nowhere may have any probabilities.
    alive = [n for n in range(spec.num_heads) if not spec.output or np.any(w["v"][n] @ w["o"][n])]
    chunks = [a[..., : spec.sizes["C"]] for a in draw(spec, ask.rng)]
    tiled = [np.tile(a, spec.num_heads) for a in chunks]
    seen = np.asarray(probabilities(w, tiled, spec=spec, situation=ask.situation))
    seen = seen[:, alive]
    found = difference(seen, np.broadcast_to(seen[:, :1], seen.shape))
    if found > MEASURABLE:
        yield Witness(
            "permutation",
            "one projection gives the same chunk the same probabilities in every head; the heads "
            f"of the source differ by {found:.2g}",
            "probabilities of equal chunks",
            found,
            0.0,
        )


def ranks(ask: Question) -> Iterator[Witness]:
    """Heads one by one: the rank of their scores, of their values, and their number."""
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None:
        return
    width = ask.target.size(LAYOUTS[ask.target.layout].scores)
    found = ranks_of(forms.scores)
    worst = int(np.argmax(found))
    if found[worst] > width:
        yield Witness(
            "rank",
            f"the scores of a head have rank {found[worst]}, the target's at most {width}"
            + beyond(forms.scores[worst], width),
            f"score matrix of head {worst}",
            found[worst],
            width,
        )
    found = ranks_of(forms.values)
    needed, count = sum(-(-r // s["V"]) for r in found), len(found)
    if needed > s["N"]:
        worst = int(np.argmax(found))
        reason = (
            f"{count} heads differ, the target has {s['N']}"
            if count > s["N"]
            else f"the values of a head have rank {found[worst]}, the target's {s['N']} heads at "
            f"most {s['V']} each" + beyond(forms.values[worst], s["V"])
        )
        worse = (count, s["N"]) if count > s["N"] else (found[worst], s["V"])
        yield Witness("rank", reason, f"value map of head {worst}", *worse)


def groups(ask: Question) -> Iterator[Witness]:
    """Heads that share keys and values: a head that fits to no other cannot be in a group."""
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None or s["K"] == s["N"] or len(forms.scores) != s["N"]:
        return
    shares_keys = ask.target.layout in ("standard", "wide", "two_stage")
    for n in range(s["N"]):
        others = [m for m in range(s["N"]) if m != n]
        pairs = [np.concatenate([forms.values[n], forms.values[m]], axis=1) for m in others]
        values = min(ranks_of(np.stack(pairs)))
        keys = 0
        if shares_keys:
            pairs = [np.concatenate([forms.scores[n], forms.scores[m]]) for m in others]
            keys = min(ranks_of(np.stack(pairs)))
        if values > s["V"] or keys > s["H"]:
            what, found, allowed = (
                ("values", values, s["V"]) if values > s["V"] else ("keys", keys, s["H"])
            )
            yield Witness(
                "rank",
                f"the {what} of two heads have rank {found} together, those of a group of the "
                f"target at most {allowed}: head {n} shares with none",
                f"head {n} beside each other head",
                found,
                allowed,
            )
            return


def reading(ask: Question) -> Iterator[Witness]:
    """A head of `alt` reads C = D/N directions of x in all."""
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None or ask.target.layout != "alt" or len(forms.scores) != s["N"]:
        return
    reads = [forms.scores[:, : s["D"]], forms.scores.swapaxes(1, 2), forms.values[:, : s["W"]]]
    both = np.concatenate(reads, axis=2)
    found = ranks_of(both)
    worst = int(np.argmax(found))
    if found[worst] > s["C"]:
        yield Witness(
            "rank",
            f"a head reads {found[worst]} directions of x, in the target at most {s['C']}"
            + beyond(both[worst], s["C"]),
            f"[A, A^T, W_V W_O] of head {worst}",
            found[worst],
            s["C"],
        )


def states(ask: Question) -> Iterator[Witness]:
    """Tied states: all keys together read K H directions of the text and the P that are turned."""
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None or ask.target.layout != "grouped_tied":
        return
    allowed = s["K"] * s["H"] + s["P"]
    rows = forms.scores.reshape(1, -1, forms.scores.shape[-1])
    found = ranks_of(rows)[0]
    if found > allowed:
        yield Witness(
            "rank",
            f"the keys of all heads read {found} directions of the text, in the target at most "
            f"{allowed}" + beyond(rows[0], allowed),
            "the score matrices of all heads below each other",
            found,
            allowed,
        )


def tensor(ask: Question) -> Iterator[Witness]:
    """Collaborative heads are a sum of R products q_r k_r m_r: a tensor of rank R.

    Beside the ranks of the flattened tensor: three m x m slices with A_2 invertible have rank at
    least m + rank(A_1 A_2^-1 A_3 - A_3 A_2^-1 A_1) / 2 (Strassen 1983, Linear Algebra Appl. 52).
    Sums of slices, in fewer dimensions, are a tensor of no higher rank.
    """
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None or ask.target.layout != "collaborative":
        return
    n, rows, e = forms.scores.shape
    flat = forms.scores.swapaxes(0, 1).reshape(rows, -1), forms.scores.reshape(-1, e)
    dimensions = [ranks_of(a[None])[0] for a in flat]
    found, note, m = max(dimensions), "", min(dimensions)
    what = "the score matrices of all heads side by side"
    if found == s["R"]:
        try:
            diagonalised(forms.scores, s["R"])
        except Refused as refused:
            if refused.amount > 1e-4:  # far from the rounding of an eigenvalue
                what, found, note = "the score matrices of all heads", s["R"] + 1, f": {refused}"
    if dimensions[0] == s["R"] and forms.scores.size**2 < MINORS:
        columns = np.linalg.svd(flat[0], full_matrices=False)[0][:, : s["R"]]
        minors, most = count_minors(columns.T @ forms.scores), s["R"] * (s["R"] - 1) // 2
        if minors > most:
            what, found = "the score matrices of all heads", s["R"] + 1
            note = f": {minors} independent minors of their sums, at most {most} in the target"
    left, right = np.linalg.svd(flat[0])[0][:, :m], np.linalg.svd(flat[1])[2][:m]
    core = left.T @ forms.scores @ right.T
    one, two, three = np.einsum("iN,Nde->ide", ask.rng.normal(size=(3, n)), core)
    if n >= 3 and np.linalg.cond(two) < 1e6:
        commutator = one @ np.linalg.solve(two, three) - three @ np.linalg.solve(two, one)
        values = np.linalg.svd(commutator, compute_uv=False)
        size = np.linalg.norm(one, 2) * np.linalg.norm(three, 2) / np.linalg.norm(two, 2)
        bound = m + math.ceil(np.sum(values > MEASURABLE * size) / 2)
        if bound > found:
            what, found, note = "three sums of the score matrices as one tensor", bound, ""
    if found > s["R"]:
        reason = f"{what} have rank {found} at least, the target's at most {s['R']}{note}"
        yield Witness("rank", reason, what, found, s["R"])


def parameters(ask: Question) -> Iterator[Witness]:
    """Dimension counting: ranks of the derivative of many outputs with respect to the weights."""
    counts = [sum(math.prod(a) for a in spec.shapes.values()) for spec in (ask.source, ask.target)]
    if max(counts) > COUNTED:
        return
    rng = ask.rng
    target = {n: rng.normal(size=a) / a[0] ** 0.5 for n, a in ask.target.shapes.items()}
    source = dimension(ask.w, ask.source, ask.situation, rng)
    reached = dimension(target, ask.target, ask.situation, rng)
    if source is not None and reached is not None and source > reached:
        yield Witness(
            "parameters",
            f"the functions near these weights fill {source} dimensions ({counts[0]} weights), all "
            f"of the target's {reached} ({counts[1]} weights): almost none of them is one",
            "dimensions modulo gauge",
            source,
            reached,
        )


PROVERS = (
    mass, gates, biases, permutations, chunks, ties, squares, shared_basis, ranks, groups, reading,
    states, tensor, value_scale, key_scale, parameters,
)  # fmt: skip
