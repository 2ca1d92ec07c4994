"""Runs L layers under any sharing plan in one compiled scan, also layers of several types."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from attnlab.remat import SAVED
from attnlab.sharing.plan import Plan

PyTree: TypeAlias = Any
"""Arrays in any nesting of containers that JAX knows. The caller chooses, so no type is closer."""

Params: TypeAlias = dict[str, PyTree]
"""sublayer, or weight -> its parameters"""

X = TypeVar("X")
State = TypeVar("State")
Captured = TypeVar("Captured")
Label = TypeVar("Label", bound=Hashable)

Init = Callable[[Array], PyTree]
"""key -> the parameters of one group"""

Block = Callable[[Params, X, State, PyTree, PyTree], tuple[X, State, Captured]]
"""(params, x, state, per_layer, shared) -> (x, state, captured); see `run_stack`"""


def init_stacked(init: Mapping[str, Init], key: Array, plan: Plan) -> Params:
    """Initial stacked parameters for a plan.

    Args:
      init: sublayer -> (key -> the parameters of one group).
      key: random key.
      plan: the sharing plan.

    Returns:
      sublayer -> parameters [G, ...], every group with its own random key.

    >>> init = {"scale": lambda key: jax.random.normal(key, (3,))}
    >>> init_stacked(init, jax.random.key(0), Plan(scale=(0, 1, 0)))["scale"].shape
    (2, 3)
    """
    keys = dict(zip(plan, jax.random.split(key, len(plan)), strict=True))
    return {name: init_sublayer(init[name], keys[name], plan, name) for name in plan}


def init_sublayer(init: Init, key: Array, plan: Plan, sublayer: str) -> PyTree:
    """Initial stacked parameters of one sublayer.

    Args:
      init: key -> the parameters of one group.
      key: random key.
      plan: the sharing plan.
      sublayer: a sublayer of the plan.

    Returns:
      Parameters [G, ...].

    >>> init_sublayer(lambda key: jnp.ones(3), jax.random.key(0), Plan(a=(0, 1, 0)), "a").shape
    (2, 3)
    """
    return jax.vmap(init)(jax.random.split(key, plan.num_groups[sublayer]))


def select_params(stacked: Params, indices: Mapping[str, int | Array]) -> Params:
    """The parameters of one layer.

    Args:
      stacked: sublayer -> parameters [G, ...].
      indices: sublayer -> index of its group, an int or a traced integer.

    Returns:
      sublayer -> parameters [...].

    >>> stacked = {"scale": jnp.array([2.0, 3.0])}
    >>> float(select_params(stacked, {"scale": 1})["scale"])
    3.0
    """
    return {
        name: jax.tree.map(lambda a, i=index: _entry(a, i), stacked[name])
        for name, index in indices.items()
    }


def _entry(a: Array | np.ndarray, index: int | Array) -> Array | np.ndarray:
    """a[index]. Of a traced index in two operations: general indexing makes a model's program half
    as long again."""
    if isinstance(index, int):
        return a[index]  # of NumPy stays NumPy's
    return lax.squeeze(lax.dynamic_slice_in_dim(a, jnp.asarray(index, np.uint32), 1), [0])


@dataclasses.dataclass(frozen=True)
class Stack(Generic[X, State, Captured]):
    """Layers of one type, in the order of their application.

    Attributes:
      block: (params, x, state, per_layer, shared) -> (x, state, captured), for one layer.
      stacked: sublayer -> parameters [G, ...].
      plan: sublayer -> group of each layer.
      per_layer: a tree of arrays [L, ...]; layer i gets row i.

    >>> add = lambda params, x, state, per_layer, shared: (x + params["a"], state, None)
    >>> stack = Stack(add, {"a": jnp.array([1.0, 5.0])}, Plan(a=(0, 1, 0)))
    >>> (x, _), _ = run_stacks({"add": stack}, ["add"] * 3, jnp.zeros(()), state={"add": None})
    >>> float(x)
    7.0
    """

    block: Block[X, State, Captured]
    stacked: Params
    plan: Plan
    per_layer: PyTree = None


def run_stack(
    block: Block[X, State, Captured],
    stacked: Params,
    plan: Plan,
    x: X,
    *,
    per_layer: PyTree = None,
    shared: PyTree = None,
    state: State = None,  # type: ignore[assignment]  # a caller without state has State = None
    remat: bool = True,
) -> tuple[tuple[X, State], Captured]:
    """Applies `block` once per layer, with the parameters that the plan gives to that layer.

    Size and time of compilation do not depend on the number of layers.

    Args:
      block: (params, x, state, per_layer, shared) -> (x, state, captured), for one layer.
        `params[sublayer]` are the parameters of its group, without the axis G, or the mixture of
        all groups if the plan has coefficients for it. `captured` is any tree of arrays:
        intermediate values, auxiliary losses such as a load-balancing loss, or None.
      stacked: sublayer -> parameters [G, ...]; G may exceed what the plan uses.
      plan: sublayer -> group of each layer.
      x: input of the first layer, any tree of arrays.
      per_layer: a tree of arrays [L, ...]; layer i gets row i, traced (random keys, gates). With
        `np.arange(L)` a block knows the index of its layer.
      shared: given unchanged to every layer (masks, rotary angles).
      state: carried from layer to layer next to x (a cache).
      remat: recompute all activations in the backward pass; if False, all but those that the block
        marks with `remat.save_for_backward`. In both cases parameters are sliced again in the
        backward pass: saving them would cost one copy of the parameters per layer.

    Returns:
      ((x, state) after the last layer, captured stacked [L, ...]). Captured values and auxiliary
      losses leave the scan in this way, one row per layer; sum over the axis L to add losses up.

    Raises:
      ValueError: a sublayer of the plan has no parameters, or fewer groups than the plan uses;
        `per_layer` has another number of rows than the plan has layers.

    Sources: the plans of ALBERT (Lan et al. 2019, arXiv 1909.11942), Takase and Kiyono 2021
    (arXiv 2104.06022), Subformer (Reid et al. 2021, arXiv 2101.00234), relaxed recursive
    transformers (Bae et al. 2024, arXiv 2410.20672) and cross-layer attention (Brandon et al. 2024,
    arXiv 2405.12981) all run here.

    Example, with the layer index and an auxiliary loss:

    >>> def block(params, x, state, layer, shared):
    ...     x = x * params["scale"] + layer
    ...     return x, state, {"loss": x**2}
    >>> plan, stacked = Plan(scale=(0, 1, 0)), {"scale": jnp.array([2.0, 3.0])}
    >>> (x, _), captured = run_stack(block, stacked, plan, jnp.ones(()), per_layer=np.arange(3))
    >>> float(x), captured["loss"].tolist()
    (16.0, [4.0, 49.0, 256.0])
    """
    (x, states), captured = run_stacks(
        {"": Stack(block, stacked, plan, per_layer)},
        [""] * plan.num_layers,
        x,
        shared=shared,
        state={"": state},
        remat=remat,
    )
    return (x, states[""]), captured[""]


def run_stacks(
    stacks: Mapping[str, Stack[X, State, Captured]],
    order: Sequence[str],
    x: X,
    *,
    shared: PyTree = None,
    state: Mapping[str, State],
    remat: bool = True,
) -> tuple[tuple[X, dict[str, State]], dict[str, Captured]]:
    """Applies layers of several types: `run_stack` for several stacks that alternate.

    Consecutive layers of one stack are one scan, and a repeating pattern of them is one scan over
    these (see `repeating_pattern`). The size of the compiled program depends on the pattern, not
    on the number of layers.

    Args:
      stacks: name -> the layers of one type.
      order: the name of the stack of each layer; a stack has as many layers here as in its plan.
      x: input of the first layer.
      shared: given unchanged to every layer.
      state: name of a stack -> what its layers carry from one to the next.
      remat: as in `run_stack`.

    Returns:
      ((x, state), captured) as in `run_stack`, state and captured by the name of the stack.

    Raises:
      ValueError: as `run_stack`; `order` does not name each stack once per layer of its plan.

    >>> add = lambda params, x, state, per_layer, shared: (x + params["a"], state, x)
    >>> double = lambda params, x, state, per_layer, shared: (x * params["a"], state, x)
    >>> stacks = {
    ...     "add": Stack(add, {"a": jnp.ones(1)}, Plan(a=(0, 0, 0, 0))),
    ...     "double": Stack(double, {"a": jnp.full(1, 2.0)}, Plan(a=(0, 0))),
    ... }
    >>> order = ["add", "add", "double"] * 2
    >>> (x, _), captured = run_stacks(stacks, order, jnp.ones(()), state=dict.fromkeys(stacks))
    >>> float(x), captured["add"].tolist(), captured["double"].tolist()
    (16.0, [1.0, 2.0, 6.0, 7.0], [3.0, 8.0])
    """
    _check_order(stacks, order)
    layers = {name: _scan_body(stack, shared, remat) for name, stack in stacks.items()}
    inputs = {name: _scan_inputs(stack, name) for name, stack in stacks.items()}
    captured: dict[str, list[_Captured]] = {name: [] for name in stacks}
    carry = x, dict(state)
    first_layer = dict.fromkeys(stacks, 0)
    for runs, repeats in repeating_pattern(order):
        segment = _Segment(runs, _layers_of_runs(runs, repeats, first_layer))
        for name, count in runs:
            first_layer[name] += repeats * count
        carry, values = _scan_segment(segment, layers, inputs, carry)
        for (name, _), numbers, value in zip(runs, segment.layers, values, strict=True):
            captured[name].append(_Captured(numbers, value))
    return carry, {name: _by_layer(found) for name, found in captured.items()}


Runs = tuple[tuple[Label, int], ...]
"""((name of a stack, number of consecutive layers), ...)"""


def repeating_pattern(order: Sequence[Label]) -> list[tuple[Runs[Label], int]]:
    """The shortest pattern that repeats through all layers, as (runs, number of repetitions).

    A second entry holds the incomplete pattern at the end, if there is one.

    >>> repeating_pattern("aabaabaab")
    [((('a', 2), ('b', 1)), 3)]
    >>> repeating_pattern("aabaaba")
    [((('a', 2), ('b', 1)), 2), ((('a', 1),), 1)]
    >>> repeating_pattern("aaa")
    [((('a', 1),), 3)]
    """
    labels = list(order)
    length = len(labels)
    period = next(p for p in range(1, length + 1) if labels[p:] == labels[: length - p])
    repeats, rest = divmod(length, period)
    found = [(_runs(labels[:period]), repeats)]
    return found + ([(_runs(labels[-rest:]), 1)] if rest else [])


def _runs(labels: Sequence[Label]) -> Runs[Label]:
    return tuple((label, len(list(same))) for label, same in itertools.groupby(labels))


class _Segment(NamedTuple):
    """A pattern of runs that repeats, compiled as one scan over the repetitions."""

    runs: Runs[str]
    layers: list[np.ndarray]
    """For each run, which layers of its stack: [repeats, count]; [repeats] of a single layer"""


class _Captured(NamedTuple):
    """What the layers of one run captured: arrays with the leading axes of `layers`."""

    layers: np.ndarray
    values: PyTree


_Carry = tuple[X, dict[str, State]]
_Step = tuple[PyTree, PyTree]
"""One layer's (sublayer -> group index, entry of per_layer)"""
_Body = Callable[[tuple[X, State], _Step], tuple[tuple[X, State], Captured]]


