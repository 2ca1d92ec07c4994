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

NAMES = [*FIRST, "extra keys", "talking heads", "differential with extras", "learnt soft cap"]


@pytest.mark.parametrize("name", deep(NAMES, *NAMES[::2]))
def test_recorded_values_have_their_axes_and_change_no_bit(name, optimized):
    layout = CASES[name]
    arrays = make(layout)
    names = tuple(heads.head_values(layout))

    plain = functools.partial(multi_head_attention, layout=layout)
    recorded = functools.partial(capture, plain, names=names)
    call = {"params": arrays.params, "x": arrays.x, "context": arrays[2:]}
    output, values = jax.jit(recorded)(**call)
    np.testing.assert_array_equal(output, jax.jit(plain)(**call))
    assert set(values) == set(names)
    size = {
        "B": 2, "T": 7, "S": 8, "N": layout.num_score_maps, "H": layout.score_width,
        "K": layout.num_key_heads, "Kv": layout.num_value_heads, "V": layout.head_width,
        "O": layout.size("out_width"),
    }  # fmt: skip
    for value, axes in HEAD_VALUES.items():
        # Outputs and heads are of heads, q and the scores of softmax distributions.
        of_heads = size | ({"N": layout.num_heads} if value in ("heads", "outputs") else {})
        assert values[value].shape == tuple(of_heads[axis] for axis in axes.split())
    bias = arrays.params.get("o_bias", 0)
    assert_close(values["outputs"].sum(1) + bias, output, loosen=10)
    if not layout.extras:
        assert_close(values["probs"].sum(-1), jnp.ones_like(values["probs"][..., 0]))


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
        biases = jnp.zeros_like(zeros) + arrays.params.get("o_bias", 0)
        return (same, patched, layers, zeros), (run(), masked, run(query_scale=-1.0), biases)

    made, (plain, *others) = results()
    for got, expected in zip(made, (plain, *others), strict=True):
        assert_close(got, expected, loosen=100)
    assert not any(jnp.allclose(other, plain) for other in others)
