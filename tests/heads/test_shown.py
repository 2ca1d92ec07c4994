"""What heads show and how they are edited, over every row: see `contract.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep
from contract import DEFINITIONS, FIRST, SPECS, attend, make

from attnlab import contraction_orders, multi_head_attention
from attnlab.observe import OF_HEADS, OF_ORDER

pytestmark = pytest.mark.usefixtures("outside_row")


def probs_and_outputs(w, x, context, values, spec):
    """[B, N, T, S] and [B, N, T, O] head by head in NumPy, from the definition."""
    s = spec.sizes | {"eps": spec.norm_eps}
    w, x, context, values = jax.tree.map(np.asarray, (w, x, context, values))
    probs, outputs = [], []
    for n in range(s["N"]):
        q, k, v, o = DEFINITIONS[spec.layout](w, n, n // (s["N"] // s["K"]), x, context, values, s)
        scores = q @ k.swapaxes(1, 2) * (spec.scale or q.shape[-1] ** -0.5)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        probs.append(p / p.sum(-1, keepdims=True))
        out = probs[-1] @ v @ o
        if not spec.output:  # its place in the heads side by side
            out = np.pad(out, ((0, 0), (0, 0), (n * s["V"], (s["N"] - n - 1) * s["V"])))
        outputs.append(out)
    return np.stack(probs, 1), np.stack(outputs, 1)


PLAIN = [name for name in SPECS if "qk_norm" not in SPECS[name].fields]


@pytest.mark.parametrize("name", deep(PLAIN, *FIRST))
def test_values_are_those_of_the_layout_in_every_order(name, x64):
    """Probs and outputs by hand; the outputs and the bias add up to that of attention."""
    spec, show = SPECS[name].spec(), tuple(OF_HEADS)
    arrays = make(spec, jnp.float64)
    orders = contraction_orders(spec, 2, 7, 8, cross=True)
    flip = {"probs": lambda a, layer: a[..., ::-1], "outputs": lambda a, layer: a * a}

    @jax.jit
    def run(w, x, context, values):
        run = functools.partial(
            multi_head_attention, w, x, context, value_context=values, spec=spec
        )
        shown = {order: run(order=order, show=show) for order in orders}
        edited = [run(order=order, edit=flip, show=("probs", "outputs")) for order in orders]
        return shown, run(), edited

    shown, out, edited = run(*arrays)
    bias = arrays[0].get("o_bias", 0)
    probs, outputs = probs_and_outputs(*arrays, spec)
    for got, seen in shown.values():
        assert_close(got, out, loosen=1e3)
        assert_close(seen, shown["factored"][1], loosen=1e3)
        assert_close(seen["outputs"].sum(1) + bias, out, loosen=1e3)
        assert_close((seen["probs"], seen["outputs"]), (probs, outputs), loosen=1e3)
    for got, seen in edited:
        assert_close(seen["probs"], probs[..., ::-1], loosen=1e3)
        assert_close(seen["outputs"].sum(1) + bias, got, loosen=1e3)
        assert_close(seen, edited[0][1], loosen=1e3)


@pytest.mark.parametrize("name", deep(SPECS, *FIRST))
def test_a_gate_of_zero_is_an_edit_to_zero(name):
    spec = SPECS[name].spec()
    w, x, context, values = make(spec)
    texts = (context, values)
    gate = jnp.ones(spec.num_heads).at[1].set(0)
    remove = {"heads": lambda heads, layer: heads.at[:, :, 1].set(0)}
    gated = attend(w, x, *texts, spec=spec, head_gate=gate)
    assert_close(attend(w, x, *texts, spec=spec, edit=remove), gated, loosen=10)
    assert np.abs(gated - attend(w, x, *texts, spec=spec)).max() > 0.1


def test_an_edit_in_another_order_is_refused():
    spec = SPECS["wide"].spec()
    w, x, *_ = make(spec)
    for name in OF_ORDER:
        with pytest.raises(ValueError, match=f"its {name} are not those to edit; use 'factored'"):
            multi_head_attention(w, x, spec=spec, order="bilinear", edit={name: lambda a, layer: a})