def _scan_segment(
    segment: _Segment,
    layers: Mapping[str, _Body[X, State, Captured]],
    inputs: Mapping[str, _Step],
    carry: _Carry[X, State],
) -> tuple[_Carry[X, State], list[Captured]]:
    """Applies a repeating pattern; returns the carry, and for each run what its layers captured."""
    steps = [
        jax.tree.map(lambda a, n=numbers: _take(a, n), inputs[name])
        for (name, _), numbers in zip(segment.runs, segment.layers, strict=True)
    ]
    single_layer = _is_single_layer(segment.runs)

    def pattern(
        carry: _Carry[X, State], steps: list[_Step]
    ) -> tuple[_Carry[X, State], list[Captured]]:
        (x, states), captured = carry, []
        for (name, _), step in zip(segment.runs, steps, strict=True):
            before = x, states[name]
            if single_layer:
                (x, state), values = layers[name](before, step)
            else:
                (x, state), values = lax.scan(layers[name], before, step)
            states = states | {name: state}
            captured.append(values)
        return (x, states), captured

    return lax.scan(pattern, carry, steps)


def _check_order(stacks: Mapping[str, Stack[X, State, Captured]], order: Sequence[str]) -> None:
    if unknown := [name for name in order if name not in stacks]:
        raise ValueError(
            f"order names {unknown[0]!r}, which is none of the stacks {', '.join(stacks)}"
        )
    for name, stack in stacks.items():
        if (count := list(order).count(name)) != stack.plan.num_layers:
            raise ValueError(
                f"order names {name!r} {count} times, its plan has {stack.plan.num_layers} layers; "
                "name it once per layer"
            )


