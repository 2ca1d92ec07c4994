"""Why does a head look there? A score split over what was written below it.

    score[t, s] = scale q_t . k_s + bias,  q = Q(sum of terms),  k = K(sum of terms)

Q and K are linear in the stream once the statistics of the norms on the way are held at their own
values: that of the layer, of a latent, of queries and keys. Then a score is a sum over pairs of
terms, one that made the query and one that made the key.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnlab.heads.old.layouts import LAYOUTS
from attnlab.heads.old.project import query_alone, turning
from attnlab.inspect.linear import linear_at
from attnlab.inspect.writes import (
    Stack,
    Watched,
    final_norm,
    flatten,
    read_by,
    stack_of,
    summed,
)
from attnlab.model.outer import relative_bias, rotary_of
from attnlab.names import find

NAMES = {"scores": (False, False), "encoder.scores": (True, True), "cross.scores": (False, True)}
"""Name in `observe.NAMES` -> do queries and keys come from the encoder?"""
SIDES = ("query", "key", "both")


class Split(NamedTuple):
    """A score as a sum: over `queries` the first axis of `terms`, over `keys` the next."""

    queries: list[tuple]
    """What made the query: (name of `decompose`, layer, head), the norm before the heads
    ("norm_before",), the bias of the map ("map",); empty where that side is whole"""
    keys: list[tuple]
    terms: Float[Array, "*M B T S"]
    bias: Array | None
    """What positions add to the scores, [.., T, S]: all terms and this are the shown scores"""


def split_scores(
    seen: Watched, layer: int, head: int, *, name: str = "scores", side: str = "both"
) -> Split:
    """The scores of one head, before the mask, over pairs of terms: [Mq, Mk, B, T, S]. With `side`
    "query" over what made the query alone, [Mq, B, T, S], or "key".

    `name` is "scores", "cross.scores" (whose keys are made of the encoder's terms) or
    "encoder.scores". A layer that reuses keys reads those of an earlier one: so do their terms.
    The sum over all terms, and the bias, is what the model shows as `name`, but at keys that no
    query may see, which attention takes for zeros.

    Raises ValueError where a query or a key is no linear map of the stream: heads of the layout
    `tensor` are products of two, talking heads mix the scores of all.
    """
    for_q, for_k = find("scores", name, NAMES)
    find("side", side, dict.fromkeys(SIDES))
    c = seen.config.as_encoder if for_q else seen.config
    part = "cross" if name.startswith("cross.") else "attention"
    if c.talking_heads:
        raise ValueError("talking heads mix the scores of all heads, so none has one of its own")
    if c.cross == "merged" and not for_q:
        raise ValueError(
            "keys of cross='merged' are of two texts, and are not split; look at 'encoder.scores'"
        )
    asks, holds = (stack_of(seen, encoder=e) for e in (for_q, for_k))
    layers = asks.plan.num_layers
    if not (0 <= layer < layers and 0 <= head < c.num_heads):
        raise ValueError(
            f"layer {layer}, head {head}: there are {layers} layers of {c.num_heads} heads"
        )
    w = asks.weights(layer)
    maker = layer
    if part == "attention":
        maker = asks.plan.kv_sources[layer]
        weights = asks.weights(maker)
        w = {
            "q": w["attention"] | w.get("kv", {}),
            "k": weights["attention"] | weights.get("kv", {}),
        }
        key_terms = read_by(seen, maker, part, encoder=for_k) if maker != layer else None
    else:
        w = {"q": w["cross"], "k": w["cross"]}
        key_terms = final_norm(seen, encoder=True)
    query_terms = read_by(seen, layer, part, encoder=for_q)
    key_terms = query_terms if key_terms is None else key_terms
    rotary = [None if part == "cross" else rotary_of(c, stack.numbers) for stack in (asks, holds)]
    spec, row = c.heads, LAYOUTS[c.layout]

    def query(x: Array) -> Array:
        return query_alone(w["q"], x, spec=spec, rotary=rotary[0])[:, :, head]

    def key(x: Array) -> Array:
        ready = row.prepare(w["k"], x)
        held = row.store(w["k"], ready, ready, spec, turning(rotary[1]))
        k = row.read(w["k"], held, spec)[0]
        return k[:, :, head // (spec.num_heads // k.shape[2])]

    why = f"a {{}} of layout {c.layout!r}"
    queries, q = _through(query, query_terms, why.format("query"), side != "key")
    keys, k = _through(key, key_terms, why.format("key"), side != "query")
    scale = spec.score_scale * (c.layer_scales[layer] if c.layer_scales else 1)
    terms = scale * jnp.einsum("mbth,nbsh->mnbts", q, k)
    if side != "both":
        terms = terms[:, 0] if side == "query" else terms[0]
    return Split(queries, keys, terms, _bias(asks, part, head))


def _through(f: Any, terms: dict[str, Array], why: str, apart: bool) -> tuple[list, Array]:
    """([names], [M, B, T, H]) of the terms behind f; whole, where they are not asked `apart`."""
    made = linear_at(f, summed(terms), why=why)
    if not apart:
        return [], made.value[None]
    names, each = flatten(terms)
    each = made.of(each)
    if made.constant is None:
        return names, each
    return [*names, ("map",)], jnp.concatenate([each, made.constant[None]])


def _bias(stack: Stack, part: str, head: int) -> Array | None:
    """What relative positions add to the scores of this head."""
    table = stack.seen.params.get(f"{stack.outer}relative_bias")
    if table is None or part == "cross":
        return None
    c, numbers = stack.seen.config, stack.numbers
    two_sided = stack.prefix == "encoder." or c.kind == "encoder"
    found = relative_bias(table, numbers, numbers, config=c, two_sided=two_sided)
    return found[..., head, :, :]
