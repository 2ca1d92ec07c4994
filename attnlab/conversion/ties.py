"""Exact maps between heads whose maps are one and heads that have each its own; and why not.

Per head, A = scale W_Q W_K^T and B = W_V W_O are settled by the function, the maps are not. K = V
asks for one W with A^T and B between its columns: rank [A^T B] <= H. Q = K asks for A = W W^T: A is
symmetric and has no negative eigenvalue. Both ask for the columns of B among those of A.
"""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from attnlab.conversion.factors import Refused, same, split, tolerance
from attnlab.conversion.forms import beyond, forms_of, ranks_of
from attnlab.conversion.measure import MEASURABLE
from attnlab.conversion.question import Question, Witness
from attnlab.conversion.specs import settled, untied
from attnlab.conversion.weights import keep
from attnlab.heads.old.absorb import untie_maps
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec


def apart(spec, goal):
    """Every map of its own."""
    if spec.ties:
        yield untied(spec)


def copies(w, spec, reached):
    return untie_maps(spec).weights({n: jnp.asarray(a) for n, a in w.items()})


def tied(steps: dict[str, str]) -> Callable:
    """From these ties to those, where all else is as in the goal."""

    def reach(spec, goal):
        after = steps.get(spec.ties)
        wanted = after in (goal.ties, "qk") and set(after or "") <= set(goal.ties)
        if wanted and after and spec == _under(untied(goal), spec.ties):
            yield _under(untied(goal), after)

    return reach


def _under(spec: HeadSpec, ties: str) -> HeadSpec:
    """The untied spec with these ties, less the biases that are then another's."""
    letters = HeadSpec.bias_letters(spec.layout, spec.output, ties)
    return settled(spec, ties=ties, biases="".join(a for a in spec.biases if a in letters))


def _rows(w: Weights, spec: HeadSpec, name: str, bias: bool = True) -> np.ndarray:
    """A map by its heads, what stands before it multiplied in, its bias below: [K, D (+1), H]."""
    axes, a = spec.maps[name].axes, w[name]
    head = next((x for x in axes if x in "NK"), "")
    a = np.moveaxis(a, axes.index(head), 0) if head else a[None]
    if f"{name}_outer" in w:
        a = w[f"{name}_outer"] @ a
    if bias and f"{name}_bias" in w:
        a = np.concatenate([a, w[f"{name}_bias"].reshape(len(a), 1, -1)], axis=1)
    return a


def _made(rows: np.ndarray, w: Weights, spec: HeadSpec, name: str) -> Weights:
    """`_rows` backwards; what stood before the map is the identity."""
    axes, made = spec.maps[name].axes, {}
    if f"{name}_bias" in w:
        rows, last = rows[:, :-1], rows[:, -1]
        made[f"{name}_bias"] = last.reshape(w[f"{name}_bias"].shape)
    if f"{name}_outer" in w:
        made[f"{name}_outer"] = np.eye(len(w[f"{name}_outer"]))
    head = next((x for x in axes if x in "NK"), "")
    return made | {name: np.moveaxis(rows, 0, axes.index(head)) if head else rows[0]}


def tie_queries(w, spec, reached):
    """q = c k with c > 0 for each number of a head, or for a pair of them that positions turn."""
    q, k = _rows(w, spec, "q"), _rows(w, spec, "k")
    if q.shape != k.shape:
        raise Refused("one of q and k has a bias")
    pairs = 2 if spec.sizes["H"] % 2 == 0 else 1
    split_ = lambda a: a.reshape(*a.shape[:2], pairs, -1)
    one, two = split_(q), split_(k)
    dot = lambda a, b: np.sum(a * b, axis=(1, 2), keepdims=True)
    square = dot(two, two)
    ratio = np.where(square > 0, dot(one, two) / np.where(square > 0, square, 1), 1)
    if spec.qk_norm:
        ratio = np.ones_like(ratio)
    if np.min(ratio) <= 0 or not same(one, ratio * two):
        raise Refused("q is no positive multiple of k, number by number of a head")
    root = np.sqrt(ratio)
    made = _made((root * two).reshape(q.shape), w, spec, "q")
    if spec.extra_keys:
        keys = np.moveaxis(w["extra_k"], 1, 0)  # [K, A, H]
        keys = (root * split_(keys)).reshape(keys.shape)
        made["extra_k"] = np.moveaxis(keys, 0, 1)
    return keep(w | made, spec, reached)


