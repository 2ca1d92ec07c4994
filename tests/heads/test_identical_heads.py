"""Weights with which all heads compute the same, for every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from layout_cases import CASES, make

from attnlab import heads
from attnlab.heads import HEAD_VALUES, identical_heads, multi_head_attention
from attnlab.tap import capture

# The gates of a router differ by head whatever its weights are.
NAMES = [
    name for name, layout in CASES.items()
    if not any(isinstance(extra, heads.MixtureOfHeads) for extra in layout.extras)
]  # fmt: skip
SLICED = (heads.Narrow, heads.NarrowTied)


def of_one_slice(layout, a):
    """Inputs whose slices are all the same: heads that read a slice each then read the same."""
    if type(layout) not in SLICED:
        return a
    width = a.shape[-1] // layout.num_heads
    return jnp.tile(a[..., :width], layout.num_heads)


@pytest.mark.parametrize("name", deep(NAMES, *NAMES[::3]))
def test_all_heads_are_the_first(name, x64):
    """Every value of every head; the first head stays what it was, but where heads are mixed."""
    layout = CASES[name]
    params, *inputs = make(layout, jnp.float64)
    x, y, z = (of_one_slice(layout, a) for a in inputs)

    @jax.jit
    def values(params):
        run = functools.partial(capture, names=tuple(HEAD_VALUES))
        run = functools.partial(run, multi_head_attention, layout=layout, context=(y, z))
        return [run(p, x)[1] for p in (params, identical_heads(params, layout))]

    before, after = values(params)
    pairs = layout.num_score_maps > layout.num_heads
    for value, axes in HEAD_VALUES.items():
        if value == "outputs" and not layout.output_projection:
            continue  # each head has its own columns of the output
        axis = next(i for i, a in enumerate(axes.split()) if a in ("N", "K", "Kv"))
        a, a_before = (np.moveaxis(np.asarray(of[value]), axis, 0) for of in (after, before))
        if pairs and value in ("q", "k", "scores", "probs"):
            # Softmax distributions of differential heads: [key head, pair, query head].
            a = a.reshape(layout.size("num_kv_heads"), 2, -1, *a.shape[1:]).swapaxes(1, 2)
            a, a_before = a.reshape(-1, *a.shape[2:]), a_before[None, :1]
            assert a.shape[1] == 2
        assert np.abs(a - a[:1]).max() <= 1e-10 * np.abs(a).max(), value
        # Where heads or softmax distributions share a weight, the first may change.
        if heads.TalkingHeads not in map(type, layout.extras) and not (pairs and layout.extras):
            got = a[:1, :1] if a_before.shape[1] == 1 and pairs and a.shape[1] == 2 else a[0]
            assert_close(got, a_before if got.ndim == a_before.ndim else a_before[0], loosen=1000)


def changed(layout, names):
    params = make(layout)[0]
    same = jax.jit(lambda p: identical_heads(p, layout, names))(params)
    return {name for name in params if not np.array_equal(params[name], same[name])}


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("standard", ("q", "k"), {"q", "q_bias", "k", "k_bias"}),
        ("standard", ("heads",), {"q", "q_bias", "k", "k_bias", "v", "v_bias"}),
        ("alt", ("v",), {"mix", "v", "v_bias"}),
        ("collaborative", ("q", "k"), {"mixing"}),
        ("extra keys", ("probs",), {"q", "k", "k_bias", "extra_k", "sink"}),
        ("absorbed latent", ("outputs",), {"q", "q_rotary", "k", "v", "o"}),
        ("keys are values", ("v",), {"k", "k_bias"}),
        ("tied slices", ("v",), {"v"}),
        ("tied slices", ("k",), {"q", "q_bias"}),
        ("bilinear", ("k",), set()),
        ("latent", ("k",), {"k"}),
        ("tensor product", ("v",), {"v_heads", "v_heads_bias"}),
        ("talking heads", ("scores",), {"q", "q_bias", "mix_scores"}),
        ("gated elements", ("probs",), {"q_heads", "q_heads_bias", "k_heads", "k_heads_bias"}),
    ],
)
def test_only_weights_on_which_the_values_depend_change(name, names, expected):
    assert changed(CASES[name], names) == expected
