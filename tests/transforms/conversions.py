"""Heads with random weights, and whether two sets of heads are one function on fresh inputs.

Nothing of `attnlab.transforms` computes what these compare.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import heads
from attnlab.heads import positions
from attnlab.transforms.measure import float64

RNG = np.random.default_rng(11)


def random_params(layout, seed=0, size=2.0):
    """Normal weights of standard deviation size / sqrt(fan-in), biases and gates too."""
    rng, params = np.random.default_rng(seed), {}
    for name, weight in layout.all_weights.items():
        fan_in = np.prod([layout.size(axis) for axis in weight.in_axes] or [1])
        params[name] = rng.normal(size=layout.sizes(weight.axes)) * size / np.sqrt(fan_in)
    return params


SCALES = (1.0, 0.3, 3.0)


@functools.partial(jax.jit, static_argnames=("layout", "rotary", "logits_soft_cap"))
def output(params, inputs, mask, layout, rotary=False, logits_soft_cap=None, score_mods=()):
    """Of heads with their weights as they are."""
    x, y, z = inputs
    angles = None
    if rotary:
        size = layout.rotary_size - layout.rotary_size % 2
        angles = tuple(positions.rotary_angles(jnp.arange(a.shape[1]), size) for a in (x, y))
    return heads.multi_head_attention(
        params, x, layout, (y, z), mask=mask, rotary=angles, order="factored",
        logits_soft_cap=logits_soft_cap, score_mods=score_mods,
    )  # fmt: skip


def random_inputs(layout):
    """Inputs and masks of nine rows, three of each scale: all keys, some, and none for query 1."""
    rows = []
    for seed, scale in enumerate(SCALES, start=5):
        rng = np.random.default_rng(seed)
        sizes = zip((4, 6, 6), layout.input_widths, strict=True)
        inputs = [rng.normal(size=(3, n, width)) * scale for n, width in sizes]
        mask = np.ones((3, 1, 4, 6), bool)
        mask[1:] = rng.random((2, 1, 4, 6)) < 0.5
        mask[1, :, 1] = False
        rows.append((*inputs, mask))
    *inputs, mask = map(np.concatenate, zip(*rows, strict=True))
    return tuple(inputs), mask


def difference(params, layout, expected_params, expected_layout, **options):
    """Largest difference, relative to the largest output, over inputs of three sizes."""
    with float64(), np.errstate(all="ignore"):
        got, expected = (
            output(
                {name: np.asarray(a, np.float64) for name, a in these.items()},
                *random_inputs(which), which, **options,
            )
            for these, which in ((params, layout), (expected_params, expected_layout))
        )  # fmt: skip
        parts = [np.split(np.asarray(a), len(SCALES)) for a in (got, expected)]
        worst = 0.0
        for a, b in zip(*parts, strict=True):
            apart = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-300)
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
    return made, dataclasses.replace(layout, num_kv_heads=layout.num_heads)


def reordered(params, order):
    """Standard heads, one key head each, in another order."""
    axis = {"q": 1, "k": 1, "v": 1, "o": 0, "q_bias": 0, "k_bias": 0, "v_bias": 0}
    return {n: np.take(a, order, axis[n]) if n in axis else a for n, a in params.items()}