def _root(a: np.ndarray, width: int) -> np.ndarray:
    """a = W W^T -> W [D, width]; Refused where there is none."""
    if not same(a, a.T):
        lacking = np.max(np.abs(a - a.T)) / np.max(np.abs(a))
        raise Refused(f"its scores are not symmetric: by {lacking:.2g} of the largest", lacking)
    values, vectors = np.linalg.eigh((a + a.T) / 2)
    small = tolerance(*a.shape) * np.max(np.abs(values), initial=0)
    if values.size and values[0] < -small:
        raise Refused(f"its scores have the eigenvalue {values[0]:.2g}", -values[0])
    order = [i for i in np.argsort(-values) if values[i] > small]
    if len(order) > width:
        raise Refused(f"its scores have rank {len(order)}, beyond {width}")
    made = vectors[:, order] * np.sqrt(values[order])
    return np.pad(made, [(0, 0), (0, width - made.shape[1])])


def tie_squares(w, spec, reached):
    """W_Q W_K^T = W W^T for each head; a query bias b' with W b' = W_K b."""
    q, k = (_rows(w, spec, n, bias=False) for n in "qk")
    made = []
    for n, a in enumerate(q @ k.swapaxes(1, 2)):
        try:
            made.append(_root(a, spec.sizes["H"]))
        except Refused as reason:
            raise Refused(f"head {n}: {reason}", reason.amount) from None
    rows = np.stack(made)
    if "q" in spec.biases:
        wanted = k @ w["q_bias"].reshape(len(k), -1, 1)
        bias = np.linalg.pinv(rows, rcond=1e-10) @ wanted
        if not _close(rows @ bias, wanted):
            raise Refused("the query bias asks for more than the scores")
        rows = np.concatenate([rows, bias.swapaxes(1, 2)], axis=1)
    return keep(w | _made(rows, w, spec, "q"), spec, reached)


def _close(got: np.ndarray, wanted: np.ndarray) -> bool:
    """As good as the rounding of a pseudo-inverse allows."""
    return bool(np.max(np.abs(got - wanted)) <= 1e-11 * np.max(np.abs(wanted), initial=1e-300))


def tie_values(w, spec, reached):
    """v_n W_O,n = k_n W'_O,n: the values are read from the keys by the output map."""
    by = spec.tied["k"]
    k, v = _rows(w, spec, by), _rows(w, spec, "v")
    if k.shape[1] != v.shape[1]:
        raise Refused("one of k and v has a bias")
    rest = {n: a for n, a in w.items() if n in reached.shapes}
    if not spec.output or spec.gate == "element":
        if not same(v, k):
            raise Refused("keys and values differ, and their basis is that of the output")
        return rest
    if spec.extra_keys and not same(v, k):
        raise Refused("keys and values differ, and extra values are in the basis of the values")
    o = w["o"].reshape(len(k), -1, *w["o"].shape[1:])
    wanted = v[:, None] @ o
    made = np.linalg.pinv(k, rcond=1e-10)[:, None] @ wanted
    if not _close(k[:, None] @ made, wanted):
        raise Refused("the values are no product of the keys")
    return rest | {"o": made.reshape(w["o"].shape)}


