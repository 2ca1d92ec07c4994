"""Blocks: every gradient, what is skipped, and that no [T, S] array exists."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import SMALL_BLOCKS, divide

from attnlab import dot_product_attention
from attnlab.attention import ScoreMod
from attnlab.attention.blocks import BlockLimits, block_sizes


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 2 queries and 3 keys."""
    divide(monkeypatch, SMALL_BLOCKS)


def make(shapes, scale=2.0):
    rng = np.random.default_rng(5)
    return [jnp.asarray(scale * rng.normal(size=shape)) for shape in shapes]


# B=2 T=5 S=7 N=12 K=2 Kv=3 H=4 V=8: heads come in groups of lcm(6, 4) = 12 query heads.
QKV = [(2, 5, 12, 4), (2, 7, 2, 4), (2, 7, 3, 8)]


def test_huge_scores_keep_exact_gradients(small_blocks):
    """A log sum exp of 1e5 is rounded to 0.008: top and sum are kept apart."""
    q, k, v = (a.astype(jnp.float32) for a in make(QKV))
    k = jnp.ones_like(k) * 200 + k * 1e-3
    q = jnp.ones_like(q) * 250

    def gradient(name):
        run = lambda v: dot_product_attention(q, k, v, implementation=name)
        return jax.jit(lambda v: jax.vjp(run, v)[1](jnp.ones((2, 5, 12, 8)))[0])(v)

    # The gradients of v are column sums of probabilities: 5 rows times 4 query heads in all.
    assert_close(jnp.sum(gradient("blockwise"), axis=1), jnp.full((2, 3, 8), 20.0))
    assert_close(gradient("blockwise"), gradient("dense"), loosen=500)


@pytest.mark.parametrize(
    ("call", "visited"),
    [
        ({}, 4 * 3),
        ({"is_causal": True}, 1 + 2 + 2 + 3),  # rows 0-1: keys 0-1; 2-3: 0-3; 4-5: 0-5; 6-7: 0-7
        ({"local_window_size": (1, 0)}, 1 + 2 + 1 + 2),  # 0-1; 1-3; 3-5; 5-7
        ({"key_value_seq_lengths": np.array([4])}, 4 * 2),
        ({"query_seq_lengths": np.array([3])}, 2 * 3),
        ({"key_value_seq_lengths": np.array([0])}, 0),
        ({"segments": np.array([[1, 1, 2, 2, 2, 3, 3, 0]])}, 1 + 2 + 3 + 2),  # 0-1; 2-4; 2-6; 5-6
        ({"segments": np.array([[1] * 4 + [2] * 4]), "is_causal": True}, 1 + 2 + 1 + 2),
    ],
)
def test_blocks_that_no_query_attends_to_are_skipped(call, visited, small_blocks):
    """Counted as they run, forward and backward: T = S = 8 in blocks of 2 queries, 3 keys."""
    count = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Counted(ScoreMod):
        factor: jax.Array

        def apply(self, scores, *, head, query, key):
            jax.debug.callback(lambda: count.append(1))
            return self.factor * scores

    q, k, v = (a.astype(jnp.float32) for a in make([(1, 8, 1, 4)] * 3))
    call = {"implementation": "blockwise", "score_mods": [Counted(jnp.float32(1))], **call}
    run = functools.partial(dot_product_attention, **call)
    jax.block_until_ready(jax.jit(run)(q, k, v))
    jax.effects_barrier()
    assert len(count) == visited
    grad = jax.grad(lambda q, k, v: jnp.sum(run(q, k, v)), (0, 1, 2))
    jax.block_until_ready(jax.jit(grad)(q, k, v))
    jax.effects_barrier()
    assert len(count) == 3 * visited  # forward again, and once more for the gradient


