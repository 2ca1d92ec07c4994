"""One contract for every backend, and values by hand and by jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import BACKENDS, attention, blockwise, dot_product_attention, explain, fused, masks
from attnlab.visible import Visible

# B=2 T=5 S=7 N=6 K=3 H=4 V=8
RUNNABLE = [n for n in BACKENDS if n != "cudnn"]
OURS = ["dense", "blockwise"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 2 queries and 3 keys: several, part-filled and skipped ones at tiny sizes."""
    monkeypatch.setattr(blockwise, "block_sizes", lambda shape, group: (1, group, 2, 3))


def make(dtype=jnp.float32, heads=(6, 3, 3), t=5, s=7, scale=2.0):
    """q, k, v by NumPy: JAX would compile each draw."""
    rng, (n, k, kv) = np.random.default_rng(3), heads
    shapes = (2, t, n, 4), (2, s, k, 4), (2, s, kv, 8)
    return tuple(jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)


def attend(*arrays, **options):
    """`dot_product_attention` under jit; arrays among the options are constants of it."""
    return jax.jit(functools.partial(dot_product_attention, **options))(*arrays)


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


@pytest.mark.parametrize("implementation", [n for n in RUNNABLE if n != "dense"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_equal_those_of_dense(implementation, call):
    rest = {n: a for n, a in CALLS[call].items() if n != "bias"}
    arrays = (*make(), CALLS[call].get("bias", jnp.zeros((1, 7))))

    def loss(name, *args):
        out = dot_product_attention(*args, implementation=name, **rest)
        return jnp.sum(jnp.sin(out))

    def gradient(name):
        return jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2, 3)))(*arrays)

    assert_close(gradient(implementation), gradient("dense"))


