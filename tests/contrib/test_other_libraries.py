"""Backends of other libraries that no device chooses: tokamax, and JAX's kernel for TPUs."""

import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from test_attention import make, some_mask

import attnlab.contrib  # noqa: F401
from attnlab import dot_product_attention, explain
from attnlab.attention import SoftCap, dispatch
from attnlab.tap import Tap

Q = jnp.ones((1, 4, 2, 4))


@pytest.fixture
def installed(monkeypatch):
    """tokamax, as far as a refusal looks."""
    find = importlib.util.find_spec
    found = lambda name, *rest: name == "tokamax" or find(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_without_tokamax(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ValueError, match=r'tokamax is missing: pip install "attnlab\[tokamax\]"'):
        dot_product_attention(Q, Q, Q, implementation="tokamax")
    chosen = [name for name, why in explain(Q, Q, Q).items() if why.startswith("chosen")]
    assert chosen == ["dense"]


def test_a_tokamax_that_cannot_be_imported(installed, monkeypatch):
    """It is there, but not what it needs itself."""
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ModuleNotFoundError, match=r'tokamax is .* "attnlab\[tokamax\]"'):
        dot_product_attention(Q, Q, Q, implementation="tokamax")


BOTH = {
    "dropout": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "has no dropout_rate",
    ),
    "sink": ({"sink": 0.0}, "has no sink"),
    "talking heads": ({"talking_heads": (jnp.eye(2), None)}, "has no talking_heads"),
    "residual": ({"return_residual": True}, "has no return_residual"),
    "patch": ({"tap": Tap(patch={"scores": lambda a, layer: a})}, "it has no scores to patch"),
    "score mods": ({"score_mods": [SoftCap(2.0)]}, "has no score_mods"),
    "value heads": ({"value": Q[:, :, :1]}, r"as many key heads \(2\) as value heads \(1\)"),
    "two dtypes": ({"value": Q.astype(jnp.bfloat16)}, "one dtype, not float32, float32, bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["tokamax", "splash"])
@pytest.mark.parametrize("case", BOTH)
def test_what_both_refuse(implementation, case, installed):
    changes, reason = BOTH[case]
    call = {"query": Q, "key": Q, "value": Q, "implementation": implementation} | changes
    with pytest.raises(ValueError, match=f"{reason}; use implementation='dense' or None"):
        dot_product_attention(**call)
    chosen = explain(**(call | {"implementation": None}))
    assert not chosen[implementation].startswith(("chosen", "could run"))


@pytest.mark.parametrize(
    ("implementation", "call", "reason"),
    [
        ("splash", {"bias": jnp.ones(4)}, "splash attention has no bias"),
        ("splash", {"mask": jnp.ones((4, 4), bool)}, "no mask array: the causal rule"),
        ("splash", {"dtype": jnp.float16}, "needs float32 or bfloat16, not float16"),
        ("splash", {"device": "gpu"}, "for TPUs, and a CPU interprets it; this is a gpu"),
        ("tokamax", {"dtype": jnp.float16}, "tokamax has no float16 on a CPU"),
        ("tokamax", {"device": "gpu", "width": 257}, "at most 256 on a GPU, not 257"),
    ],
)
def test_what_one_refuses(implementation, call, reason, installed, monkeypatch):
    call = dict(call)
    if device := call.pop("device", None):
        monkeypatch.setattr(jax, "default_backend", lambda: device)
    q = Q.astype(call.pop("dtype", Q.dtype))
    v = jnp.ones((*Q.shape[:3], call.pop("width", 4)), q.dtype)
    with pytest.raises(ValueError, match=reason):
        dot_product_attention(q, q, v, implementation=implementation, **call)


def test_tokamax_needs_a_scale_that_is_known(installed):
    run = lambda scale: dot_product_attention(Q, Q, Q, scale=scale, implementation="tokamax")
    with pytest.raises(ValueError, match="a scale that is known while JAX traces"):
        jax.eval_shape(run, 1.0)


def test_no_device_chooses_them():
    chosen = {entry.backend for entries in dispatch.CHOICES.values() for entry in entries}
    assert not chosen & set(dispatch.CONTRIB)


def both(implementation, arrays, **call):
    """Output and gradients in two seeds side by side, of `dense` and of another backend."""

    def loss(name, *arrays):
        out = dot_product_attention(*arrays, implementation=name, **call)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    @jax.jit
    def run(*arrays):
        grad = lambda name: jax.value_and_grad(
            functools.partial(loss, name), tuple(range(len(arrays))), has_aux=True
        )
        return {name: jax.vmap(grad(name))(*arrays) for name in ("dense", implementation)}

    twice = [jnp.stack([a, 0.7 * a[:, ::-1]]) for a in arrays]
    found = run(*twice)
    (_, out), grads = found[implementation]
    (_, expected), expected_grads = found["dense"]
    assert out.dtype == arrays[0].dtype
    assert np.abs(np.asarray(expected, np.float32)).max() > 0.5
    assert_close(out, expected)
    return grads, expected_grads


@pytest.mark.parametrize("cap", [None, 3.0])
def test_tokamax_is_dense(cap):
    """The contract of every backend is in test_attention.py; here what is its own: two seeds at
    once, a window of other lengths, a bias of -inf, which a cap makes finite; and it reads no
    command line."""
    pytest.importorskip("tokamax")
    bias = jnp.where(some_mask()[:1, 0], 0.5, -jnp.inf)
    call = {"logits_soft_cap": cap, "local_window_size": (3, 1), "scale": 0.7}
    line = list(sys.argv)
    assert_close(*both("tokamax", make(), bias=bias, **call))
    assert sys.argv == line


SPLASH = {
    "causal, soft cap": ({"is_causal": True, "logits_soft_cap": 4.0, "scale": 0.3}, 150, 140),
    "window, rows and blocks without keys": ({"local_window_size": (5, 3)}, 300, 20),
    "causal window": ({"local_window_size": 9, "is_causal": True}, 130, 260),
    "lengths": (
        {
            "query_seq_lengths": jnp.array([100, 150]),
            "key_value_seq_lengths": jnp.array([0, 133]),
        },
        150, 140,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASH)
def test_splash_is_dense(case):
    """Interpreted: more than one block of queries and keys, V above H, grouped keys."""
    call, t, s = SPLASH[case]
    assert_close(*both("splash", make(heads=(6, 3, 3), t=t, s=s), **call))


@pytest.mark.slow
def test_splash_in_bfloat16_and_wider_than_a_tile():
    q, k, _ = make(jnp.bfloat16, t=9, s=140, heads=(2, 1, 1))
    v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 140, 1, 200)), jnp.bfloat16)
    grads, expected = both("splash", (q, k, v), is_causal=True)
    assert_close(grads, expected, loosen=2)


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
    devices, auto = jax.devices()[:2], jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=devices)
    spec = jax.sharding.PartitionSpec("data")
    run = functools.partial(dot_product_attention, implementation="splash")
    share = functools.partial(jax.shard_map, run, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=r"only in jax.shard_map\(..., check_vma=False\)"):
        jax.eval_shape(share(), q, k, v)
    got = jax.jit(share(check_vma=False))(q, k, v)
    assert_close(got, dot_product_attention(q, k, v))
