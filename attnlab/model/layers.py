"""L transformer layers under a sharing plan, of one kind or of several, as one pure call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnlab.heads.old.cache import init_cache, with_own_lengths
from attnlab.model.block import PROBS, BlockSpec, transformer_block, values_of
from attnlab.observe import NOTHING, Given, Ran, Value, check_names
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import Stack, run_stacks


class Kind(NamedTuple):
    """The layers of one kind."""

    pool: dict[str, Any]
    """part -> its weights [G, ...]"""
    plan: Plan
    spec: BlockSpec
    given: Mapping[str, Any] = {}
    """Fields of `Given` that are its own: rotary, bias, cache, told"""


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
    >>> from attnlab.heads.old import HeadSpec
    >>> from attnlab.sharing.stack import init_stacked
    >>> spec = BlockSpec(HeadSpec("standard", width=6, num_heads=2), ffn_width=8)
    >>> plan = Plan(attention=(0, 0, 0), ffn=(0, 1, 0))
    >>> pool = init_stacked(init_block(spec), jax.random.key(0), plan)
    >>> run_layers(pool, plan, jax.numpy.ones((1, 5, 6)), spec=spec).x.shape
    (1, 5, 6)
    """
    kinds, order = {"layers": Kind(pool, plan, spec)}, ("layers",) * plan.num_layers
    given, options = given._replace(**fields), dict(remat=remat, return_probs=return_probs)
    ran = run_kinds(kinds, order, x, context, given, **options)
    return ran._replace(cache=ran.cache["layers"])


def run_kinds(
    kinds: Mapping[str, Kind],
    order: Sequence[str],
    x: Float[Array, "B T D"],
    context: Float[Array, "B S E"] | None = None,
    given: Given = NOTHING,
    *,
    remat: bool = True,
    return_probs: bool = False,
    **fields: Any,
) -> Ran:
    """`run_layers` of several kinds in turn: `order` names the kind of every layer.

    Layers are counted as they come, in `head_gate`, in what is shown and for `edit`. Where heads
    differ in number, `head_gate` is a sequence of L arrays, and so is what is shown of values
    whose shape is not the same in all kinds. The caches come back by the name of their kind.
    """
    given = given._replace(**fields)
    known = values_of_all([kind.spec for kind in kinds.values()])
    if return_probs:
        given = given.showing(n for n in PROBS if n in known)
    given = given._replace(show=check_names(given.show, given.edit, known))
    heads = sorted({kind.spec.heads.num_heads for kind in kinds.values()})
    if len(heads) > 1 and hasattr(given.head_gate, "shape"):
        raise ValueError(
            f"layers have {' or '.join(map(str, heads))} heads: give head_gate as {len(order)} "
            "arrays, one for each layer"
        )
    keys = None
    if given.dropout_key is not None:
        keys = jax.random.split(given.dropout_key, len(order))
    layers = {name: [i for i, other in enumerate(order) if other == name] for name in kinds}
    stacks, state = {}, {}
    for name, kind in kinds.items():
        mine = np.array(layers[name])
        own = {
            "head_gate": _rows(given.head_gate, mine, len(order)),
            "dropout_key": _rows(keys, mine, len(order)),
            "reuse": np.array(kind.plan.reuses_kv),
        }
        own |= {"scale": np.array(kind.spec.layer_scales)} if kind.spec.layer_scales else {}
        own |= {"layer": mine} if given.edit else {}
        stacks[name], state[name] = _stack(kind, x, context, given._replace(**kind.given), own)
    (x, state), shown = run_stacks(stacks, order, x, state=state, remat=remat)
    caches = {name: cache for name, (cache, _) in state.items()}
    return Ran(x, caches, None, _by_layer(shown, layers))


def values_of_all(specs: Sequence[BlockSpec]) -> dict[str, Value]:
    """What layers of each of these kinds can show and take edits of."""
    first, *others = map(values_of, specs)
    return {n: v for n, v in first.items() if all(n in values for values in others)}


def _stack(kind: Kind, x: Array, context: Any, given: Given, own: dict[str, Any]) -> Any:
    """The layers of a kind as `run_stacks` takes them, and the state that they hand on."""
    plan, spec = kind.plan, kind.spec
    if given.cache is not None and given.padding_mask is not None:
        given = given._replace(cache=with_own_lengths(given.cache, x.shape[0]))
    kept = None  # the keys and values that layers still to come read again, each in its place
    if any(plan.reuses_kv):
        batch, length = x.shape[:2]
        turned = given.rotary is not None
        one = init_cache(spec.heads, batch, length, x.dtype, rotary=turned)
        del one["length"]
        kept = jax.tree.map(lambda a: jnp.zeros((max(plan.kv_buffers) + 1, *a.shape), a.dtype), one)
    lengths = {} if given.cache is None else {"length": given.cache["length"]}

    def block(w, x, state, own, _):
        index, place, own = own
        caches, kept = state
        # A layer that reuses keys writes them once more where the one that made them wrote them:
        # hence the lengths from before the call.
        mine = jax.tree.map(lambda a: a[index], caches and caches | lengths)
        memory = jax.tree.map(lambda a: a[place], kept)
        ran = transformer_block(
            w, x, context, given._replace(cache=mine, memory=memory, **own), spec=spec
        )
        caches = jax.tree.map(lambda a, new: a.at[index].set(new), caches, ran.cache)
        kept = jax.tree.map(lambda a, new: a.at[place].set(new), kept, ran.memory)
        return ran.x, (caches, kept), ran.shown

    layer = np.array(plan.kv_indices), np.array(plan.kv_buffers), own
    return Stack(block, kind.pool, plan, layer), (given.cache, kept)


def _rows(a: Any, layers: np.ndarray, count: int) -> Any:
    """Of [L, ...], or of L arrays, those of these layers."""
    if a is None:
        return None
    if isinstance(a, list | tuple):
        if len(a) != count:
            raise ValueError(f"{len(a)} gates for {count} layers; give one array for each layer")
        return jnp.stack([jnp.asarray(a[i]) for i in layers])
    return a if len(layers) == count else a[layers]


def _by_layer(shown: dict[str, dict[str, Array]], layers: dict[str, list[int]]) -> dict[str, Any]:
    """Value -> what all layers showed of it, in their order: [L, ...], or L arrays where kinds
    differ in its shape."""
    if len(shown) == 1:
        return next(iter(shown.values()))
    order = np.argsort(np.concatenate([layers[name] for name in shown]))
    found: dict[str, Any] = {}
    for value in next(iter(shown.values())):
        each = [one[value] for one in shown.values()]
        if len({(a.shape[1:], a.dtype) for a in each}) == 1:
            found[value] = jnp.concatenate(each)[order]
        else:
            rows = [row for a in each for row in a]
            found[value] = tuple(rows[i] for i in order)
    return found
