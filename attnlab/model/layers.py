"""L transformer layers under a sharing plan, as one pure call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.attention.masks import Edges
from attnlab.heads.cache import init_cache
from attnlab.model.block import BlockSpec, transformer_block
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import run_stack


class Ran(NamedTuple):
    """What a stack of layers gives; None where it was not asked for."""

    x: Float[Array, "B T D"]
    probs: Any
    """[L, B, N, T, S], with a context a pair of them"""
    cache: Any
    hidden: Float[Array, "L B T D"] | None
    """x after every layer"""


def run_layers(
    pool: dict[str, Any],
    plan: Plan,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    *,
    spec: BlockSpec,
    mask: Array | Edges | None = None,
    bias: Array | None = None,
    context_mask: Array | None = None,
    rotary: Array | None = None,
    head_gate: Float[Array, "L N"] | Float[Array, "L B N"] | None = None,
    dropout_key: Array | None = None,
    cache: Any = None,
    remat: bool = True,
    return_probs: bool = False,
    return_hidden: bool = False,
) -> Ran:
    """x after all layers of `plan`, which read their weights in `pool` (part -> [G, ...]).

    `head_gate` multiplies each head of each application, also where layers share weights.
    `cache` holds one cache per application that makes keys and values, stacked [L, ...]: layers
    that share weights still have keys of their own, those that reuse keys read the cache of the
    layer that made them. The rest is as in `transformer_block` and the same for every layer.

    >>> from attnlab.model.block import init_block
    >>> from attnlab.heads import HeadSpec
    >>> from attnlab.sharing.stack import init_pool
    >>> spec = BlockSpec(HeadSpec("standard", width=6, num_heads=2), ffn_width=8)
    >>> plan = Plan(attention=(0, 0, 0), ffn=(0, 1, 0))
    >>> pool = init_pool(init_block(spec), jax.random.key(0), plan)
    >>> run_layers(pool, plan, jax.numpy.ones((1, 5, 6)), spec=spec).x.shape
    (1, 5, 6)
    """
    keys = None if dropout_key is None else jax.random.split(dropout_key, plan.num_layers)
    memory = None
    if any(plan.reuses):
        batch, length = x.shape[:2]
        memory = init_cache(spec.heads, batch, length, x.dtype)
        del memory["length"]
    lengths = {} if cache is None else {"length": cache["length"]}

    def block(w, x, state, own, shared):
        index, own = own
        caches, memory = state
        # A layer that reuses keys writes them once more where the one that made them wrote them:
        # hence the lengths from before the call.
        mine = jax.tree.map(lambda a: a[index], caches and caches | lengths)
        x, probs, mine, memory = transformer_block(
            w, x, spec=spec, memory=memory, cache=mine, return_probs=return_probs, **own, **shared
        )
        caches = jax.tree.map(lambda a, new: a.at[index].set(new), caches, mine)
        return x, (caches, memory), (probs, x if return_hidden else None)

    (x, (cache, _)), (probs, hidden) = run_stack(
        block,
        pool,
        plan,
        x,
        layer=(
            jnp.array(plan.memories),
            {"head_gate": head_gate, "dropout_key": keys, "reuse": jnp.array(plan.reuses)},
        ),
        shared={
            "context": context,
            "mask": mask,
            "bias": bias,
            "context_mask": context_mask,
            "rotary": rotary,
        },
        state=(cache, memory),
        remat=remat,
    )
    return Ran(x, probs, cache, hidden)