def _scan_inputs(stack: Stack[X, State, Captured], name: str) -> _Step:
    """The group indices [L] of every sublayer, and `per_layer`."""
    count = stack.plan.num_layers
    for a in jax.tree.leaves(stack.per_layer):
        if np.shape(a)[:1] != (count,):  # JAX clamps an index past the end
            label = f"stack {name!r}: " if name else ""
            rows = f"{np.shape(a)[0]} rows" if np.ndim(a) else "a number"
            raise ValueError(
                f"{label}per_layer has {rows} for the {count} layers of its plan; give one row each"
            )
    indices = {name: np.asarray(stack.plan.indices(name), np.uint32) for name in stack.plan}
    return indices, stack.per_layer


def _scan_body(
    stack: Stack[X, State, Captured], shared: PyTree, remat: bool
) -> _Body[X, State, Captured]:
    """One layer as a scan takes it."""
    _check_stacked(stack.stacked, stack.plan)

    def layer(carry: tuple[X, State], step: _Step) -> tuple[tuple[X, State], Captured]:
        (x, state), (indices, per_layer) = carry, step
        params = select_params(stack.stacked, indices)
        x, state, captured = stack.block(params, x, state, per_layer, shared)
        return (x, state), captured

    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    body: _Body[X, State, Captured] = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return body


