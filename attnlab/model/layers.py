"""L transformer layers under a sharing plan, as one pure call."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.cache import init_cache, with_own_lengths
from attnlab.model.block import PROBS, BlockSpec, transformer_block, values_of
from attnlab.observe import NOTHING, Given, Ran, check_names
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import run_stack


def run_layers(
    pool: dict[str, Any],
    plan: Plan,
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    given: Given = NOTHING,
    *,
    spec: BlockSpec,
    remat: bool = True,
    return_probs: bool = False,
    **fields: Any,
) -> Ran:
    """x after all layers of `plan`, which read their weights in `pool` (part -> [G, ...]).

    `given`, and `fields` of it, as in `transformer_block` and the same for every layer, but:
    `head_gate` [L, N] or [L, B, N] multiplies each head of each application, also where layers
    share weights; `cache` holds one cache per application that makes keys and values, stacked
    [L, ...]: layers that share weights still have keys of their own, those that reuse keys read
    the cache of the layer that made them. What is shown is stacked [L, ...].

    >>> from attnlab.model.block import init_block
    >>> from attnlab.heads import HeadSpec
    >>> from attnlab.sharing.stack import init_pool
    >>> spec = BlockSpec(HeadSpec("standard", width=6, num_heads=2), ffn_width=8)
    >>> plan = Plan(attention=(0, 0, 0), ffn=(0, 1, 0))
    >>> pool = init_pool(init_block(spec), jax.random.key(0), plan)
    >>> run_layers(pool, plan, jax.numpy.ones((1, 5, 6)), spec=spec).x.shape
    (1, 5, 6)
    """
    given = given._replace(**fields)
    if return_probs:
        given = given.showing(n for n in PROBS if n in values_of(spec))
    given = given._replace(show=check_names(given.show, given.edit, values_of(spec)))
    if given.cache is not None and given.padding_mask is not None:
        given = given._replace(cache=with_own_lengths(given.cache, x.shape[0]))
    keys = None
    if given.dropout_key is not None:
        keys = jax.random.split(given.dropout_key, plan.num_layers)
    kept = None  # the keys and values that layers still to come read again, each in its place
    if any(plan.reuses):
        batch, length = x.shape[:2]
        turned = given.rotary is not None
        one = init_cache(spec.heads, batch, length, x.dtype, rotary=turned)
        del one["length"]
        kept = jax.tree.map(lambda a: jnp.zeros((max(plan.places) + 1, *a.shape), a.dtype), one)
    lengths = {} if given.cache is None else {"length": given.cache["length"]}

    def block(w, x, state, own, given):
        index, place, own = own
        caches, kept = state
        # A layer that reuses keys writes them once more where the one that made them wrote them:
        # hence the lengths from before the call.
        mine = jax.tree.map(lambda a: a[index], caches and caches | lengths)
        memory = jax.tree.map(lambda a: a[place], kept)
        given = given._replace(cache=mine, memory=memory, **own)
        ran = transformer_block(w, x, context, given, spec=spec)
        caches = jax.tree.map(lambda a, new: a.at[index].set(new), caches, ran.cache)
        kept = jax.tree.map(lambda a, new: a.at[place].set(new), kept, ran.memory)
        return ran.x, (caches, kept), ran.shown

    own = {"head_gate": given.head_gate, "dropout_key": keys, "reuse": jnp.array(plan.reuses)}
    own |= {"scale": jnp.array(spec.layer_scales)} if spec.layer_scales else {}
    own |= {"layer": jnp.arange(plan.num_layers)} if given.edit else {}
    (x, (cache, _)), shown = run_stack(
        block,
        pool,
        plan,
        x,
        layer=(jnp.array(plan.memories), jnp.array(plan.places), own),
        shared=given,
        state=(given.cache, kept),
        remat=remat,
    )
    return Ran(x, cache, None, shown)
