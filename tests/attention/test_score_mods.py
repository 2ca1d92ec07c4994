"""Score modifications: every backend that applies them agrees with the definition and dense."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import SMALL_BLOCKS, SMALL_STRIPS, divide

from attnlab import dot_product_attention, explain, masks
from attnlab.attention import (
    ALiBi,
    RelativeBias,
    ScoreMod,
    SoftCap,
    alibi_slopes,
    relative_buckets,
)
from attnlab.tap import capture

B, T, S, N, K, KV, H, V = 2, 5, 7, 6, 3, 2, 4, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mine(ScoreMod):
    """A user's own: all three indices, an integer leaf, a nested leaf and a static field."""

    weights: dict
    shift: jax.Array
    power: int = dataclasses.field(default=2, metadata={"static": True})

    def apply(self, scores, *, head, query, key):
        distance = (query - key + self.shift) ** self.power
        return scores * jnp.cos(self.weights["a"][head] * distance) - self.weights["b"] * query


def draw(*shape, scale=2.0, seed=3):
    return jnp.asarray(scale * np.random.default_rng([seed, *shape]).normal(size=shape))


def make_mods():
    return {
        "cap": [SoftCap(1 + jnp.abs(draw(N)))],
        "one cap": [SoftCap(jnp.asarray(1.5))],
        "alibi": [ALiBi(draw(N))],
        "relative": [RelativeBias(draw(N, 8), max_distance=6)],
        "relative, one side": [RelativeBias(draw(N, 4), max_distance=5, two_sided=False)],
        "a user's own": [Mine({"a": draw(N), "b": draw()}, jnp.asarray(1))],
        "all": [
            RelativeBias(draw(N, 8), max_distance=6),
            SoftCap(1 + jnp.abs(draw(N))),
            Mine({"a": draw(N), "b": draw()}, jnp.asarray(1)),
            ALiBi(draw(N)),
        ],
    }


MASK = np.random.default_rng(1).random((B, N, T, S)) < 0.5
MASK[0, :, 2] = False
CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "bias": (N, T, S)},
    "mask": {"mask": MASK, "bias": (B, 1, T, S)},
    "window, soft cap": {"local_window_size": (2, 1), "logits_soft_cap": 3.0, "bias": (N, 1, S)},
    "lengths": {
        "query_seq_lengths": np.array([5, 0]),
        "key_value_seq_lengths": np.array([4, 99]),
    },
    "dropout, sink": {
        "dropout_rate": 0.4,
        "dropout_key": jax.random.key(3),
        "is_causal": True,
        "sink": np.linspace(-1, 1, N)[:, None, None],
    },
}


@pytest.fixture(params=["blocks", "strips"])
def divided(request, monkeypatch):
    """Blocks of 2 queries and 3 keys, or one block in strips of 2 queries and single heads."""
    divide(monkeypatch, SMALL_BLOCKS if request.param == "blocks" else SMALL_STRIPS)


def value_and_grads(name, mods, call, heads=(N, K, KV)):
    """Output, residual and the gradients of q, k, v, bias and every floating-point leaf."""
    n, k, kv = heads
    call = dict(call)
    arrays = [draw(B, T, n, H), draw(B, S, k, H), draw(B, S, kv, V)]
    if shape := call.pop("bias", None):
        arrays.append(draw(*shape))
    leaves, tree = jax.tree.flatten(mods)
    of_floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]
    weights = draw(B, T, n, V, seed=7), draw(B, T, n, seed=8)

    def loss(arrays, floats):
        rest = iter(floats)
        given = [next(rest) if f else a for f, a in zip(of_floats, leaves, strict=True)]
        options = call | {"score_mods": jax.tree.unflatten(tree, given), "implementation": name}
        out, residual = dot_product_attention(*arrays, return_residual=True, **options)
        seen = jnp.where(jnp.isfinite(residual), residual, 0)
        number = jnp.sum(jnp.sin(out) * weights[0]) + jnp.sum(jnp.cos(seen) * weights[1])
        return number, (out, jnp.exp(residual))

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, made), grads = run(arrays, [a for f, a in zip(of_floats, leaves, strict=True) if f])
    return made, grads


# Each modification with one call and every call with "all" of them; the other pairs are slow.
KEPT = {*zip(make_mods(), [*CALLS, "mask"], strict=True), *(("all", call) for call in CALLS)}
PAIRS = [
    pytest.param(mods, call, marks=() if (mods, call) in KEPT else pytest.mark.slow)
    for mods in make_mods()
    for call in CALLS
]


