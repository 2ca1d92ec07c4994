"""Differential attention and mixture-of-heads.

The contract tests run over them too; here is what is their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close
from layout_cases import make

from attnlab import heads, models
from attnlab.heads import MixtureOfHeads, multi_head_attention
from attnlab.tap import capture


def test_gates_and_balance_of_a_mixture_of_heads():
    """Each token uses `shared` + `top` heads; gates are 1 on average."""
    extra = MixtureOfHeads(top=2, shared=1, balance=0.5)
    layout = heads.Standard(width=12, num_heads=6, extras=(extra,))
    params, x = make(layout)[:2]
    names = ("head_gates", *heads.loss_names(layout))
    assert names == ("head_gates", "head_balance")
    real = np.arange(x.shape[1]) < 4  # padding does not count, whatever it holds

    @jax.jit
    def run(params, x):
        padded = jnp.where(real[:, None], x, jnp.nan)
        mask = jnp.broadcast_to(real, x.shape[:2])
        seen = functools.partial(capture, names=("head_balance",))
        masked = seen(multi_head_attention, params, padded, layout, padding_mask=mask)[1]
        alone = seen(multi_head_attention, params, x[:, :4], layout)[1]
        groups, probs = (jax.nn.softmax(x @ params[name]) for name in ("router_groups", "router"))
        values = capture(multi_head_attention, params, x, layout, names=names)[1]
        return values, masked["head_balance"], alone["head_balance"], 2 * groups, probs

    values, masked, alone, groups, probs = run(params, x)
    gates = np.asarray(values["head_gates"])
    assert (np.sum(gates > 0, axis=-1) == 3).all()
    assert_close(gates.sum(-1), groups @ np.float32([1, 2]), loosen=10)
    probs = np.asarray(probs).reshape(-1, 5)
    used = np.stack([p >= np.sort(p)[-2] for p in probs])
    np.testing.assert_allclose(
        values["head_balance"], 0.5 * 5 * np.sum(probs.mean(0) * used.mean(0)), rtol=1e-5
    )
    assert_close(masked, alone)
    spec = models.LayerSpec(
        heads=layout, cross=layout, ffn=models.FFN(width=0), norm=models.Norm(scale=False)
    )  # in cross-attention too

    def losses(x, padding_mask):
        inputs = models.LayerInputs(padding_mask=padding_mask, source=models.Source(x[:, :3]))
        both = {"attention": params, "cross": params}
        return models.transformer_layer(both, x, spec, inputs).losses

    mask = jnp.broadcast_to(real, x.shape[:2])
    assert_close(losses(x, mask), losses(x[:, :4], None))


def test_a_bias_of_a_head_is_that_of_both_of_its_maps(x64):
    """By hand: 4 heads in 2 groups, with a bias for each head; layer 0, where l0 = 0.2."""
    layout = heads.Differential(width=12, num_heads=4, num_kv_heads=2, head_dim=3, value_dim=5)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=a) for name, a in heads.weight_shapes(layout).items()}
    x, bias = rng.normal(size=(2, 6, 12)), rng.normal(size=(4, 6, 6))

    @jax.jit
    def run(params, x, bias):
        names = ("q", "k", "v")
        return capture(multi_head_attention, params, x, layout, bias=bias, names=names)

    got, values = jax.tree.map(np.asarray, run(params, x, bias))
    q, k, v = (values[name] for name in "qkv")
    one, two = np.exp(np.sum(params["lambda_q"] * params["lambda_k"], axis=-1))
    made = []
    for head, (group, place) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        probs = []
        for which in (0, 1):
            query, key = q[:, :, 4 * group + 2 * which + place], k[:, :, 2 * group + which]
            scores = np.einsum("bth,bsh->bts", query, key) / 3**0.5 + bias[head]
            e = np.exp(scores - scores.max(-1, keepdims=True))
            probs.append(e / e.sum(-1, keepdims=True))
        made.append((probs[0] - (one - two + 0.2) * probs[1]) @ v[:, :, group])
    stacked = np.stack(made, axis=2)
    normed = stacked / np.sqrt((stacked**2).mean(-1, keepdims=True) + 1e-5) * params["head_norm"]
    expected = np.einsum("btnv,nvo->bto", 0.8 * normed, params["o"])
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
