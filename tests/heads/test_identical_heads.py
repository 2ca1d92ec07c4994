"""Weights with which all heads compute the same, for every layout."""

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


def by_head(layout, value, a):
    """[heads, ...] of a value; [heads, 2, ...] of the softmax distributions of differential heads,
    which are ordered [key head, first or second, query head]."""
    axis = next(i for i, name in enumerate(HEAD_VALUES[value].split()) if name in ("N", "K", "Kv"))
    a = np.moveaxis(np.asarray(a), axis, 0)
    if layout.name == "differential" and value in ("q", "k", "scores", "probs"):
        order = np.arange(len(a)).reshape(layout.size("num_kv_heads"), 2, -1).swapaxes(1, 2)
        return a[order.reshape(-1, 2)]
    if layout.name == "gated_differential" and value in ("q", "scores", "probs"):
        return a.reshape(-1, 2, *a.shape[1:])
    return a


@pytest.mark.parametrize("name", deep(NAMES, *NAMES[::3]))
def test_all_heads_are_the_first(name, x64):
    """Every value of every head; the first head stays what it was, but where heads are mixed."""
    layout = CASES[name]
    params, x, *context = make(layout, jnp.float64)
    if layout.name in ("narrow", "narrow_tied"):  # heads that read the same slice
        width = layout.width // layout.num_heads
        x, *context = (jnp.tile(a[..., :width], layout.num_heads) for a in (x, *context))

    @jax.jit
    def values(params):
        call = {"layout": layout, "context": tuple(context), "names": tuple(HEAD_VALUES)}
        return capture(multi_head_attention, params, x, **call)[1]

    before, after = values(params), values(identical_heads(params, layout))
    # Where heads or softmax distributions share a weight, the first may change.
    pairs = layout.num_score_maps > layout.num_heads
    mixed = heads.TalkingHeads in map(type, layout.extras) or (pairs and layout.extras)
    for value in HEAD_VALUES:
        if value == "outputs" and not layout.output_projection:
            continue  # each head has its own columns of the output
        a, a_before = (by_head(layout, value, of[value]) for of in (after, before))
        assert_close(a, np.broadcast_to(a[:1], a.shape), loosen=100)
        if not mixed:
            assert_close(a[0], a_before[0], loosen=1000)


def test_nested_adapters_stay():
    params, x, *_ = make(layout := CASES["grouped"])
    adapted = params | {"adapter": {"a": x}}
    assert identical_heads(adapted, layout)["adapter"] is adapted["adapter"]


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
