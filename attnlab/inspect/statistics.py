"""What a head looks at, in numbers: statistics of its probabilities, and how heads differ.

Letters as everywhere: L layers, B batch, N heads, T queries, S keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnlab.names import find


class Statistic(NamedTuple):
    """One number of a row p of probs, of the query at t. A new one is a row of `STATISTICS`."""

    unit: str
    formula: str
    of: Callable[..., tuple[Array, Any]]
    """(probs [L, B, N, T, S], rows) -> (value [L, B, N, T], the rows that have it [B, T])"""
    needs: str = ""
    """"one text": queries and keys number the same places; "tokens": what stands there, too."""


class Rows(NamedTuple):
    """What is known of the rows of probs."""

    seen: Array
    """[B, T, S] True where no mask hides this key"""
    ask: Any
    """[B, T] tokens of the queries, or None"""
    keys: Any
    """[B, S] tokens of the keys, or None"""


def _entropy(probs: Array, rows: Rows) -> tuple[Array, Any]:
    return -jnp.sum(jax.scipy.special.xlogy(probs, jnp.where(probs > 0, probs, 1)), axis=-1), True


def _distance(probs: Array, rows: Rows) -> tuple[Array, Any]:
    return jnp.sum(probs * jnp.abs(_ahead(rows.seen)), axis=-1), True


def _mass(where: Callable[[Rows], Array]) -> Callable[..., tuple[Array, Any]]:
    """The mass on the keys of `where`, of the rows that see one of them."""

    def of(probs: Array, rows: Rows) -> tuple[Array, Any]:
        target = where(rows) & rows.seen
        return jnp.sum(jnp.where(target[:, None], probs, 0), axis=-1), jnp.any(target, axis=-1)

    return of


def _ahead(seen: Array) -> Array:
    """[T, S] place of the key - place of the query"""
    return jnp.arange(seen.shape[2]) - jnp.arange(seen.shape[1])[:, None]


def _same(rows: Rows) -> Array:
    return (rows.keys[:, None, :] == rows.ask[:, :, None]) & (_ahead(rows.seen) != 0)


def _after_same(rows: Rows) -> Array:
    before = jnp.roll(rows.keys, 1, axis=1)[:, None, :]
    ahead = _ahead(rows.seen)
    return (before == rows.ask[:, :, None]) & (jnp.arange(before.shape[2]) > 0) & (ahead != 1)


STATISTICS = {
    "entropy": Statistic("nats", "-sum_s p_s ln p_s", _entropy),
    "distance": Statistic("tokens", "sum_s p_s |s - t|", _distance, "one text"),
    "previous": Statistic(
        "mass", "p at s = t - 1", _mass(lambda rows: _ahead(rows.seen) == -1), "one text"
    ),
    "diagonal": Statistic(
        "mass", "p at s = t", _mass(lambda rows: _ahead(rows.seen) == 0), "one text"
    ),
    # A sink (Xiao et al. 2023, arXiv 2309.17453).
    "first": Statistic(
        "mass", "p at s = 0", _mass(lambda rows: jnp.arange(rows.seen.shape[2]) == 0)
    ),
    "same": Statistic("mass", "sum of p_s, token_s = token_t and s != t", _mass(_same), "tokens"),
    # What follows an equal token (Olsson et al. 2022, arXiv 2209.11895).
    "induction": Statistic(
        "mass", "sum of p_s, token_(s-1) = token_t and s != t + 1", _mass(_after_same), "tokens"
    ),
}
"""Name -> what is averaged over the rows of each head."""


def head_statistics(
    probs: Float[Array, "L B N T S"],
    tokens: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    *,
    key_tokens: Int[Array, "B S"] | None = None,
    seen: Bool[Array, "*B T S"] | None = None,
) -> dict[str, Float[Array, "L N"]]:
    """name of `STATISTICS` -> [L, N]: unit and formula stand there, p is the row of query t.

    Each is the mean over the rows of all texts that have a choice, which see two keys at least,
    and, for a mass, that see such a key: the row of the first token of a decoder has none. NaN
    where no row has: `same` in a text in which nothing comes twice. `mask` [B, T], True = count
    this query, leaves padding out. `tokens` are those of the queries, `key_tokens` those of the
    keys (default: the same). Without tokens, and where S is not T, those that need them are left
    out. `seen` True = no mask hides the key; by default the keys that some head of some layer
    gives any mass. All is pure and runs under jit.

    >>> back = jnp.eye(4, k=-1).at[0, 0].set(1)[None, None, None]  # one head, looks one token back
    >>> found = head_statistics(back, jnp.array([[7, 8, 9, 7]]), seen=jnp.tri(4, dtype=bool))
    >>> {name: float(a[0, 0]) for name, a in found.items() if name in ("distance", "same")}
    {'distance': 1.0, 'same': 0.0}
    """
    if probs.ndim != 5:
        raise ValueError(f"probs {probs.shape} must be [L, B, N, T, S], as `show` gives them")
    shape = (probs.shape[1], *probs.shape[3:])
    keys: Any = tokens if key_tokens is None else key_tokens
    for name, a, size in (
        ("tokens", tokens, shape[:2]),
        ("mask", mask, shape[:2]),
        ("key_tokens", key_tokens, shape[::2]),
    ):
        if a is not None and jnp.shape(a) != size:
            raise ValueError(f"{name} {jnp.shape(a)} must be {size}, as probs {probs.shape}")
    known = {""} | ({"one text"} if shape[1] == shape[2] else set())
    if tokens is not None and jnp.shape(keys)[1] == shape[2]:
        known |= {"tokens"}
    if not jnp.issubdtype(probs.dtype, jnp.floating) or jnp.finfo(probs.dtype).bits < 32:
        probs = probs.astype(jnp.float32)
    as_array = lambda a: None if a is None else jnp.asarray(a)
    if seen is None:
        seen = jnp.any(probs != 0, axis=(0, 2))
    rows = Rows(
        jnp.broadcast_to(seen, shape[:1] + probs.shape[3:]), as_array(tokens), as_array(keys)
    )
    counted = jnp.sum(rows.seen, axis=-1) > 1
    counted = counted if mask is None else counted & jnp.asarray(mask)

    def mean(row: Statistic) -> Array:
        value, has = row.of(probs, rows)
        used = (counted & has)[:, None]
        return jnp.sum(jnp.where(used, value, 0), axis=(1, 3)) / jnp.sum(used)

    return {name: mean(row) for name, row in STATISTICS.items() if row.needs in known}


def uniform(probs: Float[Array, "L B N T S"]) -> Float[Array, "L B N T S"]:
    """Heads that look at all they see alike: what chance gives each statistic.

    >>> uniform(jnp.array([[[[[0.9, 0.0, 0.1]]]]]))[0, 0, 0].tolist()
    [[0.5, 0.0, 0.5]]
    """
    seen = jnp.any(probs != 0, axis=(0, 2), keepdims=True).astype(probs.dtype)
    return jnp.broadcast_to(seen / jnp.maximum(jnp.sum(seen, -1, keepdims=True), 1), probs.shape)


TEXTS = {"probs": (-1, -1), "cross.probs": (-1, 0), "encoder.probs": (0, 0)}
"""Name in `observe.NAMES` -> which of the texts of a call ask, and which are looked at."""


def beside_baselines(
    config: Any,
    params: Any,
    *texts: Int[Array, "B T"],
    key: Array,
    name: str = "probs",
    mask: Bool[Array, "B T"] | None = None,
    **options: Any,
) -> dict[str, dict[str, Float[Array, "L N"]]]:
    """`head_statistics` of a model, and the same where nothing was learnt and nothing stands in
    order: a number means something by how far it is from these.

    Returns {"model", "fresh", "shuffled", "uniform"} -> statistics: of these weights; of weights
    drawn with `key`, in the same text; of these weights in a text whose tokens (those that `mask`
    counts) changed places; of heads that look at all they see alike. `texts` are what the model
    reads (source and target), `name` the probs that are looked at ("probs", "cross.probs",
    "encoder.probs"), `mask` counts queries, `options` go into the call (padding_mask, ...).
    """
    find("probs", name, TEXTS)
    if jnp.issubdtype(jnp.asarray(texts[0]).dtype, jnp.floating):
        raise ValueError("mixtures of words cannot be shuffled; pass ids of tokens")
    model, (ask, keys) = config.build(), TEXTS[name]
    # Behind the keys of its own text a merged decoder has those of the source.
    of_keys = lambda texts: (
        jnp.concatenate([texts[-1], texts[0]], axis=1)
        if config.cross == "merged" and name == "probs"
        else texts[keys]
    )
    for_fresh, for_text = jax.random.split(key)

    @jax.jit
    def run(params: Any, texts: tuple, options: Any) -> tuple[Any, Any]:
        probs = model.apply({"params": params}, *texts, show=(name,), **options)[-1][name]
        found = lambda probs: head_statistics(probs, texts[ask], mask, key_tokens=of_keys(texts))
        return found(probs), found(uniform(probs))

    texts = tuple(map(jnp.asarray, texts))
    fresh = jax.jit(model.init)(for_fresh, *texts)["params"]
    real = [jnp.ones(a.shape, bool) for a in texts]
    if mask is not None:
        real[ask] = jnp.asarray(mask)
    mixed = tuple(
        shuffled(jax.random.fold_in(for_text, i), a, m)
        for i, (a, m) in enumerate(zip(texts, real, strict=True))
    )
    own, alike = run(params, texts, options)
    return {
        "model": own,
        "fresh": run(fresh, texts, options)[0],
        "shuffled": run(params, mixed, options)[0],
        "uniform": alike,
    }


def shuffled(
    key: Array, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
) -> Int[Array, "B T"]:
    """The tokens of each text in another order; those outside of `mask` stay where they are.

    >>> mask = jnp.array([[True, True, True, False]])
    >>> mixed = shuffled(jax.random.key(1), jnp.array([[4, 5, 6, 0]]), mask)
    >>> sorted(mixed[0, :3].tolist()), int(mixed[0, 3])
    ([4, 5, 6], 0)
    """
    tokens = jnp.asarray(tokens)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    places = jnp.argsort(~mask, axis=1, stable=True)  # those that count first, in their order
    drawn = jnp.where(mask, jax.random.uniform(key, tokens.shape), 2)
    order = jnp.argsort(drawn, axis=1, stable=True)
    rows = jnp.arange(tokens.shape[0])[:, None]
    return tokens.at[rows, places].set(jnp.take_along_axis(tokens, order, axis=1))
