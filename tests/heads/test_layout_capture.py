"""Recording and replacing intermediate values of heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from layout_cases import CASES, FIRST, make

from attnlab import heads
from attnlab.heads import HEAD_VALUES, multi_head_attention
from attnlab.tap import Tap, capture

FORMS = [name for name in CASES if CASES[name].chain[0]]
NAMES = [*FIRST, "extra keys", "talking heads", "differential with extras", "learnt soft cap"]


def sizes(layout, arrays):
    return {
        "B": 2, "T": arrays.x.shape[1], "S": arrays.y.shape[1], "N": layout.num_score_maps,
        "H": layout.score_width, "K": layout.num_key_heads, "Kv": layout.num_value_heads,
        "V": layout.head_width, "O": layout.size("out_width"),
    }  # fmt: skip


@pytest.mark.parametrize("name", deep(NAMES, *NAMES[::2]))
def test_recorded_values_have_their_axes_and_change_no_bit(name, optimized):
    layout = CASES[name]
    arrays = make(layout)
    names = tuple(heads.head_values(layout))

    @jax.jit
    def recorded(params, x, y, z):
        return capture(multi_head_attention, params, x, layout, (y, z), names=names)

    @jax.jit
    def plain(params, x, y, z):
        return multi_head_attention(params, x, layout, (y, z))

    output, values = recorded(*arrays)
    np.testing.assert_array_equal(output, plain(*arrays))
    assert set(values) == set(names)
    size = sizes(layout, arrays)
    for value, axes in HEAD_VALUES.items():
        # Outputs and heads are of heads, q and the scores of softmax distributions.
        of_heads = size | ({"N": layout.num_heads} if value in ("heads", "outputs") else {})
        assert values[value].shape == tuple(of_heads[axis] for axis in axes.split())
    bias = arrays.params.get("o_bias", 0)
    assert_close(values["outputs"].sum(1) + bias, output, loosen=10)
    if not layout.extras:
        assert_close(values["probs"].sum(-1), jnp.ones_like(values["probs"][..., 0]))


@pytest.mark.parametrize("name", deep(FORMS, *FORMS[::2]))
def test_values_of_another_form_are_those_of_the_layout(name, x64):
    layout = CASES[name]
    params, x, *context = make(layout, jnp.float64)
    names, last = tuple(HEAD_VALUES), layout.chain[0][-1].layout.name

    def run(order):
        call = functools.partial(capture, multi_head_attention, layout=layout, names=names)
        return jax.jit(functools.partial(call, order=order))(params, x, context=tuple(context))

    output, values = run(last)
    expected, of_layout = run("factored")
    assert_close(output, expected, loosen=100)
    assert_close(values, of_layout, loosen=100)


@pytest.mark.parametrize("name", NAMES)
def test_patches_replace_values(name, x64):
    """Heads by a mask, outputs by zeros; a patch that returns its value changes nothing."""
    layout = CASES[name]
    arrays = make(layout, jnp.float64)
    mask = jnp.arange(layout.num_heads, dtype=jnp.float64)

    def run(patch=None, **inputs):
        return multi_head_attention(
            arrays.params, arrays.x, layout, arrays[2:], layer=3, tap=Tap(patch=patch), **inputs
        )

    @jax.jit
    def results():
        same = run({value: lambda a, layer: a for value in heads.head_values(layout)})
        patched = run({"heads": lambda a, layer: a * mask[:, None]})
        zeros = run({"outputs": lambda a, layer: 0 * a})
        layers = run({"q": lambda a, layer: a * (layer - 4)})
        masked = run(head_mask=jnp.stack([mask, mask]))  # of each text
        return run(), same, patched, masked, zeros, layers, run(query_scale=-1.0)

    plain, same, patched, masked, zeros, layers, scaled = results()
    assert_close(same, plain, loosen=100)
    assert_close(patched, masked, loosen=100)
    assert not jnp.allclose(masked, plain)
    assert_close(zeros, jnp.zeros_like(plain) + arrays.params.get("o_bias", 0))
    assert_close(layers, scaled, loosen=100)
    assert not jnp.allclose(layers, plain)


def test_capture_under_transformations():
    layout = heads.Wide(width=6, num_heads=2)
    params, x = make(layout)[:2]
    f = functools.partial(capture, multi_head_attention, params, layout=layout, names=("probs",))

    def scanned(x):
        def layer(x, i):
            out, values = jax.checkpoint(lambda x: f(x, layer=i))(x)
            return x + out, values

        return jax.lax.scan(layer, x, jnp.arange(3))

    _, values = jax.jit(scanned)(x)
    assert values["probs"].shape == (3, 2, 2, 7, 7)
    grad = jax.grad(lambda x: f(x)[1]["probs"][..., 0].sum())(x)
    assert jnp.abs(grad).max() > 0
    assert jax.vmap(lambda one: f(one[None])[1]["probs"])(x).shape == (2, 1, 2, 7, 7)


def test_errors_of_capture_and_patch():
    layout = heads.Wide(width=6, num_heads=2)
    call = functools.partial(capture, multi_head_attention, *make(layout)[:2], layout)
    for keywords, error, message in (
        ({"names": ("lambda",)}, ValueError, "no value 'lambda'"),
        ({"names": (), "patch": {"nope": jnp.add}}, ValueError, "no value 'nope'"),
        ({"names": "probs"}, TypeError, r"a tuple of names such as \('probs',\), not 'probs'"),
        ({"names": (), "patch": {"q": lambda a, _: a[0]}}, ValueError, "'q' returned shape"),
        (
            {"names": (), "patch": {"q": lambda a, _: a}, "order": "bilinear"},
            ValueError, "a patch of 'q' means",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(**keywords)
