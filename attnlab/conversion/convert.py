"""From one head layout to another: the same function with a certificate, or a witness why not."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attnlab.conversion.factors import stacked_scores, truncated
from attnlab.conversion.measure import Situation, difference, draw, float64, masks, outputs
from attnlab.conversion.question import Question, Witness
from attnlab.conversion.search import Node, search
from attnlab.conversion.specs import ending, settled
from attnlab.conversion.weights import queries, rescale
from attnlab.conversion.witness import prove
from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.maps import Weights
from attnlab.heads.old.spec import HeadSpec, absorption, weight_axes


class Certificate(NamedTuple):
    """Two sets of weights are one function: what was done, and what was measured.

    Differences are relative to the largest expected value, over random inputs: 5 queries that see
    7 keys, the first 3 of them, and a random choice that leaves one query nothing. x, context and
    value context are different arrays, of different widths where the spec has them.
    """

    maps: tuple[str, ...]
    """Rows of `MAPS`, in order."""
    forward: float
    """Largest difference of the outputs [B, T, O]."""
    gradient: float
    """Largest difference of the gradients of sum(output * random) with respect to x [B, T, D],
    context [B, S, E] and value context [B, S, W]: what both sides share."""


class Truncation(NamedTuple):
    """What a low-rank approximation of the scores costs."""

    spec: HeadSpec
    """Of the weights that are returned: `standard` with head_dim = rank."""
    score_error: np.ndarray
    """[N]: |A - A'| / |A| in the Frobenius norm, A = W_Q W_K^T (the query bias is one more row)."""
    output_difference: float
    """Largest difference of the outputs on random inputs, relative to the largest output."""


def convert(
    params: Weights,
    source: HeadSpec,
    target: HeadSpec,
    *,
    rotary: bool = False,
    logits_soft_cap: float | None = None,
    key: Array | None = None,
) -> tuple[Weights, Certificate] | tuple[None, Witness]:
    """The weights of `target` that are the same function as `params`, or why there are none.

    The shortest way through `maps.MAPS` is taken, steps that always hold before those that need
    weights with a structure. It is exact for those very weights: a float32 product is not of low
    rank, since its rounding is not; `truncate` takes the rank and says what it costs. What stands
    beside the rows (gates, sinks, extra keys, ties, norms) may differ too; a learnt sink from none
    is exact to the precision of a dtype (`never_sink`), all else in exact numbers. All is done
    in float64, whatever the global flag. The certificate is of the weights before they are cast
    back to the dtype of `params` (NumPy arrays give NumPy arrays), and below 1e-12 for weights of
    the size of `init_heads`.

    Args:
      params: the weights of `source`.
      rotary: are q and k turned by rotary positions? They see the head width, so fewer maps hold.
      logits_soft_cap: is one used? Then the key bias no longer cancels.
      key: for the random inputs; None is a fixed one.

    Returns: (weights, `Certificate`), or (None, `Witness`).

    Raises: ValueError for weights that do not fit `source`, and for specs whose inputs or outputs
      differ in width: those are no functions of the same x.

    >>> from attnlab import init_heads
    >>> narrow = HeadSpec("narrow", width=6, num_heads=2)
    >>> wide = HeadSpec("wide", width=6, num_heads=2)
    >>> w, certificate = convert(init_heads(jax.random.key(0), narrow), narrow, wide)
    >>> certificate.maps
    ('spread', 'rename', 'pad_head_dim', 'pad_value_dim', 'rescale')
    >>> convert(w, wide, HeadSpec("standard", 6, 2))[1].maps[-2:]
    ('factor_keys', 'rescale')
    """
    _check_ends(source, target)
    situation = Situation(rotary, logits_soft_cap)
    with float64():
        w, cast = _wide(params, source)
        rng = _generator(key)
        found, reached, tried = search(w, source, target, situation)
        if found is None:
            absorbed, narrow = reached.get("absorbed"), reached.get("narrow")
            question = Question(
                w,
                source,
                target,
                situation,
                rng,
                _unscaled(absorbed) if absorbed else None,
                (narrow.weights, narrow.spec) if narrow else None,
            )
            return None, prove(question, tried)
        new = {name: found.weights[name] for name in target.shapes}
        forward, gradient = _compare(w, source, new, target, situation, rng)
        return cast(new), Certificate(found.maps, forward, gradient)


