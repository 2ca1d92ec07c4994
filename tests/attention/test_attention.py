"""What the contract of the backends (test_conformance.py) does not draw: values by hand and by
jax.nn, capture, dropout, huge scores, transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from definition import SMALL_BLOCKS, attention, divide

from attnlab import dot_product_attention, masks
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


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_batch_axis_left_out(implementation):
    q, k, v = make()
    call = {"is_causal": True, "implementation": implementation}
    expected = attend(q[:1], k[:1], v[:1], key_value_seq_lengths=jnp.array([3]), **call)[0]
    got = attend(q[0], k[0], v[0], key_value_seq_lengths=jnp.array(3), **call)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", deep([jnp.float32, jnp.bfloat16], jnp.bfloat16))
def test_capture_changes_no_bit(implementation, dtype, optimized):
    """Also where q and k come out of other operations that could be fused anew."""
    options = {
        "mask": jnp.asarray(np.random.default_rng(9).random((2, 1, 5, 7)) < 0.6),
        "bias": jnp.linspace(-2, 2, 6 * 7).reshape(6, 1, 7),
        "is_causal": True,
        "local_window_size": (3, 4),
        "key_value_seq_lengths": jnp.array([6, 2]),
        "query_seq_lengths": jnp.array([4, 5]),
        "segments": (
            jnp.array([[1, 1, 2, 2, 2], [0, 1, 1, 1, 3]]),
            jnp.array([[1, 1, 2, 2, 2, 2, 0]] * 2),
        ),
    }

    def run(names, q, k, v):
        q, k = q * jnp.cos(q) + q[..., ::-1] * jnp.sin(q), k * 1.1 + jnp.sin(k)
        call = {"implementation": implementation, **options}
        return capture(dot_product_attention, q, k, v, names=names, **call), q, k

    q, k, v = make(dtype)
    (out, values), q_, k_ = jax.jit(functools.partial(run, ("probs", "scores")))(q, k, v)
    np.testing.assert_array_equal(out, jax.jit(functools.partial(run, ()))(q, k, v)[0][0])
    each_key = np.broadcast_to(np.eye(7)[:, None], (2, 7, 1, 7))  # as values: the probabilities
    expected = attention(q_, k_, each_key, options)[0].swapaxes(1, 2)
    assert values["probs"].dtype == jnp.float32
    loosen = 1 if dtype == jnp.float32 else 100  # q and k are rounded once more
    assert_close(values["probs"], expected.astype("float32"), loosen=loosen)


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
    edges = masks.Edges(jnp.tile(jnp.arange(70), 50), jnp.repeat(jnp.arange(50), 70))
    assert_close(attend(q, k, eye, **call, mask=edges, implementation="edges"), out)
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
    assert_close(out, jnp.asarray(attention(q, k, v, {})[0], jnp.bfloat16))
    assert all(np.isfinite(g).all() for g in grads)
