"""JAX's attention kernel for TPUs, which no device chooses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, two_devices, value_and_gradient
from definition import make

import attnlab.contrib  # noqa: F401
from attnlab import dot_product_attention, explain
from attnlab.attention import SoftCap
from attnlab.tap import Tap

Q = jnp.ones((1, 4, 2, 4))
REFUSED = [
    ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "has no dropout_rate"),
    ({"sink": 0.0}, "has no sink"),
    ({"talking_heads": (jnp.eye(2), None)}, "has no talking_heads"),
    ({"return_residual": True}, "has no return_residual"),
    ({"tap": Tap(patch={"scores": lambda a, layer: a})}, "it has no scores to patch"),
    ({"score_mods": [SoftCap(2.0)]}, "has no score_mods"),
    ({"value": Q[:, :, :1]}, r"as many key heads \(2\) as value heads \(1\)"),
    ({"value": Q.astype(jnp.bfloat16)}, "one dtype, not float32, float32, bfloat16"),
    ({"bias": jnp.ones(4)}, "splash attention has no bias"),
    ({"mask": jnp.ones((4, 4), bool)}, "no mask array: rules"),
    ({"query": Q.astype(jnp.float16)}, "needs float32 or bfloat16, not float16"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_calls_that_splash_refuses(changes, reason):
    call = {"query": Q, "key": Q, "value": Q, "implementation": "splash"} | changes
    with pytest.raises(ValueError, match=f"{reason}.*; use implementation='dense' or None"):
        dot_product_attention(**call)
    chosen = explain(**(call | {"implementation": None}))
    assert not chosen["splash"].startswith(("chosen", "could run"))


def test_splash_is_for_tpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="for TPUs, and a CPU interprets it; this is a gpu"):
        dot_product_attention(Q, Q, Q, implementation="splash")


def check(arrays, *, loosen=1.0, **call):
    """Output and gradients in two seeds side by side are those of `dense`."""
    twice = [jnp.stack([a, 0.7 * a[:, ::-1]]) for a in arrays]
    found, expected = (
        value_and_gradient(
            jax.vmap(functools.partial(dot_product_attention, implementation=name, **call)), *twice
        )
        for name in ("splash", "dense")
    )
    assert found[0].dtype == arrays[0].dtype
    assert np.abs(np.asarray(expected[0], np.float32)).max() > 0.5
    assert_close(found, expected, loosen=loosen)


SPLASH = {
    "causal, soft cap": ({"is_causal": True, "logits_soft_cap": 4.0, "scale": 0.3}, 150, 140),
    "window, rows and blocks without keys": ({"local_window_size": (5, 3)}, 300, 20),
    "causal window": ({"local_window_size": 9, "is_causal": True}, 130, 260),
    "lengths": (
        {"query_seq_lengths": jnp.array([100, 150]), "key_value_seq_lengths": jnp.array([0, 133])},
        150, 140,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASH)
def test_splash_is_dense(case):
    """Interpreted: more than one block of queries and keys, V above H, grouped keys."""
    call, t, s = SPLASH[case]
    check(make(heads=(6, 3, 3), t=t, s=s), **call)


@pytest.mark.slow
def test_splash_in_bfloat16_and_wider_than_a_tile():
    q, k, _ = make(jnp.bfloat16, t=9, s=140, heads=(2, 1, 1))
    v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 140, 1, 200)), jnp.bfloat16)
    check((q, k, v), is_causal=True, loosen=2)


@pytest.mark.parametrize("lengths", [[300, 141], [200, 3]])
def test_splash_takes_lengths_above_the_axis_as_the_whole_axis(lengths):
    """140 keys are padded to 256: a length above 140 must not let a query attend to the padding."""
    q, k, v = make(t=5, s=140, heads=(2, 1, 1))
    call = {"key_value_seq_lengths": jnp.array(lengths), "query_seq_lengths": jnp.array([9, 400])}
    run = functools.partial(dot_product_attention, **call)
    assert_close(run(q, k, v, implementation="splash"), run(q, k, v, implementation="dense"))


def test_splash_in_shard_map():
    """With the check of varying axes the kernel fails in JAX; refused, and right without it."""
    q, k, v = make(t=5, s=7, heads=(2, 1, 1))
    mesh, spec = two_devices(), jax.sharding.PartitionSpec("data")
    run = functools.partial(dot_product_attention, implementation="splash")
    share = functools.partial(jax.shard_map, run, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=r"only in jax.shard_map\(..., check_vma=False\)"):
        jax.eval_shape(share(), q, k, v)
    got = jax.jit(share(check_vma=False))(q, k, v)
    assert_close(got, dot_product_attention(q, k, v))
