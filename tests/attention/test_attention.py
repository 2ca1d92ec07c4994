"""What the contract of the backends (test_conformance.py) does not draw: values by hand, capture,
patches, dropout, huge scores, the smallest bias, sinks, transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, two_devices, value_and_grads
from definition import SMALL_BLOCKS, SMALL_STRIPS, attention, divide, make

from attnlab import dot_product_attention, masks
from attnlab.attention import ALiBi, alibi_slopes
from attnlab.tap import Tap, capture

# B=2 T=5 S=7 N=6 K=3 H=4 V=8
# edges: test_edges.py; cudnn: test_cudnn.py; attnlab.contrib: tests/contrib
RUNNABLE = ["dense", "blockwise", "xla"]
OURS = ["dense", "blockwise"]
EDGES = masks.Edges(jnp.tile(jnp.arange(7), 5), jnp.repeat(jnp.arange(5), 7))
"""All pairs."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 2 queries and 3 keys: several, part-filled and skipped ones at tiny sizes."""
    divide(monkeypatch, SMALL_BLOCKS)


def attend(*arrays, **options):
    """`dot_product_attention` under jit; arrays among the options are constants of it."""
    return jax.jit(functools.partial(dot_product_attention, **options))(*arrays)


def probs_of(*arrays, **options):
    """(what `dot_product_attention` returns, probabilities) under jit."""
    run = functools.partial(capture, dot_product_attention, names=("probs",), **options)
    result, values = jax.jit(run)(*arrays)
    return result, values["probs"]