def _check_stacked(stacked: Params, plan: Plan) -> None:
    for name, count in plan.num_groups.items():
        if name not in stacked:
            raise ValueError(
                f"the plan has the sublayer {name!r}, the stacked parameters have "
                f"{', '.join(sorted(stacked))}; initialise them with this plan"
            )
        sizes = {a.shape[0] for a in jax.tree.leaves(stacked[name])}
        if min(sizes, default=count) < count:
            raise ValueError(
                f"sublayer {name!r}: the plan uses {count} parameter groups, the stacked "
                f"parameters have {min(sizes)}; initialise them with this plan"
            )


def _is_single_layer(runs: Runs[str]) -> bool:
    """Whether the pattern is one layer, which needs no scan inside the scan over repetitions."""
    return len(runs) == 1 and runs[0][1] == 1


def _layers_of_runs(
    runs: Runs[str], repeats: int, first_layer: Mapping[str, int]
) -> list[np.ndarray]:
    """`_Segment.layers`; `first_layer` is the number of layers of each stack before the segment."""
    per_repeat = {name: sum(count for n, count in runs if n == name) for name, _ in runs}
    layers, before = [], dict.fromkeys(per_repeat, 0)
    for name, count in runs:
        first = first_layer[name] + before[name] + per_repeat[name] * np.arange(repeats)
        layers.append(first if _is_single_layer(runs) else first[:, None] + np.arange(count))
        before[name] += count
    return layers


def _take(a: Array | np.ndarray, layers: np.ndarray) -> Array | np.ndarray:
    """a[layers] of a [L, ...]; `a` itself if these are all layers in order, without a copy."""
    return a if np.array_equal(layers, np.arange(len(a))) else a[layers]


def _by_layer(found: list[_Captured]) -> PyTree:
    """What the layers of one stack captured, [L, ...] in the order of its layers."""
    flat = [
        jax.tree.map(lambda a, n=c.layers: a.reshape(n.size, *a.shape[n.ndim :]), c.values)
        for c in found
    ]
    joined = jax.tree.map(lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *flat)
    order = np.argsort(np.concatenate([c.layers.reshape(-1) for c in found]))
    return jax.tree.map(lambda a: _take(a, order), joined)
