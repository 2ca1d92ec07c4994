"""Every plan, at every depth: one program, the outputs and gradients of the unrolled layers."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, diagonal

from attnlab import Plan, run_layers, transformer_layer
from attnlab.heads import Standard, project_kv
from attnlab.models import FFN, Attention, Compute, LayerInputs, LayersOfType, LayerSpec
from attnlab.models.layer import init_layer
from attnlab.norms import layer_norm
from attnlab.sharing.deltas import add_delta
from attnlab.sharing.plan import PLANS, all_shared, inner_groups, parse_plan, separate

NAMES = [*PLANS, "inner_groups", "pointers"]
FEW = ("albert", "cla", "relaxed", "inner_groups", "pointers")


def plan_of(name, depth):
    if name == "pointers":  # 0 1 0 3 ... : the first layer's keys are read all the way up
        groups = [f"@{0 if i // 2 % 2 == 0 else i - 1}" if i % 2 else i // 2 for i in range(depth)]
        return Plan(attention=separate(depth), kv=groups, ffn=all_shared(depth))
    if name == "inner_groups":
        groups = inner_groups(depth // 2, 1, 2)
        return Plan(attention=groups, ffn=groups)
    if PLANS[name].takes_count:
        name += f":{depth // 2}" if name == "cla" else ":2"  # neighbours share keys, two by two
    return parse_plan(name, depth)


@functools.cache
def layer_of(name, order=None):
    plan = plan_of(name, 2)
    return LayerSpec(
        heads=Standard(width=6, num_heads=3, num_kv_heads=1, head_dim=4, biases=("q", "v")),
        ffn=FFN(width=5),
        attention=Attention(order=order),
        is_causal=True,
        separate_kv="kv" in plan,
        delta_rank=2 if "delta" in plan else None,
    )


def make(name, depth):
    """Random parameters of all groups, and a text."""
    plan, rng = plan_of(name, depth), np.random.default_rng(depth)
    inits = init_layer(layer_of(name))
    shapes = {p: jax.eval_shape(inits[p], jax.random.key(0)) for p in plan}
    params = {
        sublayer: jax.tree.map(
            lambda a, p=sublayer: rng.normal(size=(plan.num_groups[p], *a.shape)) * 0.5, tree
        )
        for sublayer, tree in shapes.items()
    }
    return plan, params, rng.normal(size=(2, 4, 6))


@functools.lru_cache(maxsize=1)
def layer_and_gradient(spec):
    """One layer and its gradient, compiled once for all depths: the unrolled reference."""

    def layer(w, x, shared_kv):
        """By hand: the delta is added first, keys come from `shared_kv` where it is given."""
        if "delta" in w:
            w = add_delta({p: a for p, a in w.items() if p != "delta"}, w["delta"])
        heads = w["attention"] | w.get("kv", {})
        whole = {"attention": heads, "ffn": w["ffn"]}
        plain = dataclasses.replace(spec, separate_kv=False, delta_rank=None)
        own = project_kv(heads, layer_norm(heads["norm"], x), spec.heads)
        shared_kv = own if shared_kv is None else shared_kv
        inputs = LayerInputs(shared_kv=(shared_kv, True))
        return transformer_layer(whole, x, plain, inputs).x, shared_kv

    forward = jax.jit(layer)

    @jax.jit
    def backward(w, x, shared_kv, outs):
        return jax.vjp(layer, w, x, shared_kv)[1](outs)

    return forward, backward


def params_of_layer(params, plan, i):
    """What layer i computes with."""
    return {p: jax.tree.map(lambda a, p=p: a[plan.indices(p)[i]], params[p]) for p in plan}


def add_gradients(grads, params, plan, i, dw):
    """Those of what layer i read, to where it came from."""
    for sublayer in dw:
        group = plan.indices(sublayer)[i]
        for total, more in zip(
            jax.tree.leaves(grads[sublayer]), jax.tree.leaves(dw[sublayer]), strict=True
        ):
            total[group] += more


def unrolled(spec, plan, params, x, seed):
    """Output, and the gradients of sum(output * seed), by a Python loop over the layers."""
    forward, backward = layer_and_gradient(spec)
    taken, made = [], []
    for i, source in enumerate(plan.kv_sources):
        shared_kv = made[source] if plan.reuses_kv[i] else None
        taken.append((params_of_layer(params, plan, i), x, shared_kv))
        x, entries = forward(*taken[-1])
        made.append(entries)
    dx, dmade = seed, [jax.tree.map(np.zeros_like, entries) for entries in made]
    grads = jax.tree.map(np.zeros_like, params)
    for i, source in reversed(list(enumerate(plan.kv_sources))):
        w, before, shared_kv = taken[i]
        dw, dx, into = backward(w, before, shared_kv, (dx, dmade[i]))
        if plan.reuses_kv[i]:
            dmade[source] = jax.tree.map(np.add, dmade[source], into)
        add_gradients(grads, params, plan, i, dw)
    return x, grads


def run(params, plan, x, spec, **compute):
    layers = {"layers": LayersOfType(params=params, plan=plan, spec=spec)}
    return run_layers(layers, ["layers"] * plan.num_layers, x, compute=Compute(**compute)).x


def scanned(spec, plan, **compute):
    def loss(params, x, seed):
        y = run(params, plan, x, spec, **compute)
        return jnp.sum(y * seed), y

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize(("name", "remat"), diagonal(FEW, [True, False]))
def test_one_program_at_every_depth(name, remat):
    def lines(depth):
        plan, params, x = make(name, depth)
        step = scanned(layer_of(name), plan, remat=remat)
        return len(step.lower(params, x, x).as_text().splitlines())

    assert lines(2) == lines(12) == lines(96)


@pytest.mark.parametrize("depth", deep([2, 12, 48, 96], 12))
@pytest.mark.parametrize("name", deep(NAMES, *FEW))
def test_equals_the_unrolled_layers(name, depth, x64):
    """To 1e-10 of the largest number, after up to 96 layers."""
    plan, params, x = make(name, depth)
    spec, seed = layer_of(name), np.random.default_rng(1).normal(size=x.shape)
    grads, y = scanned(spec, plan)(params, x, seed)
    expected, expected_grads = unrolled(spec, plan, params, x, seed)
    assert_close(y, np.asarray(expected), loosen=100)
    assert_close(grads, expected_grads, loosen=100)
    for a in jax.tree.leaves(expected_grads):
        assert np.abs(a).max() > 1e-9  # nothing here is zero by accident


@pytest.mark.parametrize(
    "compute", deep([{"remat": False}, {"unroll": 4}, {"unroll": 6}], {"unroll": 4})
)
@pytest.mark.parametrize("name", ["cla", "relaxed"])
def test_remat_and_unroll_change_no_gradient(name, compute, x64):
    plan, params, x = make(name, 6)
    spec = layer_of(name)
    assert_close(scanned(spec, plan, **compute)(params, x, x), scanned(spec, plan)(params, x, x))


def saved_for_backward(spec, plan, params, x):
    """How often which shape is kept for the backward pass, beside the params itself."""
    forward = lambda params, x: run(params, plan, x, spec, remat=False)
    saved = [a for a in jax.tree.leaves(jax.vjp(forward, params, x)[1]) if a.dtype == jnp.float32]
    shapes = lambda leaves: collections.Counter(np.shape(a) for a in leaves)
    return shapes(saved) - shapes(jax.tree.leaves(params))


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", ["albert", "relaxed"])
def test_no_layer_keeps_a_copy_of_its_weights(name, precision):
    """Without remat the products of tokens are saved, once, and none that makes weights."""
    with jax.default_matmul_precision(precision):
        saved = saved_for_backward(layer_of(name), *make(name, 6))
    assert saved == {
        (6, 2, 4, 6): 2,  # what attention and the FFN of the 6 layers read
        (6, 2, 4, 3, 4): 2,  # q and heads
        (6, 2, 4, 1, 4): 2,  # k and v
        (6, 2, 3, 4, 4): 1,  # exp(scores)
        (6, 8, 5): 1,  # x W_up
    }


def test_no_layer_keeps_weights_that_it_multiplied_out():
    spec = layer_of("albert", order="absorbed")
    saved = saved_for_backward(spec, *make("albert", 6))
    assert all(shape[:2] in ((6, 2), (6, 8)) for shape in saved)
