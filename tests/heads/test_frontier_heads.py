"""Differential attention, learnt soft caps and mixture-of-heads.

The contract tests run over them too; here is what is their own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from layout_cases import CASES, by_hand, make

from attnlab import heads, models
from attnlab.heads import (
    Differential,
    LearntSoftCap,
    MixtureOfHeads,
    Standard,
    multi_head_attention,
)
from attnlab.tap import capture


def test_the_layer_index_of_differential_heads_may_be_traced(x64):
    layout = CASES["differential"]
    arrays = make(layout, jnp.float64)

    @jax.jit
    def layers(params, x, y, z):
        run = functools.partial(multi_head_attention, params, x, layout, (y, z))
        return jax.lax.map(lambda layer: run(layer=layer), jnp.arange(3))

    got = layers(*arrays)
    for layer in range(3):
        assert_close(got[layer], by_hand(layout, *arrays, layer=layer))
    assert not jnp.allclose(got[0], got[1])


def test_differential_factor_is_a_value_of_the_layout():
    layout = Differential(width=16, num_heads=4)
    params, x = make(layout)[:2]
    patch = {"lambda": lambda value, layer: 0 * value}

    @jax.jit
    def run(params, x):
        f = functools.partial(capture, multi_head_attention, params, x, layout, names=("lambda",))
        return f(layer=5)[1]["lambda"], f(patch=patch)[0], f()[0]

    found, zero, plain = run(params, x)
    a, b = (np.asarray(params[name]) for name in ("lambda_q", "lambda_k"))
    start = 0.8 - 0.6 * np.exp(-0.3 * 5)
    factor = np.exp(a[0] @ b[0]) - np.exp(a[1] @ b[1]) + start
    np.testing.assert_allclose(found, factor, rtol=1e-5)
    assert not np.allclose(zero, plain)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", ["learnt soft cap", "differential with a learnt soft cap"])
def test_a_learnt_soft_cap_runs_on_every_backend(name, implementation, x64):
    """With the gradient of the cap, checked by finite differences of the definition."""
    layout = CASES[name]
    params, x = make(layout, jnp.float64)[:2]
    cotangent = np.random.default_rng(1).normal(size=(2, 7, layout.size("out_width")))

    @jax.jit
    def run(params):
        def f(params):
            return multi_head_attention(
                params, x, layout, is_causal=True, implementation=implementation
            )

        out, pull = jax.vjp(f, params)
        return out, pull(jnp.asarray(cotangent))[0]["log_soft_cap"]

    def definition(params):
        return by_hand(layout, params, x, x, x, allowed=np.tri(7) > 0)

    out, grad = run(params)
    assert_close(out, definition(params))
    for head in range(layout.num_score_maps):
        step = 1e-6 * np.eye(layout.num_score_maps)[head]
        up, down = (
            definition(params | {"log_soft_cap": params["log_soft_cap"] + s}) for s in (step, -step)
        )
        expected = np.sum(cotangent * (up - down)) / 2e-6
        np.testing.assert_allclose(grad[head], expected, rtol=1e-5, atol=1e-6)


def test_an_initial_learnt_soft_cap_is_a_fixed_one():
    learnt = heads.Latent(width=12, num_heads=3, extras=(LearntSoftCap(2.0),))
    fixed = dataclasses.replace(learnt, extras=(heads.SoftCap(2.0),))
    x = 5 * make(learnt).x

    @jax.jit
    def both(x):
        params = heads.init(jax.random.key(0), learnt)
        without = {n: a for n, a in params.items() if n != "log_soft_cap"}
        return multi_head_attention(params, x, learnt), multi_head_attention(without, x, fixed)

    assert_close(*both(x), loosen=10)


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
        inputs = models.LayerInputs(padding_mask=padding_mask, source=x[:, :3])
        both = {"attention": params, "cross": params}
        return models.transformer_layer(both, x, spec, inputs).losses

    mask = jnp.broadcast_to(real, x.shape[:2])
    assert_close(losses(x, mask), losses(x[:, :4], None))


def test_counts_by_hand():
    """Width 16, 4 heads, 8 tokens: parameters, and FLOPs of a causal text over all its keys."""
    plain = Standard(width=16, num_heads=4)
    projections, maps = 4 * 16 * 16, 8 * 4 * (4 + 4)
    assert heads.num_parameters(plain) == projections
    assert heads.flops_per_token(plain, 8) == 2 * (projections + maps)
    difference = Differential(width=16, num_heads=4)
    # Two queries and keys of half the width, 8 products with values; a and b of width 2; the norm.
    assert heads.num_parameters(difference) == projections + 4 * 2 + 4
    assert heads.flops_per_token(difference, 8) == 2 * (projections + 8 * (8 * 2 + 8 * 4))
    for extra, parameters, products in (
        (MixtureOfHeads(top=2, shared=1), 16 * (3 + 1 + 2), 16 * (3 + 1 + 2)),
        (LearntSoftCap(), 4, 0),
        (heads.Gate(), 16 * 4, 16 * 4),
        (heads.Gate("element"), 16 * 16, 16 * 16),
    ):
        layout = dataclasses.replace(plain, extras=(extra,))
        assert heads.num_parameters(layout) == projections + parameters
        assert heads.flops_per_token(layout, 8) == 2 * (projections + maps + products)


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