def dots(jaxpr):
    """Shapes that the matrix products of a program make, loops counted once."""
    made = [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    for equation in jaxpr.eqns:
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            leaf = getattr(leaf, "jaxpr", leaf)
            made += dots(leaf) if hasattr(leaf, "eqns") else []
    return made


def test_a_strip_reads_only_the_keys_that_its_queries_may_see(monkeypatch):
    """Known before any array is: T = 10 in strips of 3, 3, 3 and 1."""
    divide(monkeypatch, BlockLimits(small_queries=1))
    x = jax.ShapeDtypeStruct((2, 10, 1, 4), jnp.float32)

    def scores_of(**call):
        run = functools.partial(dot_product_attention, implementation="blockwise", **call)
        jaxpr = jax.make_jaxpr(run)(x, x, x).jaxpr
        return [shape[2:] for shape in dots(jaxpr) if shape[-1] != 4]

    assert scores_of(is_causal=True) == [(3, 3), (3, 6), (3, 9), (1, 10)]
    assert scores_of(local_window_size=(2, 0)) == [(3, 3), (3, 5), (3, 5), (1, 3)]
    lengths = {"key_value_seq_lengths": np.array([3, 10]), "is_causal": True}
    assert scores_of(**lengths) == [(3, 3), (3, 6), (3, 9), (1, 10)]
    assert scores_of() == [(10, 10)]


def test_a_piece_has_few_heads():
    """8 heads of 256 tokens: one at a time, or four where a rule cuts them into strips."""
    x = jax.ShapeDtypeStruct((1, 256, 8, 32), jnp.float32)

    def scores_of(**call):
        run = functools.partial(dot_product_attention, implementation="blockwise", **call)
        return [shape for shape in dots(jax.make_jaxpr(run)(x, x, x).jaxpr) if shape[-1] != 32]

    assert scores_of() == 8 * [(1, 1, 256, 256)]
    assert scores_of(is_causal=True) == 2 * [(1, 4, 64, s) for s in (64, 128, 192, 256)]


def largest(jaxpr):
    """Entries of the largest array that a program makes."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
    inner = []
    for equation in jaxpr.eqns:
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            leaf = getattr(leaf, "jaxpr", leaf)
            if hasattr(leaf, "eqns"):
                inner.append(largest(leaf))
    return max([*sizes, *inner], default=0)


@pytest.mark.parametrize("feature", ["causal window", "lengths", "padding mask", "segments"])
def test_no_array_of_all_scores_exists(feature):
    """T = S = 16384, forward and backward: the largest array is q, or the scores of one block."""
    length = 16384
    call = {
        "causal window": {"is_causal": True, "local_window_size": 99},
        "lengths": {"key_value_seq_lengths": jnp.array([9000, 0]), "is_causal": True},
        "segments": {"segments": np.repeat(np.arange(16), 1024)[None].repeat(2, 0)},
        "padding mask": {"mask": np.arange(length)[None] < 9000, "is_causal": True},
    }[feature]
    x = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.float32)

    def run(*qkv):
        return jnp.sum(dot_product_attention(*qkv, implementation="blockwise", **call))

    jaxpr = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(x, x, x)
    assert 0 < largest(jaxpr.jaxpr) <= 2 * length * 2 * 64


def test_blocks_cover_everything_with_little_padding():
    for shape in [(1, 8, 4096, 4096), (7, 6, 257, 1), (16, 8, 256, 300), (3, 5, 1, 70000)]:
        batch, heads, queries, keys = block_sizes(shape, 1)
        assert shape[0] % batch == shape[1] % heads == 0
        assert queries * keys <= 512**2
        assert batch * heads * queries * keys <= 2**19
        for length, block in zip(shape[2:], (queries, keys), strict=True):
            assert -length % block < -(-length // block)  # less than one per block
    assert block_sizes((2, 12, 4096, 4096), 12)[1] == 12  # a group is never cut
    assert block_sizes((1, 8, 1, 9000), 1)[3] == 9000  # one query: few, long blocks


@pytest.mark.slow
def test_transforms_of_the_gradient(small_blocks):
    """vmap with lengths of its own, scan, remat and shard_map with a bias that devices share."""
    q, k, v, bias = (a.astype(jnp.float32) for a in make([*QKV, (12, 5, 7)]))
    lengths = jnp.array([3, 7])

    def total(name, q, k, v, bias, lengths):
        call = {"key_value_seq_lengths": lengths, "implementation": name}
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, bias, **call)))

    gradient = jax.grad(functools.partial(total, "blockwise"), (0, 1, 2, 3))
    expected = jax.jit(jax.grad(functools.partial(total, "dense"), (0, 1, 2, 3)))(
        q, k, v, bias, lengths
    )
    *mapped, mapped_bias = jax.jit(jax.vmap(gradient, (0, 0, 0, None, 0)))(q, k, v, bias, lengths)
    assert_close((*mapped, jnp.sum(mapped_bias, axis=0)), expected)

    def scanned(q, k, v, bias, lengths):
        body = jax.checkpoint(lambda c, x: (c + total("blockwise", *x[:3], bias, x[3]), None))
        xs = (q[:, None], k[:, None], v[:, None], lengths[:, None])
        return jax.lax.scan(body, 0.0, xs)[0]

    assert_close(jax.jit(jax.grad(scanned, (0, 1, 2, 3)))(q, k, v, bias, lengths), expected)
    auto, devices = jax.sharding.AxisType.Auto, jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=devices)
    rows, shared = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    split = jax.shard_map(
        lambda *a: jax.lax.psum(total("blockwise", *a), "data"),
        mesh=mesh,
        in_specs=(rows, rows, rows, shared, rows),
        out_specs=shared,
    )
    assert_close(jax.jit(jax.grad(split, (0, 1, 2, 3)))(q, k, v, bias, lengths), expected)


def test_second_derivatives_are_for_dense(small_blocks):
    q, k, v = (a.astype(jnp.float32) for a in make(QKV))
    run = dot_product_attention
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: run(q, k, v, implementation="blockwise"), (q,), (q,))
    jax.eval_shape(lambda q: jax.jvp(lambda q: run(q, k, v), (q,), (q,)), q)
