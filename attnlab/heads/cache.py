"""The cache of decoding: what a layout keeps of past tokens.

A cache is a dict of arrays [B, size, ...] and the number of tokens seen so far, `length`; a call
takes a cache and returns a longer one. Token p is stored at index p mod size, so with a sliding
window a small cache is reused in a ring; without one it ends when it is full. Where batch rows have
lengths of their own, `length` is [B]: padding is never kept, so a row holds what it would hold
alone.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from attnlab.heads.cost import cache_shapes, form
from attnlab.heads.layout import Layout

Cache = dict[str, Array]


def init_cache(
    layout: Layout,
    batch: int,
    size: int,
    dtype: DTypeLike = jnp.float32,
    *,
    order: str = "factored",
    rotary: bool = False,
) -> Cache:
    """An empty cache of `size` tokens.

    Args:
      layout: the heads; the cache holds what its `project_kv` returns.
      batch, size: B, and the number of tokens that fit.
      dtype: of the entries.
      order: the form of the layout that will decode, as in `multi_head_attention`: the cache of
        the form "absorbed" holds the inputs.
      rotary: keys are rotated, so that they differ from values they are tied to.

    Raises:
      ValueError: query, key and value inputs of different widths, which cannot be one text; or a
        size below 1.

    >>> from attnlab.heads import Absorbed
    >>> cache = init_cache(Absorbed(width=6, num_heads=2), batch=1, size=4)
    >>> {name: a.shape for name, a in cache.items()}
    {'x': (1, 4, 6), 'length': ()}
    """
    if batch < 1 or size < 1:
        raise ValueError(f"a cache of batch {batch} and size {size}: both must be at least 1")
    layout = form(layout, order)
    widths = layout.input_widths
    if len(set(widths)) > 1:
        raise ValueError(f"width, key_width, value_width {widths} must be equal for a cache")
    shapes = cache_shapes(layout, rotary=rotary)
    arrays = {name: jnp.zeros((batch, size, *shape), dtype) for name, shape in shapes.items()}
    return arrays | {"length": jnp.zeros((), jnp.int32)}


def extend(
    cache: Cache,
    new: dict[str, Array],
    padding_mask: Bool[Array, "B T"] | None = None,
    *,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
) -> tuple[Cache, Bool[Array, "*B1 T S"], Bool[Array, "*B"]]:
    """Writes `new` (name -> [B, T, ...]) after the tokens of the cache, without padding tokens.

    Query i of the call is at its position of `next_positions`. With `is_causal` it attends to
    positions up to its own, with a `window` (left, right) only to those that near.

    Returns:
      The cache with the new tokens; which of its entries each query may attend to, [T, S], or
      [B, 1, T, S] where rows have lengths of their own; and whether the tokens fit, False where the
      cache was full.

    Raises:
      ValueError: T is larger than the cache. If the tokens do not fit after those that are there,
        which depends on a traced length, nothing is written and `fits` is False.
    """
    start, (batch, t) = cache["length"], next(iter(new.values())).shape[:2]
    held, made = ({n: a.shape for n, a in one.items() if n != "length"} for one in (cache, new))
    if {n: (s[0], s[2:]) for n, s in held.items()} != {n: (s[0], s[2:]) for n, s in made.items()}:
        raise ValueError(
            f"the cache holds {held}, the new tokens have {made}; make it with "
            f"init_cache(layout, batch={batch}, size=...)"
        )
    size = cache[next(iter(new))].shape[1]
    if t > size:
        raise ValueError(f"{t} tokens do not fit a cache of size {size}; make a larger one")
    # With a window, old tokens may be overwritten: none that a query of this call attends to.
    is_ring = window is not None and t + window[0] <= size
    end = start + (t if padding_mask is None else jnp.sum(padding_mask, axis=1, dtype=jnp.int32))
    fits = jnp.asarray(is_ring) | (end <= size)
    position = next_positions(cache, t, padding_mask)
    kept = fits[..., None] if padding_mask is None else fits[..., None] & padding_mask
    # An index past the end is dropped: padding, and all where a full cache keeps what it holds.
    indices = jnp.where(kept, position % size, size)
    rows = slice(None) if indices.ndim == 1 else jnp.arange(batch)[:, None]
    entries = {
        name: cache[name].at[rows, indices].set(a.astype(cache[name].dtype), mode="drop")
        for name, a in new.items()
    }
    holds, position = held_positions(end - 1, size)[..., None, :], position[..., None]
    allowed = (holds >= 0) & jnp.ones((t, 1), bool)
    if is_causal:
        allowed = allowed & (holds <= position)
    if window is not None:
        left, right = (min(width, size) for width in window)  # no int32 overflow
        allowed = allowed & (holds >= position - left) & (holds <= position + right)
    allowed = allowed if allowed.ndim == 2 else allowed[:, None]
    return cache | entries | {"length": jnp.where(fits, end, start)}, allowed, fits


def next_positions(
    cache: Cache, num_tokens: int, padding_mask: Bool[Array, "B T"] | None = None
) -> Int[Array, "*B T"]:
    """Positions of the next tokens: [T], or [B, T] where rows have lengths of their own. Padding is
    not counted: it has the position of the token before it.

    >>> cache, real = {"length": jnp.array(2)}, jnp.array([[False, True, True], [True] * 3])
    >>> next_positions(cache, 3).tolist(), next_positions(cache, 3, real).tolist()
    ([2, 3, 4], [[1, 2, 3], [2, 3, 4]])
    """
    order = jnp.arange(num_tokens)
    if padding_mask is not None:
        order = jnp.cumsum(padding_mask, axis=1, dtype=jnp.int32) - 1
    return jnp.maximum(cache["length"][..., None] + order, 0)


def held_positions(last: Int[Array, "*B"] | int, size: int) -> Int[Array, "*B S"]:
    """The latest position p <= last with p mod size = index, for every index; negative where
    there is none yet.

    >>> held_positions(4, 3).tolist(), held_positions(1, 3).tolist()
    ([3, 4, 2], [0, 1, -1])
    """
    last = jnp.asarray(last)[..., None]
    return last - (last - jnp.arange(size)) % size


def with_own_lengths(cache: Cache, batch: int) -> Cache:
    """The cache of a model with a length for each row, [L, B].

    >>> with_own_lengths({"length": jnp.array([4, 4])}, 3)["length"].tolist()
    [[4, 4, 4], [4, 4, 4]]
    """
    length = cache["length"]
    each = jnp.broadcast_to(length.reshape(length.shape[0], -1), (length.shape[0], batch))
    return cache | {"length": each}


def stacked_size(cache: Cache) -> int:
    """The number of tokens that fit the cache of a model, whose arrays are [L, B, size, ...].

    >>> stacked_size({"length": jnp.zeros(2, int), "x": jnp.zeros((2, 1, 5, 6))})
    5
    """
    return next(a.shape[2] for name, a in cache.items() if name != "length")