RULES = {
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


@pytest.mark.parametrize("implementation", [*RUNNABLE, "edges"])
@pytest.mark.parametrize("dtype", deep([jnp.float32, jnp.bfloat16], jnp.bfloat16))
def test_capture_changes_no_bit(implementation, dtype, optimized):
    """Also where q and k come out of other operations that could be fused anew."""
    options = {"mask": masks.Edges(*(e[::2] for e in EDGES))}
    options = options if implementation == "edges" else RULES

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


@pytest.mark.parametrize("implementation", ["dense", None])
def test_replaced_probabilities_multiply_the_values_as_they_are(implementation):
    """Ones give each query the sum of all values, of those too that the mask hides."""
    q, k, v = make(heads=(6, 6, 6), s=5)
    tap = Tap(patch={"probs": lambda probs, layer: jnp.ones_like(probs)})
    call = {"is_causal": True, "implementation": implementation}
    got = dot_product_attention(q, k, v, tap=tap, **call)
    assert_close(got, jnp.broadcast_to(v.sum(1, keepdims=True), got.shape))


def test_the_mask_hides_from_patched_scores():
    """And a call without a batch axis has values without one."""
    q, k, v = make(heads=(6, 6, 6), s=5)
    patch = {"scores": lambda scores, layer: scores.at[..., 4].set(50.0)}
    run = functools.partial(
        capture, dot_product_attention, names=("scores", "probs"), patch=patch, is_causal=True
    )
    out, values = run(q, k, v)
    assert not np.triu(values["probs"], 1).any()
    assert (values["scores"][..., 4] == 50).all()
    assert_close(out[:, 4], v[:, 4])
    one, of_one = run(q[0], k[0], v[0])
    assert_close((one, of_one), (out[0], {name: a[0] for name, a in values.items()}))


LOWEST = float(np.finfo("float32").min)


@pytest.mark.parametrize("limits", [SMALL_BLOCKS, SMALL_STRIPS])
@pytest.mark.parametrize("implementation", [*RUNNABLE, "edges"])
def test_a_bias_of_the_smallest_number_hides_less_than_a_mask(implementation, limits, monkeypatch):
    """A row of it is the mean of the values that the mask leaves; with -inf on all of them, 0."""
    divide(monkeypatch, limits)
    q, k, v = make(heads=(3, 3, 3))
    bias, mask = np.zeros((5, 7), "float32"), np.random.default_rng(0).random((5, 7)) < 0.6
    mask[1] = [False, True, True, False, False, True, False]
    mask[4] = True
    bias[1], bias[3], bias[4, :6] = LOWEST, -np.inf, LOWEST
    given = masks.Edges(*(e[mask.ravel()] for e in EDGES)) if implementation == "edges" else mask
    run = lambda name, mask: value_and_grads(
        functools.partial(dot_product_attention, mask=mask, implementation=name), q, k, v, bias
    )
    out, grads = run(implementation, given)
    assert_close(out[:, 1], v[:, mask[1]].mean(1))
    assert_close(out[:, 4], v[:, 6])
    assert not out[:, 3].any()
    assert all(np.isfinite(a).all() for a in grads)
    assert_close(grads, run("dense", mask)[1])


def test_sinks_of_heads_that_mix_and_of_minus_infinity():
    """The heads change places before the softmax and back after: each meets another's sink."""
    q, k, v = make(heads=(6, 6, 6))
    sink, swap = jnp.linspace(-1, 1, 6).reshape(6, 1, 1), jnp.eye(6)[::-1]
    mixed = attend(q, k, v, sink=sink, talking_heads=(swap, swap))
    assert_close(mixed, attend(q, k, v, sink=sink[::-1]))
    assert_close(attend(q, k, v, sink=-jnp.inf), attend(q, k, v))


@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_a_traced_scale_may_be_zero_beside_a_sink(scale):
    call = functools.partial(dot_product_attention, *make(), sink=1.0)
    got = jax.jit(lambda scale: call(scale=scale, implementation="xla"))(scale)
    assert_close(got, call(scale=scale, implementation="dense"))


@pytest.mark.parametrize("implementation", OURS)
def test_the_gradient_of_a_small_sink_keeps_its_digits(implementation):
    """-share times the output, where the share of the sink is 2e-6."""
    q, v = np.ones((1, 1, 1, 3), "float32"), np.full((1, 1, 1, 2), 3.0, "float32")
    sink = np.float32(np.sqrt(3) - 13)
    call = lambda s: jnp.sum(dot_product_attention(q, q, v, sink=s, implementation=implementation))
    share = 1 / (1 + np.exp(np.sqrt(3) - sink))
    assert_close(jax.grad(call)(sink), jnp.float32(-6 * share * (1 - share)))


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
    assert not np.array_equal(attend(q, k, eye, **call | {"dropout_key": jax.random.key(1)}), out)
    kept = np.asarray(out.swapaxes(1, 2)) > 0
    assert_close(out.swapaxes(1, 2), jnp.where(kept, probs / 0.7, 0))
    assert len(np.unique(kept.reshape(600, 70), axis=0)) == 600
    bits = kept - 0.7
    assert abs(bits.mean()) < 0.01
    for axis in range(4):  # 4.5 standard errors
        moved = np.mean(bits * np.roll(bits, 1, axis)) / 0.21
        assert abs(moved) < 4.5 / np.sqrt(bits.size)


def on_two_devices(function, in_specs, out_specs):
    shared = jax.shard_map(function, mesh=two_devices(), in_specs=in_specs, out_specs=out_specs)
    return jax.jit(shared)


ROWS, SHARED = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_vmap_without_a_batch_axis_and_shard_map(implementation):
    q, k, v = make()
    run = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
    lengths, expected = jnp.array([3, 7]), attend(q, k, v, is_causal=True)
    mapped = jax.vmap(lambda *a: run(*a[:3], key_value_seq_lengths=a[3]))(q, k, v, lengths)
    assert_close(mapped, attend(q, k, v, is_causal=True, key_value_seq_lengths=lengths))
    assert_close(on_two_devices(run, ROWS, ROWS)(q, k, v), expected)


@pytest.mark.parametrize("limits", deep([SMALL_BLOCKS, SMALL_STRIPS], SMALL_BLOCKS))
def test_transforms_of_the_gradient_of_blocks(limits, monkeypatch):
    """vmap with lengths of its own, remat in a scan, and shard_map with a bias and slopes that
    devices share."""
    divide(monkeypatch, limits)
    q, k, v = make()
    bias, slopes = jnp.linspace(-2, 2, 6 * 5 * 7).reshape(6, 5, 7), jnp.linspace(-1, 1, 6)
    arrays = (q, k, v, bias, slopes, jnp.array([3, 7]))

    def total(name, q, k, v, bias, slopes, lengths):
        call = {"key_value_seq_lengths": lengths, "score_mods": [ALiBi(slopes)]}
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, bias, implementation=name, **call)))

    of = lambda name: functools.partial(total, name)
    gradient = lambda run: jax.jit(jax.grad(run, tuple(range(5))))
    expected = gradient(of("dense"))(*arrays)
    mapped = jax.vmap(gradient(of("blockwise")), (0, 0, 0, None, None, 0))(*arrays)
    assert_close((*mapped[:3], *(jnp.sum(a, axis=0) for a in mapped[3:])), expected, loosen=3)

    def scanned(q, k, v, bias, slopes, lengths):
        body = jax.checkpoint(
            lambda c, x: (c + total("blockwise", *x[:3], bias, slopes, x[3]), None)
        )
        return jax.lax.scan(body, 0.0, tuple(a[:, None] for a in (q, k, v, lengths)))[0]

    assert_close(gradient(scanned)(*arrays), expected, loosen=3)
    shared = on_two_devices(
        lambda *a: jax.lax.psum(total("blockwise", *a), "data"),
        (ROWS, ROWS, ROWS, SHARED, SHARED, ROWS),
        SHARED,
    )
    assert_close(gradient(shared)(*arrays), expected, loosen=3)


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (2, 2, 1, 4)])
def test_bfloat16_with_axes_of_size_one(implementation, shape):
    """On a CPU XLA cannot compile products of such axes at the precision that jax.nn asks for."""
    (b, t, s, h), rng = shape, np.random.default_rng(0)
    shapes = (b, t, 2, h), (b, s, 1, h), (b, s, 1, h)
    q, k, v = (jnp.asarray(rng.normal(size=a), jnp.bfloat16) for a in shapes)
    run = functools.partial(dot_product_attention, implementation=implementation)
    out, grads = value_and_grads(run, q, k, v)
    assert_close(out, jnp.asarray(attention(q, k, v, {})[0], jnp.bfloat16))
    assert all(np.isfinite(g).all() for g in grads)


def test_alibi_slopes_as_published():
    """The numbers of get_slopes in github.com/ofirpress/attention_with_linear_biases."""
    of_eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(8), of_eight, rtol=1e-6)
    expected = [*of_eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    np.testing.assert_allclose(alibi_slopes(12), expected, rtol=1e-6)
