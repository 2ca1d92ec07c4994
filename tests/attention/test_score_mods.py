"""Score modifications apart from the contract of the backends, which draws them too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from definition import SMALL_BLOCKS, SMALL_STRIPS, divide

from attnlab import dot_product_attention, explain
from attnlab.attention import (
    ALiBi,
    RelativeBias,
    ScoreMod,
    SoftCap,
    alibi_slopes,
)

B, T, S, N, K, KV, H, V = 2, 5, 7, 6, 3, 2, 4, 8


def draw(*shape, scale=2.0, seed=3):
    return jnp.asarray(scale * np.random.default_rng([seed, *shape]).normal(size=shape))


@pytest.fixture(params=["blocks", "strips"])
def divided(request, monkeypatch):
    """Blocks of 2 queries and 3 keys, or one block in strips of 2 queries and single heads."""
    divide(monkeypatch, SMALL_BLOCKS if request.param == "blocks" else SMALL_STRIPS)


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