@pytest.mark.parametrize(("mods", "call"), PAIRS)
def test_blockwise_equals_dense(mods, call, divided, x64):
    """In float64: the output, the residual, and the gradients of q, k, v, bias and every leaf."""
    # With keys of its own for every head, scores would be kept as [S, T] without modifications.
    heads = (N, N, N) if call in ("window, soft cap", "lengths") else (N, K, KV)
    mods = make_mods()[mods]
    got = value_and_grads("blockwise", mods, CALLS[call], heads)
    expected = value_and_grads("dense", mods, CALLS[call], heads)
    assert_close(got, expected, loosen=100)
    assert all(np.asarray(g).any() for g in jax.tree.leaves(expected[1]))


@pytest.mark.parametrize("mods", ["cap", "relative", "all"])
def test_edges_equal_dense(mods, x64):
    """The padding of the list reaches no gradient."""
    allowed = np.random.default_rng(7).random((T, S)) < 0.4
    receivers, senders = np.nonzero(allowed)
    edges = masks.Edges(np.append(senders, [S, S]), np.append(receivers, [T, T]))
    mods, call = make_mods()[mods], {"bias": (N, T, S), "mask": edges}
    got = value_and_grads("edges", mods, call)
    assert_close(got, value_and_grads("dense", mods, call), loosen=100)


def test_dense_equals_the_definition(x64):
    """Written out with loops, in the documented order; the tap sees the scores after all of it."""
    q, k, v, bias = draw(1, T, N, H), draw(1, S, N, H), draw(1, S, N, V), draw(N, T, S)
    caps, slopes, table = 1 + jnp.abs(draw(N)), draw(N), draw(N, 8)
    mods = [SoftCap(caps), ALiBi(slopes), RelativeBias(table, max_distance=6)]
    out, values = capture(
        dot_product_attention, q, k, v, bias, names=("scores",), score_mods=mods, is_causal=True
    )
    scores = np.zeros((1, N, T, S))
    for n, t, s in np.ndindex(N, T, S):
        bucket = relative_buckets(jnp.asarray(s - t), num_buckets=8, max_distance=6, two_sided=True)
        x = float(q[0, t, n] @ k[0, s, n]) / 2 + float(bias[n, t, s])
        x = float(caps[n]) * np.tanh(x / float(caps[n]))
        scores[0, n, t, s] = x + float(slopes[n]) * (s - t) + float(table[n, int(bucket)])
    # Keys that no query attends to are zero.
    assert_close(values["scores"][..., :T], jnp.asarray(scores[..., :T]))
    probs = jax.nn.softmax(scores, where=np.tri(T, S, dtype=bool), axis=-1)
    assert_close(out, jnp.einsum("bnts,bsnv->btnv", probs, v))


def test_talking_heads_come_after():
    q, k, v = (draw(2, 5, N, 4, seed=i) for i in range(3))
    swap = jnp.eye(N)[::-1]
    mods = [ALiBi(draw(N))]
    got = dot_product_attention(q, k, v, score_mods=mods, talking_heads=(swap, swap))
    assert_close(got, dot_product_attention(q, k, v, score_mods=mods))


def test_a_python_number_is_a_cap():
    """The same numbers as `logits_soft_cap`, which JAX names."""
    q, k, v = (draw(2, 5, N, 4, seed=i).astype(jnp.float32) for i in range(3))
    for name in ("dense", "blockwise"):
        run = functools.partial(dot_product_attention, q, k, v, implementation=name)
        assert_close(run(score_mods=[SoftCap(2.0)]), run(logits_soft_cap=2.0))


def test_bfloat16_and_a_leaf_of_its_own_dtype():
    q, k, v = (draw(2, 5, N, 4, seed=i).astype(jnp.bfloat16) for i in range(3))

    def gradient(name):
        loss = lambda slopes: jnp.sum(
            dot_product_attention(q, k, v, score_mods=[ALiBi(slopes)], implementation=name).astype(
                jnp.float32
            )
            ** 2
        )
        return jax.jit(jax.grad(loss))(draw(N).astype(jnp.bfloat16))

    assert gradient("blockwise").dtype == jnp.bfloat16
    assert_close(gradient("blockwise"), gradient("dense"), loosen=2)


