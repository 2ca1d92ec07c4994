"""Runs L layers under any sharing plan in one compiled scan; layers of several kinds in turn."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnlab.remat import SAVED
from attnlab.sharing.dictionary import one_hot, taken
from attnlab.sharing.plan import MIXTURE, Plan


def init_pool(init: dict[str, Callable], key: jax.Array, plan: Plan) -> dict[str, Any]:
    """part -> its weights stacked [G, ...]; `init[part](key)` makes one slot.

    >>> make = {"scale": lambda key: jax.random.normal(key, (3,))}
    >>> init_pool(make, jax.random.key(0), Plan(scale=(0, 1, 0)))["scale"].shape
    (2, 3)
    """
    keys = dict(zip(plan, jax.random.split(key, len(plan)), strict=True))
    return {part: init_part(init[part], keys[part], plan, part) for part in plan}


def init_part(init: Callable, key: jax.Array, plan: Plan, part: str) -> Any:
    """The weights of one part, stacked [G, ...]; coefficients of a mixture begin `one_hot`."""
    made = jax.vmap(init)(jax.random.split(key, plan.num_slots[part]))
    return one_hot(made, plan, part.removesuffix(MIXTURE)) if part.endswith(MIXTURE) else made


class Stack(NamedTuple):
    """Layers of one kind, in the order in which they are applied; see `run_stack`."""

    block: Callable
    pool: dict[str, Any]
    plan: Plan
    layer: Any = None


def run_stack(
    block: Callable,
    pool: dict[str, Any],
    plan: Plan,
    x: Any,
    *,
    layer: Any = None,
    shared: Any = None,
    state: Any = None,
    remat: bool = True,
) -> tuple[tuple[Any, Any], Any]:
    """x after every application of `block`, in the order of `plan`.

    Args:
      block: (w, x, state, own, shared) -> (x, state, seen), where w[part] is the slot of `part`,
        or the mixture of all its slots where the plan has coefficients for it.
      pool: part -> weights stacked [G, ...]; several stacks may read one.
      plan: part -> slot per application.
      layer: a tree with a leading [L] axis; each application gets its own row (gates, keys).
      shared: given whole to every application (masks, rotary angles).
      state: threaded through the applications.
      remat: compute all activations again in the backward pass; else all but those that the
        block marked with `remat.save_for_backward`. Both times the slots are sliced
        again: saved, they would cost one copy of the weights per layer.

    Returns: ((x, state), seen), `seen` stacked [L, ...]. Size and time of compilation do not
      depend on L. Raises ValueError where plan and pool do not fit.

    >>> plan = Plan(scale=(0, 1, 0))
    >>> block = lambda w, x, state, own, shared: (x * w["scale"], state, None)
    >>> float(run_stack(block, {"scale": jnp.array([2.0, 3.0])}, plan, jnp.ones(()))[0][0])
    12.0
    """
    (x, states), seen = run_stacks(
        {"": Stack(block, pool, plan, layer)},
        [""] * plan.num_layers,
        x,
        shared=shared,
        state={"": state},
        remat=remat,
    )
    return (x, states[""]), seen[""]


def run_stacks(
    stacks: Mapping[str, Stack],
    order: Sequence[str],
    x: Any,
    *,
    shared: Any = None,
    state: Mapping[str, Any],
    remat: bool = True,
) -> tuple[tuple[Any, dict[str, Any]], dict[str, Any]]:
    """x after the layers of several stacks that take turns: `order` names the stack of each layer.

    A run of neighbours of one stack is one scan, and what comes again and again is one scan over
    such runs (see `turns`): what is compiled depends on the pattern, not on the depth. `state` and
    what is seen stand by the name of their stack, and are otherwise as in `run_stack`.

    >>> add = lambda w, x, state, own, shared: (x + w["a"], state, x)
    >>> double = lambda w, x, state, own, shared: (x * w["a"], state, x)
    >>> stacks = {
    ...     "add": Stack(add, {"a": jnp.ones(1)}, Plan(a=(0, 0, 0, 0))),
    ...     "double": Stack(double, {"a": jnp.full(1, 2.0)}, Plan(a=(0, 0))),
    ... }
    >>> order = ["add", "add", "double"] * 2
    >>> (x, _), seen = run_stacks(stacks, order, jnp.ones(()), state={"add": None, "double": None})
    >>> float(x), seen["add"].tolist(), seen["double"].tolist()
    (16.0, [1.0, 2.0, 6.0, 7.0], [3.0, 8.0])
    """
    bodies = {name: _body(stack, shared, remat) for name, stack in stacks.items()}
    steps = {
        name: ({p: np.asarray(s.plan.indices(p)) for p in s.plan}, s.layer)
        for name, s in stacks.items()
    }
    done = dict.fromkeys(stacks, 0)
    pieces: dict[str, list[tuple[np.ndarray, Any]]] = {name: [] for name in stacks}
    carry = x, dict(state)
    for runs, times in turns(order):
        numbers = _numbers(runs, times, done)
        given = [
            jax.tree.map(lambda a, n=n: _rows(a, n), steps[name])
            for (name, _), n in zip(runs, numbers, strict=True)
        ]

        def turn(carry: Any, given: Any, runs: Any = runs) -> Any:
            (x, state), shown = carry, []
            for (name, _), step in zip(runs, given, strict=True):
                body, own = bodies[name], (x, state[name])
                (x, after), seen = body(own, step) if _alone(runs) else lax.scan(body, own, step)
                state = state | {name: after}
                shown.append(seen)
            return (x, state), shown

        carry, shown = lax.scan(turn, carry, given)
        for (name, _), n, seen in zip(runs, numbers, shown, strict=True):
            flat = lambda a, n=n: a.reshape(n.size, *a.shape[n.ndim :])
            pieces[name].append((n.reshape(-1), jax.tree.map(flat, seen)))
    return carry, {name: _in_order(found) for name, found in pieces.items()}


Runs = tuple[tuple[str, int], ...]


def turns(order: Sequence[str]) -> list[tuple[Runs, int]]:
    """((name, number of neighbours), ...) of the shortest pattern that comes again and again, and
    how often it comes; then what is left of it at the end.

    >>> turns("aabaabaab")
    [((('a', 2), ('b', 1)), 3)]
    >>> turns("aabaaba")
    [((('a', 2), ('b', 1)), 2), ((('a', 1),), 1)]
    >>> turns("aaa")
    [((('a', 1),), 3)]
    """
    order = list(order)
    repeats = lambda p: all(a == b for a, b in zip(order[p:], order, strict=False))
    period = next(p for p in range(1, len(order) + 1) if repeats(p))
    runs = lambda part: tuple((name, len([*same])) for name, same in itertools.groupby(part))
    times, left = divmod(len(order), period)
    found = [(runs(order[:period]), times)]
    return found + ([(runs(order[-left:]), 1)] if left else [])


def _body(stack: Stack, shared: Any, remat: bool) -> Callable:
    """One application: (x, state), (slots, what is the layer's own) -> (x, state), seen."""
    plan, pool = stack.plan, stack.pool
    for part, count in plan.num_slots.items():
        if part not in pool:
            raise ValueError(f"the plan names part {part!r}, the pool holds {sorted(pool)}")
        sizes = {a.shape[0] for a in jax.tree.leaves(pool[part])}
        if min(sizes, default=count) < count:
            raise ValueError(f"part {part!r}: the plan uses {count} slots, there are {min(sizes)}")

    def body(carry, step):
        index, own = step
        x, state, seen = stack.block(taken(pool, index), *carry, own, shared)
        return (x, state), seen

    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    return jax.checkpoint(body, prevent_cse=False, policy=policy)


def _alone(runs: Runs) -> bool:
    """Are the turns layers, one after the other?"""
    return len(runs) == 1 and runs[0][1] == 1


def _numbers(runs: Runs, times: int, done: dict[str, int]) -> list[np.ndarray]:
    """Which layers of its stack each run is, [times, count]; [times] where these are layers.
    `done` counts them."""
    each = {name: sum(count for n, count in runs if n == name) for name, _ in runs}
    numbers, before = [], dict.fromkeys(each, 0)
    for name, count in runs:
        first = done[name] + before[name] + each[name] * np.arange(times)
        numbers.append(first if _alone(runs) else first[:, None] + np.arange(count))
        before[name] += count
    done.update({name: done[name] + times * count for name, count in each.items()})
    return numbers


def _rows(a: Any, numbers: np.ndarray) -> Any:
    """Of [L, ...] those of these layers; all of them as they stand, without a copy."""
    return a if np.array_equal(numbers, np.arange(len(a))) else a[numbers]


def _in_order(pieces: list[tuple[np.ndarray, Any]]) -> Any:
    """What the layers of a stack showed, [L, ...]."""
    order = np.argsort(np.concatenate([numbers for numbers, _ in pieces]))
    joined = jax.tree.map(
        lambda *a: a[0] if len(a) == 1 else jnp.concatenate(a), *(seen for _, seen in pieces)
    )
    return jax.tree.map(lambda a: _rows(a, order), joined)
