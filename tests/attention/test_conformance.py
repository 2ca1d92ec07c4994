"""Random calls of every backend that runs here, against a reference in NumPy, float64.

A call is right, or refused by a ValueError or TypeError of attnlab that names an argument.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab.contrib  # noqa: F401
from attnlab import BACKENDS, dot_product_attention, masks
from attnlab.attention import ALiBi, AttentionOptions, RelativeBias, SoftCap, relative_buckets

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 6e-3}
OFTEN = ("dense", "blockwise", "xla", "edges", None)
SELDOM = ("splash", "cudnn")
"""Interpreted, so slow, or refused on this machine."""


def reference(q, k, v, options):
    """Output [B, T, N, V], log sum exp [B, T, N] and the largest score, written out in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (b, t, n, h), s = q.shape, k.shape[1]
    k, v = (np.repeat(a, n // a.shape[2], axis=2) for a in (k, v))
    scale = options.get("scale")
    scores = np.einsum("btnh,bsnh->bnts", q, k) * (h**-0.5 if scale is None else float(scale))
    if options.get("bias") is not None:
        scores = scores + np.asarray(options["bias"], np.float64)
    if cap := options.get("logits_soft_cap"):
        scores = cap * np.tanh(scores / cap)
    distance = np.arange(s)[None] - np.arange(t)[:, None]
    for mod in options.get("score_mods", ()):
        scores = modified(scores, mod, distance)
    before, after = options.get("talking_heads") or (None, None)
    if before is not None:
        scores = np.einsum("bnts,nm->bmts", scores, np.asarray(before, np.float64))
    allowed = np.broadcast_to(allowed_in(options, b, t, s), scores.shape)
    weights = np.where(allowed, scores, -np.inf)
    sink = options.get("sink")
    top = weights.max(-1, keepdims=True)
    if sink is not None:
        sink = np.broadcast_to(np.asarray(sink, np.float64), top.shape)
        top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(weights - top)
    total = weights.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    largest = np.abs(np.where(allowed, scores, 0)).max()
    with np.errstate(divide="ignore"):
        residual = (top + np.log(total))[..., 0].swapaxes(1, 2)
    probs = weights / np.where(total > 0, total, 1)
    if after is not None:
        probs = np.einsum("bmts,mn->bnts", probs, np.asarray(after, np.float64))
    return np.einsum("bnts,bsnv->btnv", probs, v), residual, largest


def modified(scores, mod, distance):
    if isinstance(mod, SoftCap):
        cap = np.asarray(mod.cap, np.float64).reshape(-1, 1, 1)
        return cap * np.tanh(scores / cap)
    if isinstance(mod, ALiBi):
        return scores + np.asarray(mod.slopes, np.float64)[:, None, None] * distance
    buckets = relative_buckets(
        jnp.asarray(distance), num_buckets=mod.table.shape[1], max_distance=mod.max_distance,
        two_sided=mod.two_sided,
    )  # fmt: skip
    return scores + np.asarray(mod.table, np.float64)[:, np.asarray(buckets)]


def allowed_in(options, b, t, s):
    row, key = np.arange(t)[:, None], np.arange(s)[None]
    allowed = np.ones((b, 1, t, s), bool)
    if options.get("is_causal"):
        allowed &= key <= row
    if (window := options.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed &= (row - left <= key) & (key <= row + right)
    if (lengths := options.get("query_seq_lengths")) is not None:
        allowed &= row < np.reshape(lengths, (b, 1, 1, 1))
    if (lengths := options.get("key_value_seq_lengths")) is not None:
        allowed &= key < np.reshape(lengths, (b, 1, 1, 1))
    mask = options.get("mask")
    if isinstance(mask, masks.Edges):
        mask = np.asarray(mask.matrix(t, s))
        mask = mask if mask.ndim == 4 else mask[None]
    return allowed if mask is None else allowed & np.asarray(mask)


def draw_call(rng):
    """(q, k, v, options): shapes of 1 to 8, sometimes above a block; every option now and then."""
    pick = lambda *values: values[rng.integers(len(values))]
    seldom = lambda: rng.random() < 0.2
    name = pick(*OFTEN, *OFTEN, *OFTEN, *OFTEN, *OFTEN, *SELDOM)
    small = lambda: int(rng.integers(1, 8))
    b, t, s, h, v = int(rng.integers(1, 4)), small(), small(), small(), small()
    if name in ("blockwise", None) and rng.random() < 0.15:
        t, s = int(rng.integers(1, 700)), int(rng.integers(500, 1200))
    k, kv = pick((1, 1), (2, 2), (1, 2), (2, 1), (3, 3))
    n = int(np.lcm(k, kv)) * int(rng.integers(1, 3))
    dtype = pick("float32", "float32", "float32", "bfloat16", "float16")
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    any_of = lambda *sizes: tuple(pick(1, size) for size in sizes)
    options = {"implementation": name, "is_causal": bool(seldom() or seldom())}
    if seldom():
        options["bias"] = jnp.asarray(rng.normal(size=any_of(b, n, t, s)), "float32")
    if name == "edges" or rng.random() < 0.05:
        count = int(rng.integers(1, t * s + 1))
        flat = rng.permutation(t * s)[:count]
        ends = np.append(flat % s, [s, s]), np.append(flat // s, [t, t])
        options["mask"] = masks.Edges(*map(jnp.asarray, ends))
        options["is_causal"] = False
    elif seldom():
        options["mask"] = jnp.asarray(rng.random(any_of(b, n, t, s)) < 0.6)
    if seldom():
        options["scale"] = pick(0.3, 1, jnp.float32(0.7))
    if name != "edges" or seldom():
        for side in ("query", "key_value"):
            if seldom():
                options[f"{side}_seq_lengths"] = jnp.asarray(rng.integers(0, 12, b))
        if seldom():
            options["local_window_size"] = pick(0, 2, (1, 3), (3, 0), (0, 2), (10**9, 1))
    if seldom():
        options["logits_soft_cap"] = pick(0.7, 3.0)
    if seldom():
        options["score_mods"] = draw_mods(rng, n)
    if seldom():
        options["sink"] = jnp.asarray(rng.normal(size=any_of(b, n, t, 1)), "float32")
    if rng.random() < 0.07:
        options["talking_heads"] = tuple(rng.normal(size=(2, n, n)).astype("float32"))
    return array(b, t, n, h), array(b, s, k, h), array(b, s, kv, v), options


def draw_mods(rng, n):
    number = lambda *shape: jnp.asarray(rng.normal(size=shape), "float32")
    known = (
        SoftCap(1 + abs(number(n))),
        SoftCap(2.0),
        ALiBi(number(n)),
        RelativeBias(number(n, 8), max_distance=9),
        RelativeBias(number(n, 5), max_distance=9, two_sided=False),
    )
    return [known[i] for i in rng.permutation(len(known))[: rng.integers(1, 4)]]


def spoil(rng, q, k, v, options):
    """One thing wrong: a shape, a kind, a keyword or a value."""
    changes = {
        "bias": np.ones((1, 1, 99, 99), "float32"),
        "mask": np.ones(q.shape[1:2]),
        "query_seq_lengths": np.ones(9, int),
        "key_value_seq_lengths": np.ones(q.shape[0]),
        "local_window_size": (-1, 0),
        "logits_soft_cap": -1.0,
        "dropout_rate": 1.5,
        "sink": np.ones((7, 7, 7, 7), "float32"),
        "score_mods": [ALiBi(jnp.ones(99))],
        "talking_heads": (np.ones((99, 3), "float32"), None),
        "implementation": "flash",
        "causal": True,
        "scale": "large",
    }
    name = list(changes)[rng.integers(len(changes))]
    return q, k, v, options | {name: changes[name]}


def outcome(seed):
    """(backend, what happened) of one random call: "right", "refused", or what went wrong."""
    rng = np.random.default_rng([26, seed])
    q, k, v, options = draw_call(rng)
    bad = rng.random() < 0.1
    if bad:
        q, k, v, options = spoil(rng, q, k, v, options)
    name = str(options["implementation"])
    arrays = {n: a for n, a in options.items() if isinstance(a, jax.Array)}
    rest = {n: a for n, a in options.items() if n not in arrays}
    residual = bool(rng.random() < 0.2)
    gradient = bool(rng.random() < 0.3)

    def run(q, k, v, arrays):
        return dot_product_attention(q, k, v, return_residual=residual, **arrays, **rest)

    def loss(q, k, v, arrays):
        made = run(q, k, v, arrays)
        out = (made[0] if residual else made).astype(jnp.float32)
        return jnp.sum(jnp.sin(out)), made

    try:
        if gradient:
            f = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
            (_, made), grads = jax.jit(f)(q, k, v, arrays)
        else:
            made, grads = jax.jit(run)(q, k, v, arrays), ()
        jax.block_until_ready((made, grads))
    except (TypeError, ValueError) as error:
        known = (*vars(AttentionOptions()), "query", "key", "value")
        named = any(word in str(error) for word in (*known, *BACKENDS))
        return name, "refused" if named and (
            bad or options["implementation"]
        ) else f"{error!r:.300}"
    except Exception as error:
        return name, f"{seed}: bare {type(error).__name__}: {error!s:.300}"
    if bad:
        return name, f"{seed}: a bad call ran: {options}"
    return name, judged(seed, made, grads, reference(q, k, v, options), q.dtype, residual)


def judged(seed, made, grads, expected, dtype, residual):
    """ "right", or how far the results are from the reference."""
    out, lse = made if residual else (made, None)
    # A score of a thousand is rounded to 1e-4 in float32, and so is its probability.
    tolerance = TOLERANCE[str(dtype)] + 2**-22 * expected[2]
    scale = max(np.abs(expected[0]).max(), 0.1)
    apart = np.abs(np.asarray(out, np.float64) - expected[0]).max() / scale
    if not apart <= tolerance:
        return f"{seed}: output differs by {apart:.2g}"
    if lse is not None:
        lse, wanted = np.asarray(lse, np.float64), expected[1]
        some = np.isfinite(wanted)
        if (np.isfinite(lse) != some).any():
            return f"{seed}: residual is finite elsewhere"
        if np.abs(lse[some] - wanted[some]).max(initial=0) > tolerance * (
            1 + np.abs(wanted[some]).max(initial=0)
        ):
            return f"{seed}: residual differs"
    if not all(np.isfinite(np.asarray(g, np.float64)).all() for g in grads):
        return f"{seed}: a gradient is not finite"
    return "right"


def conform(seeds):
    counts = collections.Counter(map(outcome, seeds))
    wrong = [f"{name}: {what}" for name, what in counts if what not in ("right", "refused")]
    assert not wrong, "\n".join(wrong)
    return counts


@functools.cache
def few():
    return conform(range(60))


def test_sixty_random_calls_are_right_or_refused_by_name():
    counts = few()
    for name in ("dense", "blockwise", "xla", "edges", "None"):
        assert counts[name, "right"], name


@pytest.mark.slow
def test_two_thousand_random_calls_are_right_or_refused_by_name():
    counts = collections.Counter()
    for start in range(0, 2000, 100):
        counts += conform(range(start, start + 100))
        jax.clear_caches()
    print(sorted(counts.items()))
    assert sum(counts.values()) == 2000
