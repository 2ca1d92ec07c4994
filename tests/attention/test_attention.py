"""One contract for every backend, and values by hand and by jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from definition import SMALL_BLOCKS, divide

from attnlab import dot_product_attention
from attnlab.tap import capture

# B=2 T=5 S=7 N=6 K=3 H=4 V=8
# edges: test_edges.py; cudnn: test_cudnn.py; attnlab.contrib: tests/contrib
RUNNABLE = ["dense", "blockwise", "xla"]
OURS = ["dense", "blockwise"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 2 queries and 3 keys: several, part-filled and skipped ones at tiny sizes."""
    divide(monkeypatch, SMALL_BLOCKS)


def make(dtype=jnp.float32, heads=(6, 3, 3), t=5, s=7, scale=2.0):
    """q, k, v by NumPy: JAX would compile each draw."""
    rng, (n, k, kv) = np.random.default_rng(3), heads
    shapes = (2, t, n, 4), (2, s, k, 4), (2, s, kv, 8)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)


def attend(*arrays, **options):
    """`dot_product_attention` under jit; arrays among the options are constants of it."""
    return jax.jit(functools.partial(dot_product_attention, **options))(*arrays)


def probs_of(*arrays, **options):
    """(what `dot_product_attention` returns, probabilities) under jit."""
    run = functools.partial(capture, dot_product_attention, names=("probs",), **options)
    result, values = jax.jit(run)(*arrays)
    return result, values["probs"]


