"""Runs L layers under any sharing plan in one compiled scan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.remat import SAVED
from attnlab.sharing.plan import Plan


def init_pool(init: dict[str, Callable], key: jax.Array, plan: Plan) -> dict[str, Any]:
    """part -> its weights stacked [G, ...]; `init[part](key)` makes one slot.

    >>> make = {"scale": lambda key: jax.random.normal(key, (3,))}
    >>> init_pool(make, jax.random.key(0), Plan(scale=(0, 1, 0)))["scale"].shape
    (2, 3)
    """
    keys = dict(zip(plan, jax.random.split(key, len(plan)), strict=True))
    return {p: jax.vmap(init[p])(jax.random.split(keys[p], g)) for p, g in plan.num_slots.items()}


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
      block: (w, x, state, own, shared) -> (x, state, seen), where w[part] is the slot of `part`.
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
    for part, count in plan.num_slots.items():
        if part not in pool:
            raise ValueError(f"the plan names part {part!r}, the pool holds {sorted(pool)}")
        sizes = {a.shape[0] for a in jax.tree.leaves(pool[part])}
        if min(sizes, default=count) < count:
            raise ValueError(f"part {part!r}: the plan uses {count} slots, there are {min(sizes)}")

    def body(carry, step):
        index, own = step
        w = {p: jax.tree.map(lambda a, p=p: a[index[p]], pool[p]) for p in plan}
        x, state, seen = block(w, *carry, own, shared)
        return (x, state), seen

    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return lax.scan(body, (x, state), ({p: jnp.asarray(plan.indices(p)) for p in plan}, layer))