def test_transforms(divided, x64):
    """vmap, remat in a scan, and shard_map with leaves that devices share."""
    q, k, v, slopes = draw(2, T, N, H), draw(2, S, K, H), draw(2, S, KV, V), draw(N)

    def total(name, q, k, v, slopes):
        out = dot_product_attention(q, k, v, score_mods=[ALiBi(slopes)], implementation=name)
        return jnp.sum(jnp.sin(out))

    gradient = jax.grad(functools.partial(total, "blockwise"), (0, 1, 2, 3))
    expected = jax.jit(jax.grad(functools.partial(total, "dense"), (0, 1, 2, 3)))(q, k, v, slopes)
    *mapped, of_slopes = jax.jit(jax.vmap(gradient, (0, 0, 0, None)))(q, k, v, slopes)
    assert_close((*mapped, jnp.sum(of_slopes, axis=0)), expected, loosen=10)

    def scanned(q, k, v, slopes):
        body = jax.checkpoint(lambda c, x: (c + total("blockwise", *x, slopes), None))
        return jax.lax.scan(body, 0.0, (q[:, None], k[:, None], v[:, None]))[0]

    got = jax.jit(jax.grad(scanned, (0, 1, 2, 3)))(q, k, v, slopes)
    assert_close(got, expected, loosen=10)
    auto, devices = jax.sharding.AxisType.Auto, jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=devices)
    rows, shared = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    split = jax.shard_map(
        lambda *a: jax.lax.psum(total("blockwise", *a), "data"),
        mesh=mesh,
        in_specs=(rows, rows, rows, shared),
        out_specs=shared,
    )
    got = jax.jit(jax.grad(split, (0, 1, 2, 3)))(q, k, v, slopes)
    assert_close(got, expected, loosen=10)


def test_no_array_of_all_scores_exists():
    """T = S = 4096 with all published modifications, forward and backward."""
    from test_blockwise import largest

    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    mods = [SoftCap(jnp.ones(2)), ALiBi(jnp.ones(2)), RelativeBias(jnp.ones((2, 32)))]

    def run(q, k, v, mods):
        call = {"implementation": "blockwise", "is_causal": True, "score_mods": mods}
        return jnp.sum(dot_product_attention(q, k, v, **call))

    jaxpr = jax.make_jaxpr(jax.grad(run, (0, 1, 2, 3)))(x, x, x, mods)
    assert 0 < largest(jaxpr.jaxpr) <= 4096 * 2 * 64


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (2, [1 / 16, 1 / 256]),
        (1, [1 / 256]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_as_published(num_heads, expected):
    """The numbers of get_slopes in github.com/ofirpress/attention_with_linear_biases."""
    np.testing.assert_allclose(alibi_slopes(num_heads), expected, rtol=1e-6)


class NoPytree(ScoreMod):
    def apply(self, scores, *, head, query, key):
        return scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongShape(ScoreMod):
    factor: float

    def apply(self, scores, *, head, query, key):
        return self.factor * scores[:, :1]


@pytest.mark.parametrize(
    ("mods", "error", "message"),
    [
        (ALiBi(jnp.ones(N)), TypeError, "score_mods must be a sequence of ScoreMod, not ALiBi"),
        ([abs], TypeError, "must be an instance of a subclass of ScoreMod"),
        ([NoPytree()], TypeError, r"score_mods\[0\] \(NoPytree\) is no pytree; decorate its class"),
        ([WrongShape(2.0)], ValueError, r"WrongShape.apply returned shape \(2, 1, 5, 7\)"),
        ([SoftCap(jnp.ones(4))], ValueError, r"SoftCap.cap \(4,\) must have shape \(\) or \(6,\)"),
        ([ALiBi(jnp.ones(4))], ValueError, r"ALiBi.slopes \(4,\) must have shape \(6,\)"),
        (
            [RelativeBias(jnp.ones((6, 7)))],
            ValueError,
            r"table \(6, 7\) .*at least 4 buckets, an e",
        ),
        (
            [RelativeBias(jnp.ones((6, 32)), max_distance=8)],
            ValueError,
            "max_distance 8 must be ab",
        ),
    ],
)
def test_bad_modifications_say_what_to_do(mods, error, message):
    q, k, v = jnp.ones((B, T, N, H)), jnp.ones((B, S, K, H)), jnp.ones((B, S, KV, V))
    for name in ("dense", "blockwise"):
        with pytest.raises(error, match=message):
            dot_product_attention(q, k, v, score_mods=mods, implementation=name)


def test_other_backends_refuse():
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    reasons = explain(q, q, q, score_mods=[ALiBi(jnp.ones(2))])
    assert reasons["dense"].startswith("chosen")
    assert reasons["blockwise"] == "could run"
    assert reasons["xla"] == "jax.nn has no score_mods"
    with pytest.raises(ValueError, match="has no score_mods; use implementation='dense' or None"):
        dot_product_attention(q, q, q, score_mods=[ALiBi(jnp.ones(2))], implementation="xla")