def by_hand(q, k, v, bias=0.0, allowed=True, cap=None):
    """Row by row in float64 NumPy; an empty row is zeros."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    n = q.shape[2]
    k, v = (np.repeat(a, n // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]) + np.asarray(bias)
    if cap:
        scores = cap * np.tanh(scores / cap)
    allowed = np.broadcast_to(allowed, scores.shape)
    top = np.max(scores, axis=-1, keepdims=True, where=allowed, initial=-1e300)
    p = np.where(allowed, np.exp(np.where(allowed, scores - top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total > 0, total, 1)
    return np.einsum("bnts,bsnv->btnv", p, v), p


def some_mask(t=5, s=7):
    """Random, with one empty row and one key that nobody of batch row 1 sees."""
    mask = np.random.default_rng(9).random((2, 1, t, s)) < 0.6
    mask[0, 0, 2] = mask[1, 0, :, 3] = False
    return jnp.asarray(mask)


CALLS = {
    "plain": {},
    "causal, fewer queries": {"is_causal": True},
    "mask with an empty row": {"mask": some_mask()},
    "bias": {"bias": jnp.linspace(-3, 3, 2 * 6 * 5 * 7).reshape(2, 6, 5, 7)},
    "lengths of keys alone": {"key_value_seq_lengths": jnp.array([3, 0])},
    "lengths of queries alone": {"query_seq_lengths": jnp.array([5, 2])},
    "window": {"local_window_size": (1, 2)},
    "causal window": {"local_window_size": 1, "is_causal": True},
    "all of it": {
        "mask": some_mask(),
        "bias": jnp.linspace(-2, 2, 6 * 7).reshape(6, 1, 7),
        "is_causal": True,
        "local_window_size": (3, 4),
        "key_value_seq_lengths": jnp.array([6, 2]),
        "query_seq_lengths": jnp.array([4, 5]),
    },
}


def allowed_of(call, t=5, s=7):
    """The mask of a call, written out by loops."""
    allowed = np.ones((2, 1, t, s), bool)
    left, right = (lambda w: (w, w) if isinstance(w, int) else w)(call.get("local_window_size", 99))
    for b in range(2):
        for i in range(t):
            for j in range(s):
                allowed[b, 0, i, j] = (
                    (not call.get("is_causal") or j <= i)
                    and i - left <= j <= i + right
                    and j < call.get("key_value_seq_lengths", [s, s])[b]
                    and i < call.get("query_seq_lengths", [t, t])[b]
                )
    return allowed & np.asarray(call.get("mask", True))


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_definition(implementation, call, dtype):
    q, k, v = make(dtype)
    expected, _ = by_hand(q, k, v, CALLS[call].get("bias", 0.0), allowed_of(CALLS[call]))
    got = attend(q, k, v, implementation=implementation, **CALLS[call])
    assert got.dtype == dtype
    assert_close(got, jnp.asarray(expected, dtype))


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_more_queries_than_keys(implementation):
    """Causal is top-left aligned: the queries past the last key see all keys."""
    q, k, v = make(t=8, s=3)
    expected, _ = by_hand(q, k, v, allowed=allowed_of({"is_causal": True}, 8, 3))
    got = attend(q, k, v, is_causal=True, implementation=implementation)
    assert_close(got, jnp.asarray(expected, jnp.float32))
    # and past the window they see none
    out = attend(q, k, v, local_window_size=(1, 0), implementation=implementation)
    expected, _ = by_hand(q, k, v, allowed=allowed_of({"local_window_size": (1, 0)}, 8, 3))
    assert_close(out, jnp.asarray(expected, jnp.float32))
    assert not np.asarray(out[:, 4:]).any()


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_batch_axis_left_out(implementation):
    q, k, v = make()
    call = {"is_causal": True, "implementation": implementation}
    expected = attend(q[:1], k[:1], v[:1], key_value_seq_lengths=jnp.array([3]), **call)[0]
    got = attend(q[0], k[0], v[0], key_value_seq_lengths=jnp.array(3), **call)
    np.testing.assert_array_equal(got, expected)


def test_without_jit():
    for call in ("plain", "mask with an empty row"):
        expected = attend(*make(), **CALLS[call])
        assert_close(dot_product_attention(*make(), **CALLS[call]), expected)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_equal_those_of_dense(call):
    rest = {n: a for n, a in CALLS[call].items() if n != "bias"}
    arrays = (*make(), CALLS[call].get("bias", jnp.zeros((1, 7))))

    def loss(name, *args):
        out = dot_product_attention(*args, implementation=name, **rest)
        return jnp.sum(jnp.sin(out))

    @jax.jit
    def gradients(*arrays):
        grad = lambda name: jax.grad(functools.partial(loss, name), argnums=(0, 1, 2, 3))
        return {name: grad(name)(*arrays) for name in RUNNABLE}

    of = gradients(*arrays)
    for name in RUNNABLE:
        assert_close(of[name], of["dense"])


# What hides, and which query and which key of batch row 1 it hides from everyone.
HIDDEN = {
    "mask": ({"mask": some_mask().at[1, 0, 4].set(False)}, 4, 3),
    "mask of keys": (
        {"mask": (jnp.arange(7) != 3)[None], "query_seq_lengths": jnp.array([5, 4])},
        4,
        3,
    ),
    "lengths": (
        {"query_seq_lengths": jnp.array([5, 3]), "key_value_seq_lengths": jnp.array([7, 5])},
        3,
        5,
    ),
    "causal window": ({"is_causal": True, "local_window_size": 1}, None, 5),
}


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("hider", HIDDEN)
def test_hidden_positions_reach_nothing(implementation, hider):
    """Keys and values that no query of their row may see, and queries that see nothing."""
    call, row, key = HIDDEN[hider]
    q, k, v = make()

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, implementation=implementation, **call)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, expected), grads = run(q, k, v)
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(grads[1][1, key]).any()
    assert not np.asarray(grads[2][1, key]).any()
    if row is not None:
        assert not np.asarray(expected[1, row]).any()
        assert not np.asarray(grads[0][1, row]).any()
    for poison in (7.0, np.nan, np.inf, -np.inf):
        poisoned = (
            q if row is None else q.at[1, row].set(poison),
            k.at[1, key].set(poison),
            v.at[1, key].set(poison),
        )
        (_, got), poisoned_grads = run(*poisoned)
        np.testing.assert_array_equal(got, expected)
        for a, b in zip(poisoned_grads, grads, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", deep([jnp.float32, jnp.bfloat16], jnp.bfloat16))
def test_capture_changes_no_bit(implementation, dtype, optimized):
    """Also where q and k come out of other operations that could be fused anew."""
    call, (q, k, v) = "all of it", make(dtype)

    def run(names, q, k, v):
        q, k = q * jnp.cos(q) + q[..., ::-1] * jnp.sin(q), k * 1.1 + jnp.sin(k)
        call_ = {"implementation": implementation, **CALLS[call]}
        return capture(dot_product_attention, q, k, v, names=names, **call_), q, k

    (out, values), q_, k_ = jax.jit(functools.partial(run, ("probs", "scores")))(q, k, v)
    probs = values["probs"]
    np.testing.assert_array_equal(out, jax.jit(functools.partial(run, ()))(q, k, v)[0][0])
    _, expected = by_hand(q_, k_, v, CALLS[call]["bias"], allowed_of(CALLS[call]))
    loosen = 1 if dtype == jnp.float32 else 0.1
    assert probs.dtype == jnp.float32
    assert_close(probs, jnp.asarray(expected, probs.dtype), loosen=loosen)


@pytest.mark.parametrize("implementation", OURS)
def test_residual_and_its_gradient(implementation, x64):
    """log sum exp of the scores: what makes exp(score - residual) a probability."""
    q, k, v = make(jnp.float64, heads=(6, 2, 3))
    mask = some_mask()

    def expected(q, k):
        scores = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, 3, axis=2)) / 2
        return jax.nn.logsumexp(scores, axis=-1, where=mask.swapaxes(1, 2))

    def got(q, k):
        call = {"return_residual": True, "implementation": implementation}
        return dot_product_attention(q, k, v, mask=mask, **call)[1]

    @jax.jit
    def values(q, k):
        weight = jnp.cos(jnp.arange(60.0)).reshape(2, 5, 6)
        results = []
        for residual in (expected, got):
            seen = functools.partial(
                lambda f, q, k: jnp.sum(
                    jnp.where(mask[:, 0].any(-1)[..., None], f(q, k), 0) * weight
                ),
                residual,
            )
            results.append((residual(q, k), jax.grad(seen, (0, 1))(q, k)))
        return results

    (a, a_grads), (b, b_grads) = values(q, k)
    np.testing.assert_array_equal(
        np.isneginf(b), ~np.broadcast_to(mask[:, 0].any(-1)[..., None], b.shape)
    )
    seen = np.isfinite(b)
    assert_close(np.asarray(b)[seen], np.asarray(a)[seen])
    a_grads = jax.tree.map(lambda g: jnp.nan_to_num(g), a_grads)
    assert_close(b_grads, a_grads)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_scores_never_beat_a_mask(implementation, dtype, sign):
    """Scores of 1e5 of either sign: an additive mask of -1e5 would let forbidden keys through."""
    q = jnp.full((1, 2, 1, 4), 200, dtype)
    k = jnp.full((1, 2, 1, 4), 250 * sign, dtype)
    v = jnp.array([1.0, 3.0], dtype).reshape(1, 2, 1, 1)
    run = functools.partial(attend, is_causal=True, implementation=implementation)
    if implementation in OURS or dtype != jnp.float16:
        out = run(q, k, v)[0, :, 0, 0]
        np.testing.assert_array_equal(np.asarray(out, np.float32), [1, 2])


@pytest.mark.parametrize("implementation", OURS)
def test_float16_masks_do_not_overflow(implementation):
    arrays = make(jnp.float16)

    def loss(*arrays):
        out = dot_product_attention(*arrays, mask=some_mask(), implementation=implementation)
        return jnp.sum(out.astype(jnp.float32)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    assert all(np.isfinite(a).all() for a in (out, *grads))
    assert not np.asarray(out[0, 2]).any()


def test_agrees_with_jax_nn_where_both_are_defined():
    q, k, _ = make()
    v = make(scale=3.0)[1]
    for call in ({}, {"is_causal": True}):
        expected = jax.nn.dot_product_attention(q, k, v, **call)
        assert_close(attend(q, k, v, **call), expected)


def test_two_keys_by_hand():
    """Scores 0 and ln 3 give probabilities 1/4 and 3/4."""
    q = jnp.array([1.0]).reshape(1, 1, 1)
    k = jnp.array([0.0, np.log(3.0)]).reshape(2, 1, 1)
    v = jnp.array([[4.0, 0.0], [8.0, 4.0]]).reshape(2, 1, 2)
    (out, residual), probs = probs_of(q, k, v, return_residual=True)
    assert_close(out, jnp.array([[[7.0, 3.0]]]))
    assert_close(probs, jnp.array([[[0.25, 0.75]]]))
    assert_close(residual, jnp.log(jnp.array([[4.0]])))


@pytest.mark.parametrize("implementation", OURS)
def test_key_and_value_head_counts_may_differ(implementation, x64):
    q, k, v = make(jnp.float64, heads=(6, 2, 3))
    got = attend(q, k, v, implementation=implementation)
    assert_close(got, jnp.asarray(by_hand(q, k, v)[0]))


@pytest.mark.parametrize("implementation", OURS)
def test_soft_cap_and_scale(implementation, x64):
    q, k, v = make(jnp.float64)
    run = functools.partial(attend, implementation=implementation)
    assert_close(run(q, k, v, logits_soft_cap=1.5), jnp.asarray(by_hand(q, k, v, cap=1.5)[0]))
    assert_close(run(q, k, v, scale=1.0), run(2.0 * q, k, v))


def test_talking_heads_mix_before_and_after(x64):
    q, k, v = make(jnp.float64, heads=(6, 6, 6))
    before, after = jax.random.normal(jax.random.key(1), (2, 6, 6), jnp.float64)
    got, probs = probs_of(q, k, v, talking_heads=(before, after))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
    expected = jnp.einsum("bnts,nm->bmts", scores, before)
    expected = jnp.einsum("bmts,mn->bnts", jax.nn.softmax(expected), after)
    assert_close(probs, expected)
    assert_close(got, jnp.einsum("bnts,bsnv->btnv", expected, v))
    permuted = jnp.eye(6, dtype=jnp.float64)
    assert_close(attend(q, k, v, talking_heads=(permuted, None)), attend(q, k, v))


def test_talking_heads_with_a_mask_of_each_head(x64):
    """A row that is hidden in one head still has scores for the others, and their probabilities."""
    q, k, v = make(jnp.float64, heads=(6, 6, 6))
    before, after = jax.random.normal(jax.random.key(1), (2, 6, 6), jnp.float64)
    mask = np.random.default_rng(2).random((2, 6, 5, 7)) < 0.6
    mask[:, 1, 2] = mask[0, :, 4] = False
    got = attend(q, k, v, talking_heads=(before, after), mask=jnp.asarray(mask))
    used = mask.any(axis=(1, 2))[:, :, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.where(used, k, 0)) / 2
    scores = jnp.einsum("bnts,nm->bmts", scores, before)
    probs = jnp.nan_to_num(jax.nn.softmax(scores, where=mask, axis=-1))
    assert_close(got, jnp.einsum("bmts,mn,bsnv->btnv", probs, after, v))
    assert np.asarray(got[:, 2, 1]).all()
    assert not np.asarray(got[0, 4]).any()


def test_dropout_falls_on_probabilities():
    """One key: the output is v / keep or zero, per head and query, and right on average."""
    q, k, v = jnp.ones((1, 4000, 2, 4)), jnp.ones((1, 1, 2, 4)), jnp.ones((1, 1, 2, 3))
    out = attend(q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(0))
    assert set(np.unique(np.round(np.asarray(out), 5))) == {0.0, np.float32(1.33333)}
    np.testing.assert_allclose(np.mean(out), 1, atol=0.02)
    again = attend(q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(out, again)
    other = attend(q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(1))
    assert np.mean(out == other) < 0.8  # 10/16 agree by chance


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_one_key_drops_the_same_in_every_backend(kind, x64):
    """The identity as values shows the probabilities; neighbours are drawn independently."""
    q, k, _ = make(jnp.float64, heads=(6, 2, 3), t=50, s=70)
    eye = jnp.broadcast_to(jnp.eye(70)[:, None], (2, 70, 3, 70))
    call = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0, impl=kind)}
    out, probs = probs_of(q, k, eye, **call, implementation="dense")
    assert_close(probs_of(q, k, eye, **call, implementation="blockwise"), (out, probs))
    kept = np.asarray(out.swapaxes(1, 2)) > 0
    assert_close(out.swapaxes(1, 2), jnp.where(kept, probs / 0.7, 0))
    assert len(np.unique(kept.reshape(600, 70), axis=0)) == 600
    bits = kept - 0.7
    assert abs(bits.mean()) < 0.01
    for axis in range(4):  # 4.5 standard errors
        moved = np.mean(bits * np.roll(bits, 1, axis)) / 0.21
        assert abs(moved) < 4.5 / np.sqrt(bits.size)


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_transforms_and_shard_map(implementation):
    q, k, v = make()
    expected = attend(q, k, v, is_causal=True)
    run = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
    assert_close(jax.jit(jax.vmap(run))(q, k, v), expected)  # without a batch axis
    auto, devices = jax.sharding.AxisType.Auto, jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=devices)
    spec = jax.sharding.PartitionSpec("data")
    shared = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_close(jax.jit(shared)(q, k, v), expected)


def test_causal_by_gradient():
    """Output t moves with key s exactly when s <= t."""
    q, k, v = make(t=5, s=5)
    jacobian = jax.jit(
        jax.jacobian(lambda v: dot_product_attention(q, k, v, is_causal=True)[0].sum((1, 2)))
    )(v)
    moved = np.abs(np.asarray(jacobian[:, 0])).sum((2, 3)) > 0
    np.testing.assert_array_equal(moved, np.tril(np.ones((5, 5), bool)))


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (2, 2, 1, 4)])
def test_bfloat16_with_axes_of_size_one(implementation, shape):
    """On a CPU XLA cannot compile products of such axes at the precision that jax.nn asks for."""
    (b, t, s, h), rng = shape, np.random.default_rng(0)
    shapes = (b, t, 2, h), (b, s, 1, h), (b, s, 1, h)
    q, k, v = (jnp.asarray(rng.normal(size=a), jnp.bfloat16) for a in shapes)
    run = lambda *a: dot_product_attention(*a, implementation=implementation).astype(jnp.float32)
    loss = lambda *a: (jnp.sum(jnp.sin(run(*a))), run(*a))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert_close(out, jnp.asarray(by_hand(q, k, v)[0], jnp.bfloat16))
    assert all(np.isfinite(g).all() for g in grads)
