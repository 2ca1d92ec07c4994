"""The contract of all backends: random calls against the definition, in float64 where they can.

A call is right, or refused by a ValueError or TypeError of attnlab that names an argument. Right
means: output, log sum exp and the gradients of every array, and that what no query may attend to,
queries that attend to nothing, and one text of those that are packed, may hold NaN or infinities.
"""

import collections
import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import deep
from definition import SMALL_BLOCKS, SMALL_STRIPS, Mine, allowed_in, attention

import attnlab.contrib  # noqa: F401
from attnlab import BACKENDS, dot_product_attention, masks
from attnlab.attention import ALiBi, AttentionOptions, RelativeBias, SoftCap
from attnlab.attention.blockwise import blockwise
from attnlab.attention.jax_nn import assume_device

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 3e-2, "float16": 6e-3}
OFTEN = ("dense", "blockwise", "blockwise", "xla", "edges", "cudnn", None)
SELDOM = ("splash",)
"""Interpreted, so slow."""
LIMITS = (SMALL_BLOCKS, SMALL_BLOCKS, SMALL_STRIPS, None)
STEP = 1e-30
"""Of a derivative by a complex step: the imaginary part of f(x + i step) is step f'(x)."""


def draw_call(rng):
    """(q, k, v, options): shapes of 1 to 8, sometimes above a block; every option now and then."""
    pick = lambda *values: values[rng.integers(len(values))]
    seldom = lambda: rng.random() < 0.2
    name = pick(*OFTEN, *OFTEN, *OFTEN, *OFTEN, *SELDOM)
    small = lambda: int(rng.integers(1, 8))
    b, t, s, h, v = int(rng.integers(1, 4)), small(), small(), small(), small()
    if name in ("blockwise", None) and rng.random() < 0.1:
        t, s = int(rng.integers(1, 700)), int(rng.integers(500, 1200))
    k, kv = pick((1, 1), (2, 2), (3, 3), *([] if name == "cudnn" else [(1, 2), (2, 1)]))
    n = int(np.lcm(k, kv)) * int(rng.integers(1, 3))
    dtype = pick("float64", "float64", "float32", "bfloat16", "float16")
    if name == "cudnn":
        dtype, t = "bfloat16", 2 * t
        s = pick(t, 2 * s)
    array = lambda *shape, dtype="float64": jnp.asarray(rng.normal(size=shape), dtype)
    any_of = lambda *sizes: tuple(pick(1, size) for size in sizes)
    options = {"implementation": name, "is_causal": bool(seldom() or seldom())}
    if seldom() and name != "cudnn":
        options["bias"] = array(*any_of(b, n, t, s))
    if name == "edges" or rng.random() < 0.05:
        count = int(rng.integers(1, t * s + 1))
        flat = np.stack([rng.permutation(t * s)[:count] for _ in range(b)])
        flat = np.append(flat, flat[:, :1], 1)  # listed twice, it counts once
        flat = flat[0] if seldom() else flat  # one graph for all rows, or one for each
        pad = lambda a, size: np.append(a, np.full((*a.shape[:-1], 2), size), -1)
        ends = pad(flat % s, s), pad(flat // s, t)
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
        options["segments"] = draw_segments(rng, name, b, t, s)
        if name == "cudnn":
            options |= {"query_seq_lengths": None, "key_value_seq_lengths": None}
    if seldom():
        options["sink"] = array(*any_of(b, n, t, 1))
    if name in ("cudnn", "xla") and rng.random() < 0.8:  # no more than they have
        kv, v = k, h
    else:
        if seldom():
            options["logits_soft_cap"] = pick(0.7, 3.0)
        if seldom():
            options["score_mods"] = draw_mods(rng, n)
        if rng.random() < 0.07:
            options["talking_heads"] = tuple(array(n, n) for _ in range(2))
    shapes = (b, t, n, h), (b, s, k, h), (b, s, kv, v)
    return *(array(*shape, dtype=dtype) for shape in shapes), options


def draw_segments(rng, name, b, t, s):
    """Numbers of texts, in a row or not; for cuDNN all of one length, known when JAX traces."""
    if name == "cudnn" and t == s and rng.random() < 0.8:
        return np.repeat(np.arange(1, 1 + t // 2), 2)[None].repeat(b, 0)
    of_q, of_k = (np.sort(rng.integers(0, 4, (b, size))) for size in (t, s))
    if rng.random() < 0.3:
        of_q, of_k = rng.permuted(of_q, axis=1), rng.permuted(of_k, axis=1)
    own = t == s and rng.random() < 0.8
    return jnp.asarray(of_q) if own else (jnp.asarray(of_q), jnp.asarray(of_k))


def draw_mods(rng, n):
    number = lambda *shape: jnp.asarray(rng.normal(size=shape))
    known = (
        SoftCap(1 + abs(number(n))),
        SoftCap(jnp.asarray(2.0)),
        ALiBi(number(n)),
        RelativeBias(number(n, 8), max_distance=9),
        RelativeBias(number(n, 5), max_distance=9, two_sided=False),
        Mine({"a": number(n), "b": number()}, jnp.asarray(1)),
    )
    return [known[i] for i in rng.permutation(len(known))[: rng.integers(1, 4)]]


@contextlib.contextmanager
def surroundings(name, limits):
    """Blocks of this size, and for cuDNN a GPU whose kernel is jax.nn's XLA."""
    plain = jax.nn.dot_product_attention

    def as_cudnn(q, k, v, bias=None, mask=None, *, implementation, **options):
        if implementation == "cudnn":
            assert q.shape[-1] == k.shape[-1] == v.shape[-1] == -(-q.shape[-1] // 8) * 8
            assert mask is None or mask.shape[2:] == (q.shape[1], k.shape[1])
            assert bias is None
        return plain(q, k, v, bias, mask, implementation="xla", **options)

    divided = BACKENDS["blockwise"]._replace(run=functools.partial(blockwise, limits=limits))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(BACKENDS, blockwise=divided))
        if name == "cudnn":
            stack.enter_context(assume_device("gpu", 9.0))
            stack.enter_context(mock.patch.object(jax.nn, "dot_product_attention", as_cudnn))
        yield


def poisoned(rng, q, k, v, options):
    """q, k and v, half of the time with NaN or an infinity where it must reach nothing or no other
    text; and which queries and keys are of the text that it is in."""
    (b, t), s = q.shape[:2], k.shape[1]
    of_text = np.zeros((b, t), bool), np.zeros((b, s), bool)
    if rng.random() >= 0.5:
        return (q, k, v), of_text
    allowed = allowed_in(options, b, t, s)
    hidden = ~allowed.any((1, 3)), ~allowed.any((1, 2))
    if (segments := options.get("segments")) is not None:
        pair = segments if isinstance(segments, tuple) else (segments, segments)
        of_text = tuple(np.asarray(a) == 1 for a in pair)
    value = [np.nan, np.inf, -np.inf][rng.integers(3)]
    where = [a | b for a, b in zip(hidden, of_text, strict=True)]
    fill = lambda a, w: jnp.where(w[..., None, None], jnp.asarray(value, a.dtype), a)
    return (fill(q, where[0]), fill(k, where[1]), fill(v, where[1])), of_text


def outcome(seed):
    """(backend, what happened) of one random call: "right", "refused", or what went wrong."""
    rng = np.random.default_rng([26, seed])
    q, _, v, options = drawn = draw_call(rng)
    name, limits = options["implementation"], LIMITS[rng.integers(len(LIMITS))]
    arrays, spoiled = poisoned(rng, *drawn)
    call = *arrays, options
    residual = bool(rng.random() < 0.3)
    weights = [rng.normal(size=size) for size in ((*q.shape[:3], v.shape[3]), q.shape[:3])]
    weights = [np.where(expand(spoiled[0], w), 0, w) for w in weights]
    leaves, tree = jax.tree.flatten(call)
    arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, jax.Array)}
    floats = {i: a for i, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    others = {i: a for i, a in arrays.items() if i not in floats}

    def loss(floats, others):
        given = floats | others
        q, k, v, options = tree.unflatten([given.get(i, a) for i, a in enumerate(leaves)])
        made = dot_product_attention(q, k, v, return_residual=residual, **options)
        made = made if residual else (made, None)
        return number_of(jax.tree.map(lambda a: a.astype(float), made), weights, jnp), made

    try:
        with surroundings(name, limits):
            (_, made), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats, others)
            jax.block_until_ready((made, grads))
    except (TypeError, ValueError) as error:
        known = (*vars(AttentionOptions()), "query", "key", "value")
        named = any(word in str(error) for word in (*known, *BACKENDS))
        return str(name), "refused" if named and name else f"{seed}: {error!r:.300}"
    except Exception as error:
        return str(name), f"{seed}: bare {type(error).__name__}: {error!s:.300}"
    return str(name), judged(seed, drawn, made, grads, weights, rng, spoiled)


def expand(of_tokens, a):
    return of_tokens.reshape(*of_tokens.shape, *(1,) * (a.ndim - 2))


def number_of(made, weights, np_or_jnp):
    """Moves with every entry of the output and every finite one of the log sum exp."""
    out, lse = made
    total = np_or_jnp.sum(np_or_jnp.sin(out) * weights[0])
    if lse is None:
        return total
    finite = np_or_jnp.where(np_or_jnp.isfinite(lse), lse, np.pi / 2)  # where the cosine is 0
    return total + np_or_jnp.sum(np_or_jnp.cos(finite) * weights[1])


def judged(seed, call, made, grads, weights, rng, spoiled):
    """ "right", or how far the results are from the definition."""
    q, k, v, options = call
    out, lse = made
    expected, wanted, largest = attention(q, k, v, options)
    rows = spoiled[0] & allowed_in(options, *q.shape[:2], k.shape[1]).any((1, 3))
    if np.isfinite(np.asarray(out, np.float64)[rows]).all((1, 2)).any():  # in all heads
        return f"{seed}: NaN went unnoticed"
    clean = lambda a: np.where(expand(spoiled[0], a), 0, np.asarray(a, np.float64))
    expected, wanted = clean(expected), clean(wanted)
    if out.dtype != v.dtype:
        return f"{seed}: the output is {out.dtype}"
    # A score of a thousand is rounded to 1e-4 in float32, and so is its probability. jax.nn takes
    # the softmax in float32.
    softmax = "float32" if options["implementation"] in ("xla", "cudnn") else "float64"
    precision = max(TOLERANCE[str(dtype)] for dtype in (q.dtype, softmax))
    tolerance = precision * (1 + largest / 8)
    apart = np.abs(clean(out) - expected).max() / max(np.abs(expected).max(), 0.1)
    if not apart <= tolerance:
        return f"{seed}: output differs by {apart:.2g}"
    if lse is not None:
        lse, some = clean(lse), np.isfinite(wanted)
        if (np.isfinite(lse) != some).any():
            return f"{seed}: log sum exp is finite elsewhere"
        apart = np.abs(lse[some] - wanted[some]).max(initial=0)
        if not apart <= tolerance * (1 + np.abs(wanted[some]).max(initial=0)):
            return f"{seed}: log sum exp differs by {apart:.2g}"
    leaves, tree = jax.tree.flatten(call)
    for i, grad in grads.items():
        if grad.dtype != leaves[i].dtype:
            return f"{seed}: the gradient of leaf {i} is {grad.dtype}"
        grad, along = np.asarray(grad, np.float64), rng.normal(size=grad.shape)
        if i < 3:
            of_text = expand(spoiled[i > 0], grad)
            grad, along = np.where(of_text, 0, grad), np.where(of_text, 0, along)
        moved = list(leaves)
        moved[i] = np.asarray(leaves[i], np.float64) + STEP * 1j * along
        result = attention(*tree.unflatten(moved))[:2]
        slope = number_of((result[0], None if lse is None else result[1]), weights, np).imag / STEP
        apart = abs(np.sum(grad * along) - slope)
        allowed = 10 * max(tolerance, TOLERANCE[str(leaves[i].dtype)])
        if not apart <= allowed * (1 + np.sum(np.abs(grad * along))):
            return f"{seed}: the gradient of leaf {i} {grad.shape} differs by {apart:.2g}"
    return "right"


@pytest.mark.parametrize("seeds", deep([range(40), range(40, 2000)], range(40)), ids=len)
def test_random_calls_are_right_or_refused_by_name(seeds, x64):
    counts = collections.Counter()
    for seed in seeds:
        counts[outcome(seed)] += 1
        if seed % 100 == 99:
            jax.clear_caches()
    wrong = [f"{name}: {what}" for name, what in counts if what not in ("right", "refused")]
    assert not wrong, "\n".join(wrong)
    for name in ("dense", "blockwise", "xla", "edges", "cudnn", "None"):
        assert counts[name, "right"], name
