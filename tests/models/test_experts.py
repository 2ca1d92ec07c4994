"""Mixtures of experts: routing and sums by hand, counts, sharing, the balance loss in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, two_devices
from jax.sharding import PartitionSpec as P
from random_models import random_like

from attnlab import heads, models
from attnlab.models import FFN, Experts, Norm, applied_parameters, flops_per_token, num_parameters
from attnlab.models import experts as moe
from attnlab.models.ffn import apply_ffn, feed_forward, ffn_shapes, init_ffn
from attnlab.pretrained.published import Published
from attnlab.tap import capture

GATED = dict(width=6, activation="gated_silu")
CASES = {
    "mixtral": FFN(**GATED, bias=False, experts=Experts(num_experts=5, top_k=2)),
    "qwen2_moe": FFN(
        **GATED, bias=False,
        experts=Experts(num_experts=5, top_k=3, normalize=False, shared_width=7, shared_gate=True),
    ),
    "gpt_oss": FFN(
        width=6, activation="gated_quick_gelu", clip=0.7,
        experts=Experts(num_experts=4, top_k=2, router_bias=True),
    ),
    "deepseek_v3": FFN(
        **GATED, bias=False,
        experts=Experts(
            num_experts=8, top_k=3, scores="sigmoid", scale=2.5, num_groups=4, top_groups=2,
            balance_bias=True, shared_width=9,
        ),
    ),
    "one of one": FFN(width=6, experts=Experts(num_experts=1, top_k=1)),
}  # fmt: skip


def random_params(ffn, width=8):
    shapes = jax.eval_shape(lambda: init_ffn(jax.random.key(0), width, ffn))
    return random_like(shapes, scale=0.6)


X = np.random.default_rng(2).normal(size=(2, 9, 8)).astype(np.float32)


def one_ffn(ffn, w, x):
    def dense(name, x):
        return x @ w[name] + w.get(f"{name}_bias", 0)

    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    if ffn.activation == "gelu":
        hidden = np.asarray(jax.nn.gelu(dense("up", x), approximate=False))
    elif ffn.clip is not None:
        gate, up = np.minimum(dense("gate", x), ffn.clip), dense("up", x)
        hidden = gate * sigmoid(1.702 * gate) * (np.clip(up, -ffn.clip, ffn.clip) + 1)
    else:
        hidden = dense("gate", x) * sigmoid(dense("gate", x)) * dense("up", x)
    return dense("down", hidden)


def by_hand(ffn, params, x):
    """Token after token, in NumPy."""
    w, spec, out = jax.tree.map(np.asarray, params), ffn.experts, []
    names = [n for n in w if n.split("_")[0] in ("up", "gate", "down")]
    for token in np.asarray(x).reshape(-1, x.shape[-1]):
        logits = token @ w["router"] + w.get("router_bias", 0)
        scores = 1 / (1 + np.exp(-logits))
        if spec.scores == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        choice = scores + w.get("balance_bias", 0)
        groups = choice.reshape(spec.num_groups, -1)
        best = np.argsort([-np.sort(group)[-2:].sum() for group in groups])[: spec.top_groups]
        size = groups.shape[1]
        allowed = [e for e in range(spec.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
        total = sum(scores[e] for e in chosen) if spec.normalize else 1
        y = 0
        for e in chosen:
            y += spec.scale * scores[e] / total * one_ffn(ffn, {n: w[n][e] for n in names}, token)
        if spec.shared_width:
            gate = 1 / (1 + np.exp(-token @ w["shared_gate"])) if spec.shared_gate else 1
            y += gate * one_ffn(ffn, w["shared"], token)
        out.append(y)
    return np.stack(out).reshape(x.shape)


@pytest.mark.parametrize("name", CASES)
def test_each_token_uses_its_experts(name, x64):
    ffn = CASES[name]
    params = random_params(ffn)
    assert jax.tree.map(jnp.shape, params) == ffn_shapes(8, ffn)
    x = np.float64(X)
    assert_close(jax.jit(lambda w, x: feed_forward(w, x, ffn))(params, x), by_hand(ffn, params, x))


def grouped(w, x, experts, block):
    groups = moe.group_rows(experts, len(w), block)
    rows = moe.grouped_dense({"up": w}, "up", moe.to_rows(x, groups), groups, block)
    return moe.from_rows(rows, groups)


def with_gradients(f, cotangent):
    def run(w, x):
        out, pull = jax.vjp(f, w, x)
        return out, pull(cotangent)

    return run


@pytest.mark.parametrize("block", [0, 8])
def test_grouped_products_and_gradients(block, x64):
    """Alone, under `vmap` and where devices share the weights, against every row with every expert;
    one expert has no row, one more than a block."""
    experts = jnp.array([[2, 0]] * 10 + [[0, 3]] * 4)
    rng = np.random.default_rng(0)
    w, x, cotangent = (rng.normal(size=n) for n in ((4, 3, 5), (2, 14, 3), (14, 2, 5)))
    run, rows = functools.partial(grouped, block=block), P("data")
    split = jax.shard_map(run, mesh=two_devices(), in_specs=(P(), rows, rows), out_specs=rows)
    every = with_gradients(lambda w, x: jnp.einsum("md,mkdf->mkf", x, w[experts]), cotangent)
    ours = with_gradients(lambda w, x: grouped(w, x, experts, block), cotangent)
    shared = with_gradients(lambda w, x: split(w, x, experts), cotangent)
    expected = jax.jit(jax.vmap(every, (None, 0)))(w, x)
    assert_close(jax.jit(jax.vmap(ours, (None, 0)))(w, x), expected, loosen=10)
    first = jax.tree.map(lambda a: a[0], expected)
    for run in (ours, shared):
        assert_close(jax.jit(run)(w, x[0]), first, loosen=10)


def test_balance_loss_by_hand():
    ffn = CASES["deepseek_v3"]
    params, real = random_params(ffn), np.arange(9) < np.array([[9], [4]])

    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params):
        names = ("expert_weights",)
        (_, losses), found = capture(apply_ffn, params, X, ffn, names=names, token_mask=real)
        return losses["expert_balance"], found["expert_weights"]

    (loss, weights), gradient = jax.jit(run)(params)
    used = np.asarray(weights)[real] > 0
    assert (used.sum(-1) == 3).all()
    scores = 1 / (1 + np.exp(-X @ np.asarray(params["router"])))[real]
    means = np.mean(scores / scores.sum(-1, keepdims=True), axis=0)
    shares = used.mean(0) / 3
    np.testing.assert_allclose(loss, 0.01 * 8 * np.sum(shares * means), rtol=1e-5)
    np.testing.assert_allclose(gradient["balance_bias"], 1e-3 * np.sign(shares - 1 / 8), rtol=1e-6)


def test_scores_that_are_all_zero_have_a_balance_loss():
    """Sigmoids of large negative logits are 0 in float32: such a token counts with no score."""
    spec = CASES["deepseek_v3"].experts
    params = {"balance_bias": jnp.zeros(8)}
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 8)), jnp.float32).at[1].set(-200)

    @jax.jit
    @jax.value_and_grad
    def loss(logits):
        return moe.balance_loss(params, moe.route(params, logits, spec), spec)

    value, gradient = loss(logits)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient[1]).max() == 0 < np.abs(gradient).max()
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    experts = np.asarray(moe.route(params, logits, spec).experts)
    shares = np.bincount(experts.ravel(), minlength=8) / experts.size
    means = (scores / scores.sum(1, keepdims=True))[[0, 2, 3, 4]].sum(0) / 5
    np.testing.assert_allclose(value, 0.01 * 8 * np.sum(shares * means), rtol=1e-5)


def test_router_logits_can_be_replaced():
    """Forced to one pair of experts, all tokens use it."""
    ffn = CASES["mixtral"]
    params = random_params(ffn)
    wanted = jnp.array([0.0, 9.0, 0.0, 9.0, 0.0])
    patch = {"router_logits": lambda value, layer: jnp.broadcast_to(wanted, value.shape)}
    run = lambda p: capture(feed_forward, p, X, ffn, names=("expert_weights",), patch=patch)[1]
    assert_close(jax.jit(run)(params)["expert_weights"], jnp.broadcast_to(wanted / 18, (2, 9, 5)))


# Models -------------------------------------------------------------------------------------------

EXPERTS = Experts(num_experts=4, top_k=2, shared_width=8, balance=1.0)
SMALL = models.ModelConfig(
    width=16, num_layers=2, max_len=8, norm=Norm(kind="rms"), heads=heads.Standard(num_heads=4),
    ffn=FFN(width=12, activation="gated_silu", experts=EXPERTS),
)  # fmt: skip


def test_flops_and_parameters_by_hand():
    """Router, 2 of 4 experts and the shared expert per token; all 4 are parameters."""
    without = dataclasses.replace(SMALL, ffn=FFN(width=0))
    router, matrix, biases = 16 * 4, 3 * 16 * 12, 2 * 12 + 16
    shared, shared_biases = 3 * 16 * 8, 2 * 8 + 16
    all_of_them = router + 4 * (matrix + biases) + shared + shared_biases + 16  # a norm
    assert num_parameters(SMALL) - num_parameters(without) == 2 * all_of_them
    unused = 2 * (matrix + biases)
    assert num_parameters(SMALL) - applied_parameters(SMALL) == 2 * unused
    flops = flops_per_token(SMALL, 8) - flops_per_token(without, 8)
    assert flops == 2 * 2 * (router + 2 * matrix + shared)


# Active parameters: 13B (arXiv 2401.04088), 3.3B (arXiv 2505.09388), 37B of 671B (arXiv
# 2412.19437), 3.61B and 5.13B without the embedding table (arXiv 2508.10925, table 1).
ACTIVE = {
    ("mixtral", "MixtralForCausalLM"): 12.88e9,
    ("deepseek_v3", "DeepseekV3ForCausalLM"): 37.5e9,
    ("gpt_oss", "GptOssForCausalLM"): 5.13e9 + 201088 * 2880,
}


@pytest.mark.parametrize("family", ACTIVE)
def test_published_active_parameters(family):
    name, architecture = family
    rope = {"rope_theta": 150000.0, "rope_scaling": {"rope_type": "default"}}
    config = Published(name, architecture, rope if name == "gpt_oss" else {}).config
    assert applied_parameters(config) == pytest.approx(ACTIVE[family], rel=5e-3)