def _unscaled(node: Node) -> Weights:
    """The weights with the scale of the scores within."""
    return rescale(node.weights, node.spec, dataclasses.replace(node.spec, scale=1.0))


def _compare(w, source, new, target, situation, rng) -> tuple[float, float]:
    """Largest relative differences of outputs and of gradients with respect to the inputs."""
    inputs, cotangent = draw(source, rng), rng.normal(size=(3, 5, source.sizes["O"]))
    one, two = (
        outputs(a, inputs, spec, situation, masks(), cotangent)
        for a, spec in ((w, source), (new, target))
    )
    return difference(two[0], one[0]), max(map(difference, two[1], one[1]))


def permute_heads(params: Weights, spec: HeadSpec, order: list[int]) -> Weights:
    """The same function with its heads in another order: new head n is old head order[n].

    Heads that share keys and values stay together. Raises ValueError where the place of a head
    means something: its chunk of x (`narrow`, `narrow_tied`), or of the output (output=False).

    >>> from attnlab import init_heads
    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> bool((permute_heads(w, spec, [1, 0])["q"][:, 0] == w["q"][:, 1]).all())
    True
    """
    s = spec.sizes
    if sorted(order) != list(range(s["N"])):
        raise ValueError(f"order must hold each of 0..{s['N'] - 1} once, not {order}")
    makes_chunks = any("C" in one.makes for one in spec.maps.values())
    reads_chunks = any("C" in one.reads for one in spec.maps.values())
    if (reads_chunks and not makes_chunks) or not spec.output:
        part = "its chunk of the output" if not spec.output else "its chunk of x"
        raise ValueError(f"head n of {spec.layout!r} is tied to {part}: convert it first")
    grouped = "K" in "".join(axes for _, axes in weight_axes(spec))
    size = s["N"] // s["K"] if grouped else 1
    key_heads = [n // size for n in order[::size]]
    if any(order[n] // size != key_heads[n // size] for n in range(s["N"])):
        raise ValueError(
            f"order {order} splits heads that share keys and values; "
            f"keep each {size} neighbours together, or repeat the key heads first"
        )
    with float64():
        w, cast = _wide(params, spec)
        turned = {
            name: np.take(a, order, axes.index("N")) if "N" in axes
            else np.take(a, key_heads, axes.index("K")) if "K" in axes
            else a
            for name, axes in weight_axes(spec) for a in [w[name]]
        }  # fmt: skip
        return cast(turned)


def regauge(
    params: Weights, spec: HeadSpec, *, qk: Any = None, vo: Any = None, rotary: bool = False
) -> Weights:
    """The same function in other bases: q -> q A, k -> k A^-T; v -> v B, o -> B^-1 o.

    Args:
      qk: A, [H, H] for all heads or one per key head [K, H, H] (per head [N, H, H] where those of
        a key head agree).
      vo: B, [V, V] or [K, V, V] likewise.
      rotary: q and k are turned by rotary positions: A must commute with that.

    Raises: ValueError for other shapes, and where the layout has no such freedom.

    >>> from attnlab import init_heads
    >>> spec = HeadSpec("standard", width=6, num_heads=2)
    >>> w = init_heads(jax.random.key(0), spec)
    >>> regauge(w, spec, qk=2 * jnp.eye(3))["q"].shape
    (6, 2, 3)
    """
    with float64():
        w, cast = _wide(params, spec)
        if spec.ties and (qk is not None or (vo is not None and "v" in spec.ties)):
            what = "vo" if qk is None else "qk"
            raise ValueError(
                f"maps that ties {spec.ties!r} makes one have one basis; leave {what} out"
            )
        if qk is not None:
            queries, keys = ending(spec, "H", "query"), ending(spec, "H", "store", "read")
            if not queries or not keys:
                raise ValueError(f"layout {spec.layout!r} has no q and k per head; leave qk out")
            if spec.qk_norm:
                raise ValueError(
                    f"qk_norm {spec.qk_norm!r} sees the basis of q and k; leave qk out"
                )
            a = _bases("qk", qk, spec, keys[0])
            if rotary and LAYOUTS[spec.layout].turned == "H" and not _turns_alike(a):
                raise ValueError(
                    "qk does not commute with rotary positions: only [[a, -b], [b, a]] on the "
                    "pairs (i, i + H/2) does"
                )
            inverse = np.linalg.inv(a).swapaxes(-1, -2)
            w |= _apply(w, spec, dict.fromkeys(queries, a) | dict.fromkeys(keys, inverse))
        if vo is not None:
            values = ending(spec, "V", "store", "read")
            outputs = [name for name, one in spec.maps.items() if one.reads == "NV"]
            if not values or not outputs:
                raise ValueError(f"layout {spec.layout!r} has no v and o per head; leave vo out")
            if spec.gate == "element":
                raise ValueError("a gate per element sees the basis of v; leave vo out")
            own_keys = spec.ties or ending(spec, "H", "store", "read")
            if "H" in LAYOUTS[spec.layout].scores and not own_keys:
                raise ValueError(f"values of layout {spec.layout!r} are its keys; leave vo out")
            b = _bases("vo", vo, spec, values[0])
            each = np.broadcast_to(b, (spec.num_heads, *b.shape[1:])) if len(b) == 1 else np.repeat(
                b, spec.num_heads // len(b), axis=0
            )  # fmt: skip
            w |= _apply(w, spec, dict.fromkeys(values, b))
            w |= {name: np.linalg.inv(each) @ w[name] for name in outputs}
        return cast(w)


def _bases(argument: str, a: Any, spec: HeadSpec, weight: str) -> np.ndarray:
    """One matrix per head of `weight`, or one for all: [1 or K, H, H]."""
    a, s, axes = np.asarray(a, np.float64), spec.sizes, spec.maps[weight].axes
    heads = s["K"] if "K" in axes else s["N"] if "N" in axes else 1
    shape = (s[axes[-1]], s[axes[-1]])
    if a.shape == (s["N"], *shape) and heads < s["N"]:
        parts = a.reshape(heads, -1, *shape)
        if np.any(parts != parts[:, :1]):
            raise ValueError(f"{argument} must be the same for all heads of one {weight} head")
        a = parts[:, 0]
    if a.shape not in (shape, (heads, *shape)):
        raise ValueError(
            f"{argument} has shape {a.shape}; layout {spec.layout!r} takes {shape} or "
            f"{(heads, *shape)}"
        )
    return a.reshape(-1, *shape)


def _apply(w: Weights, spec: HeadSpec, bases: dict[str, np.ndarray]) -> Weights:
    """The last axis of each weight times the basis of its head."""
    made, sizes = {}, dict(spec.sizes)
    for name, axes in weight_axes(spec):
        if name not in bases:
            continue
        head = next((a for a in axes if a in "KN"), "")
        basis = bases[name]
        if head:
            basis = np.repeat(basis, sizes[head] // len(basis), axis=0)
        made[name] = np.einsum(f"{axes},{head}{axes[-1]}z->{axes[:-1]}z", w[name],
                               basis if head else basis[0])  # fmt: skip
    return made


def _turns_alike(a: np.ndarray) -> bool:
    """Does each matrix commute with turning every pair (i, i + H/2) by an angle of its own?"""
    half = a.shape[-1] // 2
    angles = np.arange(1, half + 1) / half
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    turn = np.block([[cos, sin], [-sin, cos]])
    return bool(np.allclose(a @ turn, turn @ a, rtol=0, atol=1e-12 * np.max(np.abs(a))))


def truncate(
    params: Weights, spec: HeadSpec, rank: int, *, key: Array | None = None
) -> tuple[Weights, Truncation]:
    """The scores of each head at a lower rank: the nearest there are, by truncated SVD.

    A_n = W_Q W_K^T (or the matrix of `bilinear`) -> U sqrt(S), V sqrt(S) of its `rank` largest
    singular values, as a `standard` spec with head_dim=rank and the scale of `spec` (Eckart and
    Young 1936; Bhojanapalli et al. 2020, arXiv 2002.07028, on what rank scores need). Every head
    gets keys of its own. The values stay as they are.

    Raises: ValueError for a rank below 1, q/k norm, extra keys, a key bias beside a sink, or a
      layout that does not lead to `bilinear`.

    >>> from attnlab import init_heads
    >>> spec = HeadSpec("bilinear", width=6, num_heads=2)
    >>> w, cost = truncate(init_heads(jax.random.key(0), spec), spec, 2)
    >>> cost.spec.layout, w["q"].shape, bool((cost.score_error > 0).all())
    ('standard', (6, 2, 2), True)
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, not {rank}")
    steps = absorption(spec)
    specs = [spec, *(step.spec for step in steps)]
    at = next((i for i, one in enumerate(specs) if one.layout == "bilinear"), None)
    reasons = {
        "no qk_norm": spec.qk_norm,
        "no extra_keys, which are in the basis of q and k": spec.extra_keys,
        "no key bias, which a sink sees": spec.sink and spec.tied["k"] in spec.biases,
        f"not layout {spec.layout!r}": at is None,
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if at is None or reason:
        raise ValueError(f"truncate needs plain scores q k^T: {reason}")
    with float64():
        w, cast = _wide(params, spec)
        new: Weights = {n: jnp.asarray(a) for n, a in w.items()}
        for step in steps[:at]:
            new = step.weights(new)
        reached = specs[at]
        node = Node(settled(reached), {n: np.asarray(a) for n, a in new.items()})
        each = settled(reached, num_kv_heads=spec.num_heads)
        node = node if node.spec == each else Node(each, None, node, "repeat_heads")
        left, right, values = truncated(stacked_scores(node.weights), rank)
        new = {n: a for n, a in node.weights.items() if n not in ("qk", "q_bias")}
        new |= queries(left, node.spec) | {"k": np.moveaxis(right, 2, 0)}
        low = settled(node.spec, "standard", head_dim=rank)
        total = np.sqrt(np.sum(values**2, axis=-1))
        error = np.sqrt(np.sum(values[:, rank:] ** 2, axis=-1)) / np.maximum(total, 1e-300)
        forward, _ = _compare(w, spec, new, low, Situation(), _generator(key))
        return cast(new), Truncation(low, error, forward)


def _check_ends(source: HeadSpec, target: HeadSpec) -> None:
    """Both must read the same inputs and write the same output."""
    names = {"D": "width", "E": "key_width", "W": "value_width", "O": "width of the output"}
    for letter, name in names.items():
        one, two = source.sizes[letter], target.sizes[letter]
        if one != two:
            raise ValueError(
                f"source has {name} {one}, target {two}: they are no functions of the same inputs; "
                "give both specs the same widths"
            )


def _wide(params: Weights, spec: HeadSpec) -> tuple[Weights, Callable[[Weights], Weights]]:
    """The weights in float64, and what makes others of the kind and dtype that they had.

    Raises ValueError with the name of a weight that does not fit `spec`.
    """
    shapes, axes = spec.shapes, dict(weight_axes(spec))
    for name in sorted(set(params) | set(shapes)):
        wanted = f"{' '.join(axes[name])} = {shapes[name]}" if name in shapes else "no such weight"
        got = f"of shape {np.shape(params[name])}" if name in params else "missing"
        if name not in params or name not in shapes or np.shape(params[name]) != shapes[name]:
            raise ValueError(f"weight {name!r} is {got}, expected is {wanted}, for {spec}")
    w = {name: np.asarray(params[name], np.float64) for name in shapes}
    for name, a in w.items():
        if not np.all(np.isfinite(a)):
            raise ValueError(f"weight {name!r} holds NaN or inf")
    numpy = all(isinstance(a, np.ndarray) for a in params.values())
    with float64():
        dtype = jnp.result_type(*params.values())
    make = np.array if numpy else jnp.asarray

    def cast(new: Weights) -> Weights:
        with jax.default_device(None):
            return {name: make(a, dtype) for name, a in new.items()}

    return w, cast


def _generator(key: Array | None) -> np.random.Generator:
    seed = 0 if key is None else int(jax.random.randint(key, (), 0, 2**31 - 1))
    return np.random.default_rng(seed)