def tie_ranges(w, spec, reached):
    """One basis of the columns of A^T and B of a key head. A key bias is free, so it is that which
    adds no rank."""
    if not spec.output:
        raise Refused("without an output map values have a basis")
    s = spec.sizes
    k, v = _rows(w, spec, "k", bias=False), _rows(w, spec, "v")
    groups, texts = k.shape[:2]
    by_group = lambda a: a.reshape(groups, -1, *a.shape[1:])
    q = by_group(_rows(w, spec, "q"))  # [K, N/K, D (+1), H]
    scores = k[:, None] @ q.swapaxes(2, 3)
    values = v[:, None] @ by_group(w["o"])
    side = lambda a: np.concatenate(list(np.moveaxis(a, 1, 0)), axis=2)
    both = [side(scores), side(values)]
    if "v" in spec.biases:
        last = both[1][:, texts:] @ np.linalg.pinv(both[1][:, :texts], rcond=1e-10)
        both[0] = np.concatenate([both[0], last @ both[0]], axis=1)
    # The sizes of scores and values say nothing about each other.
    sizes = [np.maximum(np.max(np.abs(a), axis=(1, 2), keepdims=True), 1e-300) for a in both]
    one = np.concatenate([a / size for a, size in zip(both, sizes, strict=True)], axis=2)
    rows, right = split(one, s["H"], "keys and values of key head")
    parts = np.split(right, [both[0].shape[2]], axis=2)
    new_q, new_o = (
        (part * size).reshape(groups, s["H"], -1, a.shape[-2 if a is q else -1])
        for part, size, a in zip(parts, sizes, (q, w["o"]), strict=True)
    )
    made = _made(np.moveaxis(new_q, 1, 3).reshape(-1, q.shape[2], s["H"]), w, spec, "q")
    made |= _made(rows, w, spec, "k") | {"o": np.moveaxis(new_o, 1, 2).reshape(w["o"].shape)}
    return keep(w | made, spec, reached)


def squares(ask: Question) -> Iterator[Witness]:
    """Q = K: the score matrix of every head is W W^T, times the sign of the scale."""
    forms, d = forms_of(ask), ask.target.width
    if forms is None or "q" not in ask.target.ties:
        return
    for n, a in enumerate(forms.scores[:, :d] * np.sign(ask.target.score_scale)):
        size = np.max(np.abs(a))
        odd = np.max(np.abs(a - a.T)) / size if size > 0 else 0.0
        least = np.linalg.eigvalsh((a + a.T) / 2)[0] / size if size > 0 else 0.0
        if odd > MEASURABLE or least < -MEASURABLE:
            what = (
                f"not symmetric, by {odd:.2g} of its largest number"
                if odd > MEASURABLE
                else f"symmetric with an eigenvalue of {least:.2g} of it"
            )
            yield Witness(
                "symmetry",
                f"where queries are keys, scores are x W W^T y; those of a head are {what}",
                f"score matrix of head {n}",
                odd if odd > MEASURABLE else float(least),
                0.0,
            )
            return


def shared_basis(ask: Question) -> Iterator[Witness]:
    """K = V: scores and values of a head read the same H directions of the text."""
    forms, s = forms_of(ask), ask.target.sizes
    if forms is None or "v" not in ask.target.ties or len(forms.scores) != s["N"]:
        return
    parts = forms.scores.swapaxes(1, 2), forms.values[:, : s["W"]]
    sizes = [np.maximum(np.max(np.abs(a), axis=(1, 2), keepdims=True), 1e-300) for a in parts]
    both = np.concatenate([a / size for a, size in zip(parts, sizes, strict=True)], axis=2)
    found = ranks_of(both)
    worst = int(np.argmax(found))
    if found[worst] > s["H"]:
        yield Witness(
            "rank",
            f"scores and values of a head read {found[worst]} directions of the text together, in "
            f"the target at most {s['H']}" + beyond(both[worst], s["H"]),
            f"[A^T, W_V W_O] of head {worst}",
            found[worst],
            s["H"],
        )
