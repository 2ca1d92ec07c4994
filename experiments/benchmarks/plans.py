"""Suite plans: what a stack costs to compile and in memory under every sharing plan.

The forward and backward pass of 24 layers of width 512, beside the same layers in a Python loop and
in Flax's `nn.scan`. What is timed is the compilation; it must not grow with depth. Memory is what
XLA sets aside beside weights, inputs and gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnlab.heads import Standard, init_cache
from attnlab.models import (
    FFN,
    LayerInputs,
    LayersOfType,
    ModelConfig,
    StackInputs,
    init_layer,
    run_layers,
    transformer_layer,
)
from attnlab.sharing import Params, init_stacked, plan_names, select_params
from experiments.benchmarks.measure import Bar, Case, Entry, refuse
from experiments.benchmarks.peers.decoders import LinenBlock, linen_layers

STACK = ModelConfig(
    max_len=256,
    width=512,
    num_layers=24,
    heads=Standard(num_heads=8, biases=("q", "k", "v", "o")),
    ffn=FFN(width=2048, activation="gelu_tanh"),
)
BATCH = 4
OTHER_DEPTHS = (2, 96)
GROUPS = 4
"""Parameter groups of the plans that take a number."""
Loss: TypeAlias = Callable[[Params, Array], Array]
NN_SCAN = "Linen, nn.scan"
LINEN_PLANS: dict[str, dict[str, Any]] = {
    "separate": {"variable_axes": {"params": 0}, "split_rngs": {"params": True}},
    "albert": {"variable_broadcast": "params", "split_rngs": {"params": False}},
}


def cases(config: ModelConfig = STACK, batch: int = BATCH) -> Iterator[Case]:
    """One case per plan."""
    for name in plan_names(GROUPS):
        bars = (Bar(NN_SCAN, time=1.10, memory=1.05),) if name in LINEN_PLANS else ()
        yield Case(
            f"compile {config.num_layers} layers, plan {name}",
            batch * config.max_len,
            functools.partial(_entries, config, batch, name),
            bars=bars,
            warm=False,  # each call compiles anew
            most_rounds=3,
        )


def _entries(config: ModelConfig, batch: int, plan: str) -> list[Entry]:
    def sized(depth: int) -> ModelConfig:
        base, colon, _ = plan.partition(":")
        sized_plan = f"{base}:{min(GROUPS, depth)}" if colon else plan
        return dataclasses.replace(config, num_layers=depth, sharing=sized_plan)

    def init_layers(config: ModelConfig) -> Params:
        return init_stacked(init_layer(config.layer), jax.random.key(0), config.plan)

    whole = sized(config.num_layers)
    shape = (batch, config.max_len, config.width)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    w = jax.jit(functools.partial(init_layers, whole))()
    work: dict[str, tuple[Loss, Params]] = {
        "attnlab": (_ours(whole, remat=False), w),
        "attnlab, remat": (_ours(whole, remat=True), w),
        "Python loop": (_loop(whole), w),
    }
    if plan in LINEN_PLANS:
        weights = linen_layers(w)
        if plan == "albert":
            weights = jax.tree.map(lambda a: a[0], weights)
        for name, block in {NN_SCAN: LinenBlock, f"{NN_SCAN}, remat": nn.remat(LinenBlock)}.items():
            work[name] = _linen(whole, block, plan), weights
    compiled = {name: _compile(loss, weights, x) for name, (loss, weights) in work.items()}
    losses = {name: float(run(work[name][1], x)[0]) for name, run in compiled.items()}
    for name, value in losses.items():
        np.testing.assert_allclose(value, losses["attnlab"], rtol=1e-4, err_msg=name)
    print(f"losses agree: {losses['attnlab']:.6g}", flush=True)
    for depth in OTHER_DEPTHS:
        other = sized(depth)
        like = jax.eval_shape(functools.partial(init_layers, other))
        work[f"attnlab, {depth} layers"] = _ours(other, remat=False), like
    entries = []
    for name, (loss, weights) in work.items():
        memory = (compiled.get(name) or _compile(loss, weights, x)).memory_analysis()
        entries.append(
            Entry(
                name,
                functools.partial(_compile, loss, weights, x),
                ours=name.startswith("attnlab"),
                temp_bytes=memory.temp_size_in_bytes if memory else None,
            )
        )
    if plan not in LINEN_PLANS:
        entries.append(refuse(NN_SCAN, "it has one set of weights per layer, or one for all"))
    return entries


def _compile(loss: Loss, w: Params, x: Array) -> jax.stages.Compiled:
    """The loss and its gradient, traced and compiled anew (jax.jit remembers functions)."""
    fresh = lambda w, x: jax.value_and_grad(loss)(w, x)
    return jax.jit(fresh).lower(w, x).compile()


def _loss(y: Array) -> Array:
    return jnp.mean(jnp.square(y))


def _ours(config: ModelConfig, remat: bool) -> Loss:
    def loss(w: Params, x: Array) -> Array:
        layers = LayersOfType(params=w, plan=config.plan, spec=config.layer)
        inputs = StackInputs(remat=remat)
        return _loss(run_layers({"layers": layers}, config.layer_names, x, inputs).x)

    return loss


def _loop(config: ModelConfig) -> Loss:
    """The same layers, one after another in Python."""

    def loss(w: Params, x: Array) -> Array:
        plan, shared_kv = config.plan, None
        if any(plan.reuses_kv):
            empty = init_cache(config.layout, x.shape[0], x.shape[1], x.dtype)
            shared_kv = {n: a for n, a in empty.items() if n != "length"}
        for i in range(plan.num_layers):
            params = select_params(w, {name: plan.indices(name)[i] for name in plan})
            inputs = LayerInputs(layer=i, shared_kv=shared_kv, use_shared_kv=plan.reuses_kv[i])
            outputs = transformer_layer(params, x, config.layer, inputs)
            x, shared_kv = outputs.x, outputs.entries if any(plan.reuses_kv) else None
        return _loss(x)

    return loss


def _linen(config: ModelConfig, block: type[nn.Module], plan: str) -> Loss:
    scan = nn.scan(block, length=config.num_layers, in_axes=nn.broadcast, **LINEN_PLANS[plan])
    layers = scan(config)

    def loss(w: Params, x: Array) -> Array:
        mask = nn.make_causal_mask(x[..., 0])
        return _loss(layers.apply({"params": w}, x, mask)[0])

    return loss
