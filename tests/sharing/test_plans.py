"""Every plan, at every depth: one program, the outputs and gradients of the unrolled layers."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, deep, diagonal

from attnlab import HeadSpec, Plan, run_layers, transformer_block
from attnlab.heads.old.project import make_memory
from attnlab.model.block import BlockSpec, init_block
from attnlab.norms import layer_norm
from attnlab.sharing.low_rank_delta import add_delta
from attnlab.sharing.named_plans import PLANS, parse_plan
from attnlab.sharing.plan import all_shared, inner_groups, separate

NAMES = [*PLANS, "inner_groups", "pointers"]
FEW = ("albert", "cla", "relaxed", "inner_groups", "pointers", "dictionary")


def plan_of(name, depth):
    if name == "pointers":  # 0 1 0 3 ... : the first layer's keys are read all the way up
        reads = ("@0", None)
        groups = [reads[i // 2 % 2] if i % 2 else i // 2 for i in range(depth)]
        return Plan(attention=separate(depth), kv=groups, ffn=all_shared(depth))
    if name == "inner_groups":
        groups = inner_groups(depth // 2, 1, 2)
        return Plan(attention=groups, ffn=groups)
    if PLANS[name].takes_count:
        name += f":{depth // 2}" if name == "cla" else ":2"  # neighbours share keys, two by two
    return parse_plan(name, depth)


@functools.cache
def block_of(name):
    plan = plan_of(name, 2)
    return BlockSpec(
        HeadSpec("standard", width=6, num_heads=3, num_kv_heads=1, head_dim=4, biases="qv"),
        ffn_width=5,
        is_causal=True,
        kv_apart="kv" in plan,
        delta_rank=2 if "delta" in plan else None,
        mixed=(("attention", 2),) if "attention_mixture" in plan else (),
    )


def make(name, depth):
    """A pool of random numbers, and a text."""
    plan, rng = plan_of(name, depth), np.random.default_rng(depth)
    parts = init_block(block_of(name))
    shapes = {p: jax.eval_shape(parts[p], jax.random.key(0)) for p in plan}
    pool = {
        part: jax.tree.map(
            lambda a, part=part: rng.normal(size=(plan.num_groups[part], *a.shape)) * 0.5, tree
        )
        for part, tree in shapes.items()
    }
    return plan, pool, rng.normal(size=(2, 4, 6))


@functools.lru_cache(maxsize=1)
def pieces(spec):
    """One layer and its gradient, compiled once for all depths: the unrolled reference."""

    def layer(w, x, memory):
        """By hand: the delta is added first, keys come from `memory` where there is one."""
        if "delta" in w:
            w = add_delta({p: a for p, a in w.items() if p != "delta"}, w["delta"])
        heads = w["attention"] | w.get("kv", {})
        whole = {"attention": heads, "ffn": w["ffn"]}
        plain = spec._replace(kv_apart=False, delta_rank=None, mixed=())
        own = make_memory(heads, layer_norm(heads["norm"], x), spec=spec.heads)
        memory = own if memory is None else memory
        y = transformer_block(whole, x, spec=plain, memory=memory, reuse=True)[0]
        return y, memory

    forward = jax.jit(layer)

    @jax.jit
    def backward(w, x, memory, outs):
        return jax.vjp(layer, w, x, memory)[1](outs)

    return forward, backward


def read(pool, plan, i):
    """What layer i computes with: its slots or, of slots that are mixed, their sum."""
    w = {p: jax.tree.map(lambda a, p=p: a[plan.indices(p)[i]], pool[p]) for p in plan}
    if (c := w.pop("attention_mixture", None)) is not None:
        sums = lambda c, atoms: sum(c[s] * atoms[s] for s in range(len(c)))
        w["attention"] = jax.tree.map(sums, c, pool["attention"])
    return w


def add_gradients(grads, pool, plan, i, dw):
    """Those of what layer i read, to where it came from."""
    if "attention_mixture" in plan:
        dw, d_sums = dict(dw), dw["attention"]
        d_rows = lambda d, atoms: np.array([np.sum(np.asarray(d) * a) for a in atoms])
        dw["attention_mixture"] = jax.tree.map(d_rows, d_sums, pool["attention"])
        row = plan.indices("attention_mixture")[i]
        c = jax.tree.map(lambda a: a[row], pool["attention_mixture"])
        d_atoms = jax.tree.map(lambda c, d: np.multiply.outer(c, np.asarray(d)), c, d_sums)
        grads["attention"] = jax.tree.map(np.add, grads["attention"], d_atoms)
        del dw["attention"]
    for part in dw:
        slot = plan.indices(part)[i]
        for total, more in zip(
            jax.tree.leaves(grads[part]), jax.tree.leaves(dw[part]), strict=True
        ):
            total[slot] += more


def unrolled(spec, plan, pool, x, seed):
    """Output, and the gradients of sum(output * seed), by a Python loop over the layers."""
    forward, backward = pieces(spec)
    taken, made = [], []
    for i, source in enumerate(plan.kv_sources):
        memory = made[source] if plan.reuses_kv[i] else None
        taken.append((read(pool, plan, i), x, memory))
        x, memory = forward(*taken[-1])
        made.append(memory)
    dx, dmade = seed, [jax.tree.map(np.zeros_like, memory) for memory in made]
    grads = jax.tree.map(np.zeros_like, pool)
    for i, source in reversed(list(enumerate(plan.kv_sources))):
        w, before, memory = taken[i]
        dw, dx, into = backward(w, before, memory, (dx, dmade[i]))
        if plan.reuses_kv[i]:
            dmade[source] = jax.tree.map(np.add, dmade[source], into)
        add_gradients(grads, pool, plan, i, dw)
    return x, grads


def scanned(spec, plan, remat=True):
    def loss(pool, x, seed):
        y = run_layers(pool, plan, x, spec=spec, remat=remat).x
        return jnp.sum(y * seed), y

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize(("name", "remat"), diagonal(FEW, [True, False]))
def test_one_program_at_every_depth(name, remat):
    def lines(depth):
        plan, pool, x = make(name, depth)
        return len(scanned(block_of(name), plan, remat).lower(pool, x, x).as_text().splitlines())

    assert lines(2) == lines(12) == lines(96)


@pytest.mark.parametrize("depth", deep([2, 12, 48, 96], 12))
@pytest.mark.parametrize("name", deep(NAMES, *FEW))
def test_equals_the_unrolled_layers(name, depth, x64):
    """To 1e-10 of the largest number, after up to 96 layers."""
    plan, pool, x = make(name, depth)
    spec, seed = block_of(name), np.random.default_rng(1).normal(size=x.shape)
    grads, y = scanned(spec, plan)(pool, x, seed)
    expected, expected_grads = unrolled(spec, plan, pool, x, seed)
    assert_close(y, np.asarray(expected), loosen=100)
    assert_close(grads, expected_grads, loosen=100)
    for a in jax.tree.leaves(expected_grads):
        assert np.abs(a).max() > 1e-9  # nothing here is zero by accident


@pytest.mark.parametrize("name", ["cla", "relaxed"])
def test_without_remat_the_gradients_are_the_same(name, x64):
    plan, pool, x = make(name, 6)
    spec = block_of(name)
    assert_close(
        scanned(spec, plan, remat=False)(pool, x, x), scanned(spec, plan, remat=True)(pool, x, x)
    )


def saved_for_backward(spec, plan, pool, x):
    """How often which shape is kept for the backward pass, beside the pool itself."""
    run = lambda pool, x: run_layers(pool, plan, x, spec=spec, remat=False).x
    saved = [a for a in jax.tree.leaves(jax.vjp(run, pool, x)[1]) if a.dtype == jnp.float32]
    shapes = lambda leaves: collections.Counter(np.shape(a) for a in leaves)
    return shapes(saved) - shapes(jax.tree.leaves(pool))


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", ["albert", "relaxed", "dictionary"])
def test_no_layer_keeps_a_copy_of_its_weights(name, precision):
    """Without remat the products of tokens are saved, once, and none that makes weights."""
    with jax.default_matmul_precision(precision):
        saved = saved_for_backward(block_of(name), *make(name, 6))
    assert saved == {
        (6, 2, 4, 6): 2,  # what attention and the FFN of the 6 layers read
        (6, 2, 4, 3, 4): 2,  # q and heads
        (6, 2, 4, 1, 4): 2,  # k and v
        (6, 2, 3, 4, 4): 1,  # exp(scores)
        (6, 8, 5): 1,  # x W_up
    }


def test_no_layer_keeps_weights_that_it_multiplied_out():
    spec = block_of("albert")._replace(order="absorbed")
    saved = saved_for_backward(spec, *make("albert", 6))
    assert all(shape[:2] in ((6, 2), (6, 8)) for shape in saved)