# What hides, and which query and which key of batch row 1 it hides from everyone.
HIDDEN = {
    "mask": ({"mask": some_mask().at[1, 0, 4].set(False)}, 4, 3),
    "mask of keys": ({"mask": jnp.arange(7) != 3, "query_seq_lengths": jnp.array([5, 4])}, 4, 3),
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
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_looking_changes_no_bit(implementation, dtype, optimized):
    """Also where q and k come out of other operations that could be fused anew."""
    call, (q, k, v) = "all of it", make(dtype)

    def run(looks, q, k, v):
        q, k = q * jnp.cos(q) + q[..., ::-1] * jnp.sin(q), k * 1.1 + jnp.sin(k)
        call_ = {"implementation": implementation, **CALLS[call]}
        return (dot_product_attention(q, k, v, return_probs=looks, **call_), q, k)

    (out, probs), q_, k_ = jax.jit(functools.partial(run, True))(q, k, v)
    np.testing.assert_array_equal(out, jax.jit(functools.partial(run, False))(q, k, v)[0])
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
    out, probs, residual = attend(q, k, v, return_probs=True, return_residual=True)
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
    got, probs = attend(q, k, v, mix=(before, after), return_probs=True)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
    expected = jnp.einsum("bnts,nm->bmts", scores, before)
    expected = jnp.einsum("bmts,mn->bnts", jax.nn.softmax(expected), after)
    assert_close(probs, expected)
    assert_close(got, jnp.einsum("bnts,bsnv->btnv", expected, v))
    permuted = jnp.eye(6, dtype=jnp.float64)
    assert_close(attend(q, k, v, mix=(permuted, None)), attend(q, k, v))


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
    call = {"dropout_rate": 0.3, "dropout_key": jax.random.key(0, impl=kind), "return_probs": True}
    out, probs = attend(q, k, eye, **call, implementation="dense")
    assert_close(attend(q, k, eye, **call, implementation="blockwise"), (out, probs))
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


BAD = {
    "query of integers": (
        {"query": np.ones((2, 5, 6, 4), int)},
        TypeError,
        "query must be a float",
    ),
    "no array": ({"key": "key"}, TypeError, "key must be a float array, not str"),
    "one axis": ({"value": np.ones(3)}, ValueError, r"value \(3,\) must be \[B, T, N, H\]"),
    "batch of some": ({"query": np.ones((5, 6, 4))}, ValueError, "or all without B"),
    "other S": ({"key": np.ones((2, 3, 3, 4))}, ValueError, "do not fit together"),
    "other H": ({"query": np.ones((2, 5, 6, 3))}, ValueError, r"query \(2, 5, 6, 3\).* do not fit"),
    "heads": (
        {"key": np.ones((2, 7, 4, 4)), "value": np.ones((2, 7, 4, 8))},
        ValueError,
        "4 key heads and 4 value heads must divide 6 query heads",
    ),
    "empty axis": ({"query": np.ones((2, 0, 6, 4))}, ValueError, "no axis may have size 0"),
    "float mask": ({"mask": jnp.zeros((5, 7))}, TypeError, "added to the scores as bias"),
    "int mask": ({"mask": jnp.zeros((5, 7), int)}, TypeError, "mask must be boolean"),
    "mask shape": (
        {"mask": jnp.ones((2, 5, 7), bool)},
        ValueError,
        r"mask \(2, 5, 7\) must broadcast to the scores \[B, N, T, S\] = \(2, 6, 5, 7\)",
    ),
    "bias shape": ({"bias": jnp.ones((5, 1, 6, 5, 7))}, ValueError, "bias .* must broadcast"),
    "bias of integers": ({"bias": jnp.ones((5, 7), int)}, TypeError, "bias must be a float array"),
    "lengths shape": (
        {"query_seq_lengths": jnp.array([3])},
        ValueError,
        r"query_seq_lengths \(1,\) must be one length per batch row, \[B\] = \(2,\)",
    ),
    "float lengths": (
        {"key_value_seq_lengths": jnp.array([3.0, 2.0])},
        TypeError,
        "key_value_seq_lengths must be an integer array",
    ),
    "window below 0": ({"local_window_size": (1, -1)}, ValueError, "local_window_size must be at"),
    "three windows": ({"local_window_size": (1, 2, 3)}, TypeError, "must be an int or"),
    "window of floats": ({"local_window_size": 1.5}, TypeError, "local_window_size must be an int"),
    "scale": ({"scale": np.ones(2)}, TypeError, "scale must be one real number"),
    "soft cap": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be above 0"),
    "rate": ({"dropout_rate": 1.0}, ValueError, "dropout_rate must be at least 0 and below 1"),
    "no key": ({"dropout_rate": 0.1}, ValueError, "needs a dropout_key"),
    "seed": ({"dropout_rate": 0.1, "dropout_key": 3}, TypeError, "as of jax.random.key"),
    "mix": ({"mix": np.ones((6, 6))}, TypeError, "mix must be two matrices"),
    "mix shape": ({"mix": (np.ones((6, 4)), None)}, ValueError, r"mix \(\(6, 4\), None\) must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_say_what_to_do(case):
    """Asked of the check itself: in the tests jaxtyping refuses some calls even earlier."""
    changes, error, message = BAD[case]
    good = dict(zip(("query", "key", "value"), make(), strict=True))
    with pytest.raises(error, match=message):
        attention._checked(**(good | changes))


def test_the_check_is_asked_before_anything_runs():
    with pytest.raises(ValueError, match="do not fit together"):
        dot_product_attention(*make()[:2], make(s=3)[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "flash"}, "known: dense, blockwise, xla, cudnn"),
        ({"implementation": "xla", "logits_soft_cap": 1.0}, "jax.nn has no logits_soft"),
        ({"implementation": "xla", "return_residual": True}, "jax.nn has no return_residual"),
        ({"implementation": "xla", "float16": True}, "jax.nn has no float16 on a CPU"),
        ({"implementation": "cudnn"}, r"query \(2, 5, 6, 4\).*needs an NVIDIA GPU, this is a cpu"),
        ({"implementation": "blockwise", "mix": (jnp.eye(6), None)}, "mix needs the scores of all"),
    ],
)
def test_a_backend_that_cannot_says_why(changes, message):
    arrays = make(jnp.float16 if "float16" in changes else jnp.float32)
    changes = {n: a for n, a in changes.items() if n != "float16"}
    with pytest.raises(ValueError, match=message) as error:
        dot_product_attention(*arrays, **changes)
    assert changes["implementation"] == "flash" or "use implementation='dense'" in str(error.value)


def test_explain_names_the_choice_and_the_reasons():
    q, k, v = make()
    expected = {
        "dense": "chosen",
        "blockwise": "could run",
        "xla": "could run",
        "cudnn": "cuDNN needs an NVIDIA GPU, this is a cpu",
    }
    assert explain(q, k, v) == expected
    assert explain(q, k, v, return_probs=True) == expected  # looking never changes the choice
    mixed = explain(
        q, k, v, mix=(jnp.eye(6), None), dropout_rate=0.1, dropout_key=jax.random.key(0)
    )
    assert mixed["blockwise"] == "mix needs the scores of all heads at once"
    assert mixed["xla"] == "jax.nn has no dropout_rate"
    assert explain(q, k, v, implementation="xla")["xla"] == "chosen"
    with pytest.raises(TypeError, match=r"unknown keywords \['causal'\]; known: .*is_causal"):
        explain(q, k, v, causal=True)
    with pytest.raises(TypeError, match="mask must be boolean"):
        explain(q, k, v, mask=jnp.ones((5, 7)))


def test_explain_needs_shapes_alone():
    """Scores beyond the cache go to `blockwise`, and those that it refuses to `dense`."""
    shape = jax.ShapeDtypeStruct((2, 16384, 8, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = {"is_causal": True, "query_seq_lengths": lengths}
    assert explain(shape, shape, shape, **call)["blockwise"] == "chosen"
    mix = (jax.ShapeDtypeStruct((8, 8), jnp.float32), None)
    assert explain(shape, shape, shape, mix=mix)["dense"] == "chosen"


CUDNN = [
    ({}, None),
    ({"is_causal": True, "local_window_size": (2, 0)}, None),
    ({"key_value_seq_lengths": jnp.array([3, 0])}, None),
    ({"query": jnp.float32}, "cuDNN needs float16 or bfloat16, not float32"),
    ({"mask": jnp.ones((1, 7), bool)}, "even lengths under such a mask, not T=5 and S=7"),
    ({"local_window_size": (2, 1)}, "even lengths under such a mask, not T=5 and S=7"),
    ({"bias": jnp.ones((6, 5, 7))}, r"bias has shape \(1, 6, 5, 7\)"),
    ({"wide": 129}, "head widths of at most 128, not 129"),
    ({"return_residual": True}, "jax.nn has no return_residual"),
]


@pytest.mark.parametrize(("call", "reason"), CUDNN)
def test_what_cudnn_refuses(call, reason, monkeypatch):
    """On an A100 as seen from here; on a Hopper GPU heads may be twice as wide."""
    call = dict(call)
    q, k, v = make(call.pop("query", jnp.bfloat16))
    if wide := call.pop("wide", None):
        v = jnp.ones((*v.shape[:3], wide), v.dtype)
    monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 8.0))
    got = fused.refuse_cudnn(*attention._checked(q, k, v, **call)[0])
    assert (got is None) == (reason is None)
    if reason:
        with pytest.raises(ValueError, match=reason):
            dot_product_attention(q, k, v, implementation="cudnn", **call)
    if wide:
        monkeypatch.setattr(fused, "_gpu", lambda: ("gpu", 9.0))
        assert fused.refuse_cudnn(*attention._checked(q, k, v, **call)[0]) is None


@pytest.mark.parametrize(
    "call",
    [
        "plain",
        "causal, fewer queries",
        "lengths of keys alone",
        "lengths of queries alone",
        "causal window",
        "window",
        "mask with an empty row",
    ],
)
def test_what_cudnn_is_told_means_the_same(call, monkeypatch):
    """Causal, lengths and windows in its own words, widths padded to 8: run by jax.nn's XLA."""
    plain = jax.nn.dot_product_attention

    def as_xla(q, k, v, *, implementation, **asked):
        assert implementation == "cudnn"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 8
        assert "mask" not in asked or asked["mask"].shape[2:] == (5, 7)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):  # NaN where one is 0
            assert asked.get(name) is None or (np.asarray(asked[name]) > 0).all()
        return plain(q, k, v, implementation="xla", **asked)

    monkeypatch.setattr(jax.nn, "dot_product_attention", as_xla)
    monkeypatch.setitem(BACKENDS, "cudnn", attention.Backend(fused.cudnn, lambda *call: None))
    q, k, v = make()
    got = dot_product_attention(q, k, v[..., :7], implementation="cudnn", **CALLS[call])
    expected, _ = by_hand(q, k, v[..., :7], allowed=allowed_of(CALLS[call]))
    assert_close(got, jnp.asarray(expected, jnp.float32))


