"""Heads with random weights, and whether two sets of heads are one function on fresh inputs.

Nothing of `attnlab.transforms` computes what these compare.
"""

import contextlib

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from attnlab import heads
from attnlab.heads import positions

RNG = np.random.default_rng(11)


@contextlib.contextmanager
def float64():
    with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):
        yield


def random_params(layout, seed=0, size=2.0):
    """Normal weights of standard deviation size / sqrt(fan-in), biases and gates too."""
    rng, params = np.random.default_rng(seed), {}
    for name, weight in heads.layout.all_weights(layout).items():
        fan_in = np.prod([layout.size(axis) for axis in weight.reads] or [1])
        params[name] = rng.normal(size=layout.shape(weight)) * size / np.sqrt(fan_in)
    return params


def output(params, layout, seed=5, scale=1.0, rotary=False, **options):
    """Output of three rows: all keys, some, and none for query 1."""
    rng = np.random.default_rng(seed)
    x, y, z = (
        jnp.asarray(rng.normal(size=(3, n, width)) * scale)
        for n, width in zip((4, 6, 6), layout.input_widths, strict=True)
    )
    mask = np.ones((3, 1, 4, 6), bool)
    mask[1:] = rng.random((2, 1, 4, 6)) < 0.5
    mask[1, :, 1] = False
    angles = None
    if rotary:
        size = layout.rotary_size - layout.rotary_size % 2
        angles = tuple(positions.rotary_angles(jnp.arange(a.shape[1]), size) for a in (x, y))
    params = {name: jnp.asarray(np.asarray(a, np.float64)) for name, a in params.items()}
    return np.asarray(
        heads.multi_head_attention(
            params, x, layout, (y, z), mask=mask, rotary=angles, order="factored", **options
        )
    )


def difference(params, layout, expected_params, expected_layout, **options):
    """Largest difference, relative to the largest output, over inputs of three sizes."""
    worst = 0.0
    with float64(), np.errstate(all="ignore"):
        for seed, scale in ((5, 1.0), (6, 0.3), (7, 3.0)):
            got = output(params, layout, seed, scale, **options)
            expected = output(expected_params, expected_layout, seed, scale, **options)
            apart = np.max(np.abs(got - expected)) / max(np.max(np.abs(expected)), 1e-300)
            worst = np.maximum(worst, apart)
    return float(worst)


def bases(shape, seed=0):
    """Random invertible matrices of moderate condition."""
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.normal(size=shape))[0] * rng.uniform(0.5, 2, size=shape[:-1])[..., None]


def hidden(params, layout, seed=0):
    """Standard or bilinear heads in other bases of q and k, and of v and o: the same function."""
    params = dict(params)
    n, k = layout.num_heads, layout.size("num_kv_heads")
    if "q" in params:
        a = bases((k, layout.size("head_dim"), layout.size("head_dim")), seed)
        each = np.repeat(a, n // k, axis=0)
        back = np.linalg.inv(a).swapaxes(-1, -2)
        params["q"] = np.einsum("dnh,nhi->dni", params["q"], each)
        params["k"] = np.einsum("dnh,nhi->dni", params["k"], back)
        for name, by in (("q_bias", each), ("k_bias", back)):
            if name in params:
                params[name] = np.einsum("nh,nhi->ni", params[name], by)
    b = bases((k, layout.size("value_dim"), layout.size("value_dim")), seed + 1)
    params["v"] = np.einsum("dnh,nhi->dni", params["v"], b)
    if "v_bias" in params:
        params["v_bias"] = np.einsum("nh,nhi->ni", params["v_bias"], b)
    params["o"] = np.linalg.inv(np.repeat(b, n // k, axis=0)) @ params["o"]
    return params


def each_head(params, layout):
    """Grouped heads with a key and value head for each: (params, layout)."""
    times = layout.num_heads // layout.size("num_kv_heads")
    made = {
        name: np.repeat(a, times, axis=-2) if name[0] in "kv" else a for name, a in params.items()
    }
    import dataclasses

    return made, dataclasses.replace(layout, num_kv_heads=layout.num_heads)


def reordered(params, order):
    """Standard heads, one key head each, in another order."""
    axis = {"q": 1, "k": 1, "v": 1, "o": 0, "q_bias": 0, "k_bias": 0, "v_bias": 0}
    return {n: np.take(a, order, axis[n]) if n in axis else a for n, a in params.items()}
