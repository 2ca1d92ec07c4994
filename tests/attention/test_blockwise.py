"""Blocks: exact gradients, what is skipped, and that no [T, S] array exists."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import SMALL_BLOCKS, divide, make

from attnlab import dot_product_attention
from attnlab.attention import ALiBi, RelativeBias, ScoreMod, SoftCap
from attnlab.attention.blocks import PACKED_LIMITS, BlockLimits, block_sizes

blockwise = functools.partial(dot_product_attention, implementation="blockwise")


def test_huge_scores_keep_exact_gradients(monkeypatch):
    """A log sum exp of 1e5 is rounded to 0.008: top and sum are kept apart."""
    divide(monkeypatch, SMALL_BLOCKS)
    q, k, v = make(heads=(12, 2, 3))  # heads come in groups of lcm(6, 4) = 12 query heads
    k = jnp.ones_like(k) * 200 + k * 1e-3
    q = jnp.ones_like(q) * 250

    def gradient(name):
        run = lambda v: dot_product_attention(q, k, v, implementation=name)
        return jax.jit(lambda v: jax.vjp(run, v)[1](jnp.ones((2, 5, 12, 8)))[0])(v)

    # The gradients of v are column sums of probabilities: 5 rows times 4 query heads in all.
    assert_close(jnp.sum(gradient("blockwise"), axis=1), jnp.full((2, 3, 8), 20.0))
    # Scores of 2e5 are rounded to 0.016, the probabilities to as many parts.
    assert_close(gradient("blockwise"), gradient("dense"), loosen=800)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_float16_gradients_of_long_rows_do_not_underflow(implementation):
    """A cotangent of 1e-4, over 4096 keys of probability 1/4096: 2e-8 is 0 in float16."""
    rng = np.random.default_rng(0)
    q, k = 0.01 * rng.normal(size=(1, 4, 1, 8)), rng.normal(size=(1, 4096, 1, 8))

    def gradient(dtype, name):
        given, keys = jnp.asarray(q, jnp.float16), jnp.asarray(k, jnp.float16).astype(dtype)
        run = lambda q: dot_product_attention(q, keys, keys, scale=1.0, implementation=name)
        out, pull = jax.vjp(run, given.astype(dtype))
        return pull(jnp.full_like(out, 1e-4))[0]

    assert_close(gradient("float16", implementation), gradient("float32", "dense"))


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
def test_blocks_that_no_query_attends_to_are_skipped(call, visited, monkeypatch):
    """Counted as they run, forward and backward: T = S = 8 in blocks of 2 queries, 3 keys."""
    divide(monkeypatch, SMALL_BLOCKS)
    count = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Counted(ScoreMod):
        factor: jax.Array

        def apply(self, scores, *, head, query, key):
            jax.debug.callback(lambda: count.append(1))
            return self.factor * scores

    arrays = [jnp.ones((1, 8, 1, 4))] * 3
    run = functools.partial(blockwise, score_mods=[Counted(jnp.float32(1))], **call)
    jax.block_until_ready(jax.jit(run)(*arrays))
    jax.effects_barrier()
    assert len(count) == visited
    grad = jax.grad(lambda *qkv: jnp.sum(run(*qkv)), (0, 1, 2))
    jax.block_until_ready(jax.jit(grad)(*arrays))
    jax.effects_barrier()
    assert len(count) == 3 * visited  # forward again, and once more for the gradient


def equations(jaxpr):
    """Those of a program and of all its loops."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            leaf = getattr(leaf, "jaxpr", leaf)
            if hasattr(leaf, "eqns"):
                yield from equations(leaf)


def scores_of(x, **call):
    """Shapes of the scores that a forward pass makes, loops counted once."""
    jaxpr = jax.make_jaxpr(functools.partial(blockwise, **call))(x, x, x).jaxpr
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    shapes = [e.outvars[0].aval.shape for e in products]
    return [shape for shape in shapes if shape[-1] != x.shape[-1]]


def test_a_strip_reads_only_the_keys_that_its_queries_may_see(monkeypatch):
    """Known before any array is: T = 10 in strips of 3, 3, 3 and 1."""
    divide(monkeypatch, BlockLimits(small_queries=1))
    strips = lambda **call: [
        shape[2:] for shape in scores_of(jax.ShapeDtypeStruct((2, 10, 1, 4), "float32"), **call)
    ]
    assert strips(is_causal=True) == [(3, 3), (3, 6), (3, 9), (1, 10)]
    assert strips(local_window_size=(2, 0)) == [(3, 3), (3, 5), (3, 5), (1, 3)]
    lengths = {"key_value_seq_lengths": np.array([3, 10]), "is_causal": True}
    assert strips(**lengths) == [(3, 3), (3, 6), (3, 9), (1, 10)]
    assert strips() == [(10, 10)]


def test_a_piece_has_few_heads():
    """8 heads of 256 tokens: one at a time, or four where a rule cuts them into strips."""
    x = jax.ShapeDtypeStruct((1, 256, 8, 32), "float32")
    assert scores_of(x) == 8 * [(1, 1, 256, 256)]
    assert scores_of(x, is_causal=True) == 2 * [(1, 4, 64, s) for s in (64, 128, 192, 256)]


MODS = [SoftCap(np.ones(2)), ALiBi(np.ones(2)), RelativeBias(np.ones((2, 32)))]
NO_SCORES = {
    "causal window": {"is_causal": True, "local_window_size": 99},
    "lengths": {"key_value_seq_lengths": np.array([9000, 0]), "is_causal": True},
    "segments": {"segments": np.repeat(np.arange(16), 1024)[None].repeat(2, 0)},
    "padding mask": {"mask": np.arange(16384)[None] < 9000, "is_causal": True},
    "score modifications": {"is_causal": True, "score_mods": MODS},
}


@pytest.mark.parametrize("feature", NO_SCORES)
def test_no_array_of_all_scores_exists(feature):
    """T = S = 16384, forward and backward: the largest array is q, or the scores of one block."""
    x = jax.ShapeDtypeStruct((2, 16384, 2, 64), jnp.float32)
    run = lambda *qkv: jnp.sum(blockwise(*qkv, **NO_SCORES[feature]))
    jaxpr = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(x, x, x).jaxpr
    assert max(v.aval.size for e in equations(jaxpr) for v in e.outvars) <= 2 * 16384 * 2 * 64


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
    packed = block_sizes((8, 4, 1024, 1024), 1, PACKED_LIMITS)
    assert packed == (1, 4, 64, 64)  # a block of two rows would read the keys of both


def test_second_derivatives_are_for_dense():
    q, k, v = make()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: blockwise(q, k, v), (q,), (q,))
    jax.eval_shape(lambda q: jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (q,)), q)