def test_cudnn_gets_a_mask_where_rows_are_empty():
    """Causal, one key back, 8 queries and 3 keys: the last rows see nothing."""
    assert fused._native(Visible(8, 3, is_causal=True, window=(1, 0))) is None
    assert fused._native(Visible(4, 3, is_causal=True, window=(1, 0))) is not None


small = st.integers(1, 3)


@st.composite
def calls(draw):
    """A call that is right, or wrong in one or two arguments."""
    b, t, s, k, kv, h, v = (draw(small) for _ in range(7))
    n = k * kv * draw(st.integers(1, 2))
    call = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, kv, v)}
    for name in draw(st.lists(st.sampled_from(["bias", "mask"]), unique=True)):
        shape = [draw(st.sampled_from([1, size])) for size in (b, n, t, s)]
        call[name] = tuple(shape[draw(st.integers(0, 4)) :])
    if draw(st.booleans()):
        call["query_seq_lengths"] = (b,)
    options = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.sampled_from([None, 0, 1, (2, 0), (0, 1), (-1, 2), 1.5])),
        "logits_soft_cap": draw(st.sampled_from([None, None, 2.0, -1.0])),
        "implementation": draw(st.sampled_from([None, *RUNNABLE, "dense", "blockwise"])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(call)), max_size=2)):
        if shape := list(call[name]):
            shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(0, 4))
            call[name] = tuple(shape[draw(st.integers(0, 1)) :])
    return call, options


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(calls(), st.integers(0, 100))
def test_any_call_is_right_or_refused_by_name(call, seed):
    shapes, options = call
    rng = np.random.default_rng(seed)
    arrays = {n: np.asarray(rng.normal(size=shape), np.float32) for n, shape in shapes.items()}
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"] > 0
    if "query_seq_lengths" in arrays:
        arrays["query_seq_lengths"] = rng.integers(0, 4, shapes["query_seq_lengths"])
    said = None
    try:
        got = jax.jit(lambda a: dot_product_attention(**a, **options))(arrays)
    except (ValueError, TypeError) as error:
        said = str(error)
    if said is not None:
        assert any(n in said for n in (*arrays, *options))
        return
    q, k, v = (
        arrays[n] if arrays[n].ndim == 4 else arrays[n][None] for n in ("query", "key", "value")
    )
    t, s = q.shape[1], k.shape[1]
    allowed = arrays.get("mask", True)
    if options["is_causal"]:
        allowed = allowed & np.asarray(masks.causal(t, s))
    if (window := options["local_window_size"]) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        allowed = allowed & np.asarray(masks.window(t, s, left=left, right=right))
    if "query_seq_lengths" in arrays:
        lengths = arrays["query_seq_lengths"].reshape(-1, 1, 1, 1)
        allowed = allowed & (np.arange(t)[:, None] < lengths)
    expected, _ = by_hand(q, k, v, arrays.get("bias", 0.0), allowed, options["logits_soft_cap"])
    assert_close(got, np.asarray(expected, np.float32).reshape(got.shape))
