"""How far apart the heads of a model are, and how to start them alike."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.model.config import ModelConfig
from attnlab.sharing.plan import MIXTURE_SUFFIX

LETTERS = "qkvo"
GOES_WITH = {
    "extra_k": "k",
    "extra_v": "v",
    "sink": "qk",
    "head_gate": LETTERS,
    "gate": LETTERS,
}
"""What stands beside the maps -> the letters that make it equal too."""


def head_axes(config: ModelConfig, params: Any) -> list[tuple[str, Array, int | None]]:
    """(name, weight, the axis that numbers its heads, from the end) of every leaf, in the order of
    `jax.tree.leaves`; None where it has no such axis: all but the maps of heads, those that heads
    share, and those of a single head."""
    kinds = {name: c.heads.maps for name, c in config.stacks.items()}

    def of(path: Any, a: Any) -> tuple[str, Array, int | None]:
        names = [str(getattr(key, "key", key)) for key in path]
        name, maps = names[-1], kinds.get(names[0]) or next(iter(kinds.values()))
        others = {"ffn", "delta"} & set(names) or any(n.endswith(MIXTURE_SUFFIX) for n in names)
        axes = maps[name].axes if name in maps and not others else ""
        found = [i - len(axes) for i, letter in enumerate(axes) if letter in "NK"]
        return name, a, found[0] if found and a.shape[found[0]] > 1 else None

    return [of(path, a) for path, a in jax.tree_util.tree_flatten_with_path(params)[0]]


def same_heads(
    config: ModelConfig, params: Any, maps: str, *, noise: float = 0.0, key: Array | None = None
) -> Any:
    """`params` with the first head in the place of every head, in the maps whose names are made of
    the letters `maps`, and what is named after those (a bias, the part that positions turn): "qkvo"
    makes heads equal, "qk" gives them equal scores.
    What stands beside the maps goes with them: extra keys with k, their values with v, sinks where
    scores are equal (q and k), gates where heads are (all of "qkvo").

    With `noise` e each of these weights w becomes w + e s n, s the root mean square of the first
    head's, n standard normal of `key`. Raises ValueError where no map of heads is made of these
    letters.

    >>> config = ModelConfig(width=4, num_heads=2, num_layers=1, vocab_size=5, max_len=3)
    >>> params = config.build().init(jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    >>> alike = same_heads(config, params, "qkvo")
    >>> float(heads_apart(config, params)) > 0.5, float(heads_apart(config, alike))
    (True, 0.0)
    """
    leaves = head_axes(config, params)
    chosen = lambda name: set(GOES_WITH.get(name, name.split("_")[0])) <= set(maps)
    if not any(axis is not None and chosen(name) for name, _, axis in leaves):
        known = sorted({name for name, _, axis in leaves if axis is not None})
        raise ValueError(
            f"no map of several heads is made of the letters {maps!r}; the model has "
            f"{', '.join(known) or 'one head'}"
        )
    new = []
    for number, (name, a, axis) in enumerate(leaves):
        if axis is not None and chosen(name):
            first = jax.lax.index_in_dim(a, 0, axis % a.ndim)
            a = jnp.broadcast_to(first, a.shape)
            if noise:
                assert key is not None
                drawn = jax.random.normal(jax.random.fold_in(key, number), a.shape)
                a = a + noise * jnp.sqrt(jnp.mean(jnp.square(first))) * drawn
        new.append(a)
    return jax.tree.unflatten(jax.tree.structure(params), new)


def heads_apart(config: ModelConfig, params: Any) -> Array:
    """sqrt(sum_n |w_n - w_1|^2 / (N - 1)) / sqrt(2 sum_n |w_n|^2 / N) over the maps of all heads n.

    0 where every head is the first, to the bit; about 1 for heads drawn apart; 0 of one head.
    """
    apart = whole = jnp.zeros(())
    for _, a, axis in head_axes(config, params):
        if axis is not None:
            first = jax.lax.index_in_dim(a, 0, axis % a.ndim)
            apart = apart + jnp.sum(jnp.square(a - first)) / (a.shape[axis] - 1)
            whole = whole + 2 * jnp.sum(jnp.square(a)) / a.shape[axis]
    return jnp.sqrt(apart / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny))


def least_moved(begun: Any, params: Any) -> Array:
    """The root mean square of the change since the start, of the array that changed least."""
    moved = lambda a, b: jnp.sqrt(jnp.mean(jnp.square(b - a)))
    return jnp.min(jnp.stack(jax.tree.leaves(jax.tree.map(moved, begun, params))))
