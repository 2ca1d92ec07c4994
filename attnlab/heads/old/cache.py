"""What decoding remembers: what the layout stores of the past (`Layout.cache`).

A cache is a dict of arrays [B, size, ...] and the number of tokens seen so far, `length`; it goes
into a call and comes out longer. Token p lies at place p mod size, so with a sliding window a small
cache goes round; without one it ends when it is full. Where rows hold texts of their own lengths
`length` is [B]: padding is never kept, so a row holds what it would hold alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from attnlab.heads.cache import (
    Cache,
    held_positions,
    next_positions,
    stacked_size,
    with_own_lengths,
)
from attnlab.heads.old.cost import cache_shapes
from attnlab.heads.old.spec import HeadSpec, under_order

__all__ = [
    "Cache",
    "Seen",
    "extend",
    "held_positions",
    "init_cache",
    "next_positions",
    "stacked_size",
    "with_own_lengths",
]


class Seen(NamedTuple):
    """What the queries of one call may look at."""

    held: dict[str, Array]
    """name -> [B, size, ...], the new tokens included."""
    allowed: Bool[Array, "*B1 T S"]
    """[T, S], or [B, 1, T, S] where rows have lengths of their own."""
    fits: Bool[Array, "*B"]
    """False where the cache was full: then nothing was written."""
    cache: Cache


def init_cache(
    spec: HeadSpec,
    batch: int,
    size: int,
    dtype: DTypeLike = jnp.float32,
    *,
    order: str = "factored",
    rotary: bool = False,
) -> Cache:
    """An empty cache of `size` tokens for the heads of `spec`.

    Holds what the layout of `spec` stores (keys and values for most), or the layout of another
    order of contraction (see `multi_head_attention`): keys and values of the order "absorbed" are
    the inputs, and its cache holds x alone. Keys and values that are tied are held once, unless
    `rotary` positions turn the keys.

    >>> cache = init_cache(HeadSpec("absorbed", width=6, num_heads=2), batch=1, size=4)
    >>> {name: a.shape for name, a in cache.items()}
    {'x': (1, 4, 6), 'length': ()}
    """
    spec = under_order(spec, order)
    s = spec.sizes
    if not s["D"] == s["E"] == s["W"]:
        raise ValueError(
            f"width {s['D']}, key_width {s['E']} and value_width {s['W']} must be equal for a "
            "cache, because queries, keys and values are of one text"
        )
    shapes = cache_shapes(spec, rotary)
    arrays = {name: jnp.zeros((batch, size, *shape), dtype) for name, shape in shapes.items()}
    return arrays | {"length": jnp.zeros((), jnp.int32)}


def extend(
    cache: Cache,
    new: dict[str, Array],
    padding_mask: Bool[Array, "B T"] | None = None,
    *,
    is_causal: bool = True,
    window: int | None = None,
) -> Seen:
    """Writes `new` (name -> [B, T, ...]) behind what the cache holds, but for what `padding_mask`
    says is no token.

    Query i of the call stands at its position of `next_positions`. With `is_causal` it sees
    positions up to its own, with `window` no further back than that many tokens.

    Raises ValueError where T new tokens can never fit. Where they do not fit behind what is
    there, which only a traced length can tell, nothing is written and `fits` is False.
    """
    start, (batch, t) = cache["length"], next(iter(new.values())).shape[:2]
    if padding_mask is not None and padding_mask.shape != (batch, t):
        raise ValueError(
            f"padding_mask {padding_mask.shape} says which of the new tokens are some: it must be "
            f"{(batch, t)}"
        )
    for name, a in new.items():
        if name not in cache:
            names = ", ".join(n for n in cache if n != "length")
            raise ValueError(
                f"the cache holds {names}, this order of contraction needs {name}; "
                "make it with init_cache(spec, ..., order=...) of the same order"
            )
        if cache[name].shape[0] != batch or cache[name].shape[2:] != a.shape[2:]:
            raise ValueError(
                f"the cache holds {name} of shape {cache[name].shape}, the new tokens have "
                f"{a.shape}; make it with init_cache(spec, batch={batch}, size=...)"
            )
    size = cache[next(iter(new))].shape[1]
    if t > size:
        raise ValueError(f"{t} tokens do not fit a cache of size {size}; make a larger one")
    # With a window, old tokens may give way: none that a query of this call still sees is lost.
    goes_round = window is not None and t + window <= size
    end = start + (t if padding_mask is None else jnp.sum(padding_mask, axis=1, dtype=jnp.int32))
    fits = jnp.asarray(goes_round) | (end <= size)
    position = next_positions(cache, t, padding_mask)
    kept = fits[..., None] if padding_mask is None else fits[..., None] & padding_mask
    # An index past the end is dropped: padding, and all where a full cache keeps what it holds.
    places = jnp.where(kept, position % size, size)
    rows = slice(None) if places.ndim == 1 else jnp.arange(batch)[:, None]
    held = {
        name: cache[name].at[rows, places].set(a.astype(cache[name].dtype), mode="drop")
        for name, a in new.items()
    }
    holds, position = held_positions(end - 1, size)[..., None, :], position[..., None]
    allowed = (holds >= 0) & jnp.ones((t, 1), bool)
    if is_causal:
        allowed = allowed & (holds <= position)
    if window is not None:
        allowed = allowed & (holds >= position - window)
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    return Seen(held, allowed, fits, cache | held | {"length": jnp.where(fits, end, start)})
