"""cuDNN without a GPU: what it refuses; test_conformance.py runs its calls by jax.nn's XLA."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definition import make

from attnlab import dot_product_attention, explain
from attnlab.attention.jax_nn import assume_device, native_mask
from attnlab.attention.masks import MaskSpec

REFUSED = [
    ({}, None),
    ({"is_causal": True, "local_window_size": (2, 0)}, None),
    ({"key_value_seq_lengths": jnp.array([3, 0])}, None),
    ({"query": jnp.float32}, "cuDNN needs float16 or bfloat16, not float32"),
    ({"mask": jnp.ones((1, 8), bool)}, None),
    ({"local_window_size": (2, 1)}, None),
    ({"lengths": (5, 8)}, "the gradient of cuDNN needs even lengths, not T=5 and S=8"),
    ({"lengths": (6, 7), "is_causal": True}, "even lengths, not T=6 and S=7"),
    ({"bias": jnp.ones((6, 6, 8))}, r"bias has shape \(1, 6, 6, 8\)"),
    ({"wide": 129}, "head widths of at most 128, not 129"),
    ({"return_residual": True}, "jax.nn has no return_residual"),
    ({"lengths": (8, 8), "segments": np.array([[1, 1, 2, 2, 3, 3, 4, 4]] * 2)}, None),
    ({"lengths": (8, 8), "segments": jnp.ones((2, 8), int)}, "in a NumPy array, which is known"),
    ({"lengths": (8, 8), "segments": np.array([[1, 1, 2, 2, 3, 3, 3, 3]] * 2)}, "of one length"),
    ({"lengths": (6, 6), "segments": np.array([[1, 1, 1, 2, 2, 2]] * 2)}, "even lengths, not T=3"),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED)
def test_what_cudnn_refuses(call, reason):
    """On an A100 as seen from here; on a Hopper GPU heads may be twice as wide."""
    call = dict(call)
    t, s = call.pop("lengths", (6, 8))
    q, k, v = make(call.pop("query", jnp.bfloat16), t=t, s=s)
    if wide := call.pop("wide", None):
        v = jnp.ones((*v.shape[:3], wide), v.dtype)
    with assume_device("gpu", 8.0):
        could = explain(q, k, v, implementation="dense", **call)["cudnn"] == "could run"
        assert could == (reason is None)
        if reason:
            with pytest.raises(ValueError, match=reason):
                dot_product_attention(q, k, v, implementation="cudnn", **call)
    if wide:
        with assume_device("gpu", 9.0):
            assert explain(q, k, v, implementation="dense", **call)["cudnn"] == "could run"


def test_a_gpu_without_cudnn(monkeypatch):
    """JAX says so only when it is asked to run; this machine really has no cuDNN."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    q, k, v = make(jnp.bfloat16, t=6, s=8)
    with pytest.raises(ValueError, match=r"a GPU for which jax.nn raises 'cuDNN is not detected"):
        dot_product_attention(q, k, v, implementation="cudnn")


def test_lengths_above_the_axis_are_clipped():
    """cuDNN would read behind the arrays."""
    mask = native_mask(
        MaskSpec(6, 8, query_lengths=jnp.array([9, 3]), key_lengths=jnp.array([0, 99]))
    )
    assert mask["query_seq_lengths"].tolist() == [6, 3]
    assert mask["key_value_seq_lengths"].tolist() == [1, 8]


def test_cudnn_gets_a_mask_where_rows_are_empty():
    """Causal, one key back, 8 queries and 3 keys: the last rows attend to nothing."""
    assert native_mask(MaskSpec(8, 3, is_causal=True, window=(1, 0))) is None
    assert native_mask(MaskSpec(4, 3, is_causal=True, window=(1, 0))) is not None
