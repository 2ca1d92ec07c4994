"""Runs L layers under any sharing plan in one compiled scan, also layers of several types."""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from attnlab.ops import SAVED
from attnlab.sharing.plan import Plan

PyTree: TypeAlias = Any
"""Arrays in any nesting of containers that JAX knows. The caller chooses, so no type is closer."""

Params: TypeAlias = dict[str, PyTree]
"""sublayer, or weight -> its parameters"""

Init = Callable[[Array], PyTree]
"""key -> the parameters of one group"""

Block = Callable[[Params, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
"""(params, x, state, per_layer) -> (x, state, captured); see `run_stack`"""


def init_stacked(init: Mapping[str, Init], key: Array, plan: Plan) -> Params:
    """Initial parameters for a plan: sublayer -> [G, ...], every group with its own random key.

    Args:
      init: sublayer -> (key -> the parameters of one group).
      key: random key.
      plan: the sharing plan.

    >>> init = {"scale": lambda key: jax.random.normal(key, (3,))}
    >>> init_stacked(init, jax.random.key(0), Plan(scale=(0, 1, 0)))["scale"].shape
    (2, 3)
    """
    keys = dict(zip(plan, jax.random.split(key, len(plan)), strict=True))
    return {name: init_sublayer(init[name], keys[name], plan, name) for name in plan}


def init_sublayer(init: Init, key: Array, plan: Plan, sublayer: str) -> PyTree:
    """Initial parameters [G, ...] of one sublayer of a plan."""
    return jax.vmap(init)(jax.random.split(key, plan.num_groups[sublayer]))


def select_params(stacked: Params, indices: Mapping[str, int | Array]) -> Params:
    """The parameters of one layer.

    Args:
      stacked: sublayer -> parameters [G, ...].
      indices: sublayer -> index of its group, an int or a traced integer.

    >>> stacked = {"scale": jnp.array([2.0, 3.0])}
    >>> float(select_params(stacked, {"scale": 1})["scale"])
    3.0
    """

    def entry(index: int | Array, a: Array | np.ndarray) -> Array | np.ndarray:
        if isinstance(index, int):
            return a[index]  # of NumPy stays NumPy's
        # In two operations: general indexing makes a model's program half as long again.
        return lax.squeeze(lax.dynamic_slice_in_dim(a, jnp.asarray(index, np.uint32), 1), [0])

    return {
        name: jax.tree.map(functools.partial(entry, index), stacked[name])
        for name, index in indices.items()
    }


class Stack(NamedTuple):
    """Layers of one type, in the order of their application; the arguments of `run_stack`.

    >>> add = lambda params, x, state, per_layer: (x + params["a"], state, None)
    >>> stack = Stack(add, {"a": jnp.array([1.0, 5.0])}, Plan(a=(0, 1, 0)))
    >>> (x, _), _ = run_stacks({"add": stack}, ["add"] * 3, jnp.zeros(()), {"add": None})
    >>> float(x)
    7.0
    """

    block: Block
    stacked: Params
    plan: Plan
    per_layer: PyTree = None


def run_stack(
    block: Block,
    stacked: Params,
    plan: Plan,
    x: PyTree,
    *,
    per_layer: PyTree = None,
    state: PyTree = None,
    remat: bool = True,
    unroll: int = 1,
) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """Applies `block` once per layer, with the parameters that the plan gives to that layer.

    Size and time of compilation do not depend on the number of layers.

    Args:
      block: (params, x, state, per_layer) -> (x, state, captured), for one layer.
        `params[sublayer]` are the parameters of its group, without the axis G. `captured` is any
        tree of arrays, such as intermediate values or auxiliary losses, or None.
      stacked: sublayer -> parameters [G, ...]; G may exceed what the plan uses.
      plan: sublayer -> group of each layer.
      x: input of the first layer, any tree of arrays.
      per_layer: a tree of arrays [L, ...]; layer i gets row i, traced (random keys, gates). With
        `np.arange(L)` a block knows the index of its layer.
      state: carried from layer to layer next to x (a cache).
      remat: recompute all activations in the backward pass; if False, all but those that the block
        marks with `ops.save_for_backward`. In both cases parameters are sliced again in the
        backward pass: saving them would cost one copy of the parameters per layer.
      unroll: layers in one iteration of the scan: fewer iterations, a larger program.

    Returns:
      ((x, state) after the last layer, captured [L, ...]).

    Raises:
      ValueError: a sublayer of the plan has no parameters, or fewer groups than the plan uses;
        `per_layer` has another number of rows than the plan has layers.

    Sources: the plans of ALBERT (Lan et al. 2019, arXiv 1909.11942), Takase and Kiyono 2021
    (arXiv 2104.06022), Subformer (Reid et al. 2021, arXiv 2101.00234), relaxed recursive
    transformers (Bae et al. 2024, arXiv 2410.20672) and cross-layer attention (Brandon et al. 2024,
    arXiv 2405.12981) all run here.

    Example, with the layer index and an auxiliary loss:

    >>> def block(params, x, state, layer):
    ...     x = x * params["scale"] + layer
    ...     return x, state, {"loss": x**2}
    >>> plan, stacked = Plan(scale=(0, 1, 0)), {"scale": jnp.array([2.0, 3.0])}
    >>> (x, _), captured = run_stack(block, stacked, plan, jnp.ones(()), per_layer=np.arange(3))
    >>> float(x), captured["loss"].tolist()
    (16.0, [4.0, 49.0, 256.0])
    """
    stacks = {"": Stack(block, stacked, plan, per_layer)}
    (x, states), captured = run_stacks(
        stacks, [""] * plan.num_layers, x, {"": state}, remat=remat, unroll=unroll
    )
    return (x, states[""]), captured[""]


def run_stacks(
    stacks: Mapping[str, Stack],
    order: Sequence[str],
    x: PyTree,
    state: Mapping[str, PyTree],
    *,
    remat: bool = True,
    unroll: int = 1,
) -> tuple[tuple[PyTree, dict[str, PyTree]], dict[str, PyTree]]:
    """Applies layers of several types: `run_stack` for several stacks that alternate.

    Consecutive layers of one stack are one scan, and a repeating pattern of them is one scan over
    these (see `repeating_pattern`). The size of the compiled program depends on the pattern, not
    on the number of layers.

    Args:
      stacks: name -> the layers of one type.
      order: the name of the stack of each layer; a stack has as many layers here as in its plan.
      x: input of the first layer.
      state: name of a stack -> what its layers carry from one to the next.
      remat, unroll: as in `run_stack`; repetitions of a pattern are unrolled as layers are.

    Returns:
      ((x, state), captured) as in `run_stack`, state and captured by the name of the stack.

    Raises:
      ValueError: as `run_stack`; `order` does not name each stack once per layer of its plan.

    >>> add = lambda params, x, state, per_layer: (x + params["a"], state, x)
    >>> double = lambda params, x, state, per_layer: (x * params["a"], state, x)
    >>> stacks = {
    ...     "add": Stack(add, {"a": jnp.ones(1)}, Plan(a=(0, 0, 0, 0))),
    ...     "double": Stack(double, {"a": jnp.full(1, 2.0)}, Plan(a=(0, 0))),
    ... }
    >>> order = ["add", "add", "double"] * 2
    >>> (x, _), captured = run_stacks(stacks, order, jnp.ones(()), dict.fromkeys(stacks))
    >>> float(x), captured["add"].tolist(), captured["double"].tolist()
    (16.0, [1.0, 2.0, 6.0, 7.0], [3.0, 8.0])
    """
    _check(stacks, order)
    bodies = {name: _body(stack, remat, prevent_cse=unroll > 1) for name, stack in stacks.items()}
    scan, steps = functools.partial(lax.scan, unroll=unroll), {}
    for name, (_, _, plan, per_layer) in stacks.items():
        steps[name] = {n: np.asarray(plan.indices(n), np.uint32) for n in plan}, per_layer
    found: dict[str, list[tuple[np.ndarray, PyTree]]] = {name: [] for name in stacks}
    carry = x, dict(state)
    for runs, layers in _segments(tuple(order)):
        inputs = [
            jax.tree.map(functools.partial(_take, numbers), steps[name])
            for (name, _), numbers in zip(runs, layers, strict=True)
        ]

        def pattern(carry: PyTree, inputs: list[PyTree], runs: Runs = runs) -> PyTree:
            (x, states), captured = carry, []
            is_single_layer = len(runs) == 1 and runs[0][1] == 1
            for (name, _), step in zip(runs, inputs, strict=True):
                run = bodies[name] if is_single_layer else functools.partial(scan, bodies[name])
                (x, state), values = run((x, states[name]), step)
                states = states | {name: state}
                captured.append(values)
            return (x, states), captured

        carry, values = scan(pattern, carry, inputs)
        for (name, _), numbers, value in zip(runs, layers, values, strict=True):
            found[name].append((numbers, value))
    return carry, {name: _by_layer(parts) for name, parts in found.items()}


def _body(stack: Stack, remat: bool, prevent_cse: bool) -> Callable[[PyTree, PyTree], PyTree]:
    """One layer as a scan takes it."""

    def layer(carry: PyTree, step: PyTree) -> PyTree:
        (x, state), (indices, per_layer) = carry, step
        params = select_params(stack.stacked, indices)
        x, state, captured = stack.block(params, x, state, per_layer)
        return (x, state), captured

    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    body: Callable[[PyTree, PyTree], PyTree] = jax.checkpoint(
        layer, prevent_cse=prevent_cse, policy=policy
    )
    return body


def _take(layers: np.ndarray, a: Array | np.ndarray) -> Array | np.ndarray:
    """a[layers] of a [L, ...]; `a` itself if these are all layers in order, without a copy."""
    return a if np.array_equal(layers, np.arange(len(a))) else a[layers]


def _by_layer(parts: list[tuple[np.ndarray, PyTree]]) -> PyTree:
    """What the layers of one stack captured, [L, ...] in the order of its layers, of (numbers of
    layers, arrays with the axes of these numbers in front)."""
    flat = [
        jax.tree.map(lambda a, n=n: a.reshape(n.size, *a.shape[n.ndim :]), values)
        for n, values in parts
    ]
    joined = flat[0] if len(flat) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *flat)
    order = np.argsort(np.concatenate([n.reshape(-1) for n, _ in parts]))
    return jax.tree.map(functools.partial(_take, order), joined)


def _check(stacks: Mapping[str, Stack], order: Sequence[str]) -> None:
    """Raises ValueError for what does not fit the plans: JAX clamps an index past the end."""
    layers = {name: stack.plan.num_layers for name, stack in stacks.items()}
    if (named := dict(collections.Counter(order))) != layers:
        raise ValueError(f"order has the stacks {named}, their plans have the layers {layers}")
    for label, (_, stacked, plan, per_layer) in stacks.items():
        stack = f"stack {label!r}: " if label else ""
        for a in jax.tree.leaves(per_layer):
            if np.shape(a)[:1] != (plan.num_layers,):
                raise ValueError(f"{stack}per_layer {np.shape(a)} must have {plan.num_layers} rows")
        for name, count in plan.num_groups.items():
            leaves = jax.tree.leaves(stacked.get(name, np.zeros(0)))
            if any(a.shape[0] < count for a in leaves):
                raise ValueError(f"{stack}{name!r} has fewer than the {count} groups of the plan")


# Patterns of layers -------------------------------------------------------------------------------

Runs = tuple[tuple[Any, int], ...]
"""((name of a stack, number of consecutive layers), ...)"""


def repeating_pattern(order: Sequence[Hashable]) -> list[tuple[Runs, int]]:
    """The shortest pattern that repeats through all layers, as (runs, number of repetitions).

    A second entry holds the incomplete pattern at the end, if there is one.

    >>> repeating_pattern("aabaabaab")
    [((('a', 2), ('b', 1)), 3)]
    >>> repeating_pattern("aabaaba")
    [((('a', 2), ('b', 1)), 2), ((('a', 1),), 1)]
    >>> repeating_pattern("aaa")
    [((('a', 1),), 3)]
    """
    labels, length = list(order), len(order)
    period = next(p for p in range(1, length + 1) if labels[p:] == labels[: length - p])
    repeats, rest = divmod(length, period)
    parts = [(labels[:period], repeats), (labels[length - rest :], 1)]
    return [
        (tuple((label, len(list(same))) for label, same in itertools.groupby(part)), count)
        for part, count in parts
        if part
    ]


@functools.lru_cache(maxsize=256)
def _segments(order: tuple[str, ...]) -> list[tuple[Runs, list[np.ndarray]]]:
    """`repeating_pattern`, with the numbers [repeats, count] of the layers of each run in their
    stack; [repeats] where the pattern is a single layer."""
    seen, numbers = collections.Counter[str](), np.zeros(len(order), int)
    for i, name in enumerate(order):
        numbers[i] = seen[name]
        seen[name] += 1
    made, start = [], 0
    for runs, repeats in repeating_pattern(order):
        period = sum(count for _, count in runs)
        rows = numbers[start : start + repeats * period].reshape(repeats, period)
        start += repeats * period
        ends = np.cumsum([count for _, count in runs])[:-1]
        made.append((runs, [rows[:, 0]] if period == 1 else np.split(rows, ends, axis=1)))
    return made
