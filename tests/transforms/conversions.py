"""Heads and models with random weights, and whether two of them are one function on fresh inputs.

Nothing of `attnlab.transforms` compares them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from random_models import random_params as random_model  # noqa: F401  (tests of models use it)

from attnlab import heads
from attnlab.heads import positions
from attnlab.transforms import reparametrize
from attnlab.transforms.measure import float64


def small(name="standard", **fields):
    return heads.make_layout(name, **{"width": 12, "num_heads": 4} | fields)


def sized(name="standard", **fields):
    """Every axis of another size; even head_dim, for rotary positions."""
    kind = heads.LAYOUTS[name]
    sizes = dict(num_kv_heads=2, head_dim=4, value_dim=5, key_width=10, value_width=9, out_width=11,
                 latent_dim=7, query_latent_dim=3, rotary_dim=2, query_rank=5, key_rank=2,
                 value_rank=3)  # fmt: skip
    sizes |= {"head_dim": 8} if name == "collaborative" else {}
    known = {f.name for f in dataclasses.fields(kind)}
    sizes = {n: size for n, size in sizes.items() if n in known}
    biases = tuple(b for b in ("q", "k", "v", "o", "factors") if b in kind.bias_names)
    return kind(**dict(width=12, num_heads=6, biases=biases) | sizes | fields)


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


def in_float64(params, *args, **options):
    """`output` of weights and inputs of any precision."""
    with float64(), np.errstate(all="ignore"):
        w = {name: np.asarray(a, np.float64) for name, a in params.items()}
        return np.asarray(output(w, *args, **options))


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
    got, expected = (
        np.split(in_float64(these, *random_inputs(which), which, **options), len(SCALES))
        for these, which in ((params, layout), (expected_params, expected_layout))
    )
    worst = 0.0
    with np.errstate(all="ignore"):
        for a, b in zip(got, expected, strict=True):
            apart = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-300)
            worst = np.maximum(worst, apart)
    return float(worst)


def bases(shape, seed=0):
    """Random invertible matrices of moderate condition."""
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.normal(size=shape))[0] * rng.uniform(0.5, 2, size=shape[:-1])[..., None]


def hidden(params, layout, seed=0):
    """Heads in other bases of q and k, and of v and o: the same function."""
    keys, h, v = layout.sizes(("num_kv_heads", "head_dim", "value_dim"))
    return reparametrize(
        params, layout, qk=bases((keys, h, h), seed), vo=bases((keys, v, v), seed + 1)
    )


def each_head(params, layout):
    """Grouped heads with a key and value head for each: (params, layout)."""
    times = layout.num_heads // layout.size("num_kv_heads")
    made = {
        name: np.repeat(a, times, axis=-2) if name[0] in "kv" else a for name, a in params.items()
    }
    return made, dataclasses.replace(layout, num_kv_heads=layout.num_heads)


def logits(config, params, tokens, **options):
    """Of a model, which reads the first five tokens if it has an encoder."""
    options |= {} if config.encoder is None else {"source": tokens[:, :5]}
    model = config.build()
    return jax.jit(lambda p: model.apply({"params": p}, tokens, **options).logits)(params)
