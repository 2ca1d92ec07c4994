"""Statistics of the attention probabilities of heads.

Axes: L layers, B batch, N heads, T queries, S keys.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.attention.call import checked_padding_mask
from attnlab.interpret.similarity import entropy
from attnlab.models.config import ModelConfig
from attnlab.models.forward import NO_INPUTS, ModelInputs, check_inputs, run_model
from attnlab.names import lookup
from attnlab.sharing import Params


class Rows(NamedTuple):
    """The queries and keys of the rows of probs."""

    visible: Bool[Array, "L B T S"]
    """True where no mask hides the key."""
    tokens: Int[Array, "B T"]
    key_tokens: Int[Array, "B S"]
    same_text: bool
    """Are keys and queries the same tokens?"""

    @property
    def offsets(self) -> Int[Array, "T S"]:
        """Position of the key minus position of the query."""
        return jnp.arange(self.visible.shape[3]) - jnp.arange(self.visible.shape[2])[:, None]


Value: TypeAlias = Callable[[Array, Rows], tuple[Array, ArrayLike]]
"""(probs [L, B, N, T, S], rows) -> (value [L, B, N, T], queries that have it [L, B, T])"""


class Statistic(NamedTuple):
    """One number of a row p of probs, of the query at position t."""

    unit: str
    """One of "nats", "tokens" and "mass" (a sum of probabilities)."""
    formula: str
    """p_s is the probability of key s, t the position of the query."""
    value: Value
    """(probs [L, B, N, T, S], rows) -> (value [L, B, N, T], queries that have it [L, B, T])"""
    needs: Literal["", "square", "tokens"] = ""
    """"square": queries and keys are the same tokens; "tokens": the tokens must be known."""


def _entropy(probs: Array, rows: Rows) -> tuple[Array, ArrayLike]:
    return entropy(probs), True


def _distance(probs: Array, rows: Rows) -> tuple[Array, ArrayLike]:
    return jnp.sum(probs * jnp.abs(rows.offsets), axis=-1), True


def _mass(target: Callable[[Rows], Array]) -> Value:
    """The probability of the target keys, for queries with a visible one."""

    def value(probs: Array, rows: Rows) -> tuple[Array, ArrayLike]:
        keys = target(rows) & rows.visible
        return jnp.sum(jnp.where(keys[:, :, None], probs, 0), axis=-1), jnp.any(keys, axis=-1)

    return value


def _duplicate(rows: Rows) -> Array:
    is_target = rows.key_tokens[:, None, :] == rows.tokens[:, :, None]
    return is_target & (rows.offsets != 0) if rows.same_text else is_target


def _induction(rows: Rows) -> Array:
    before = jnp.roll(rows.key_tokens, 1, axis=1)[:, None, :]
    is_target = (before == rows.tokens[:, :, None]) & (jnp.arange(before.shape[2]) > 0)
    return is_target & (rows.offsets != 1) if rows.same_text else is_target


STATISTICS = {
    "entropy": Statistic("nats", "-sum_s p_s ln p_s", _entropy),
    "distance": Statistic("tokens", "sum_s p_s |s - t|", _distance, "square"),
    "previous_token": Statistic(
        "mass", "p at s = t - 1", _mass(lambda rows: rows.offsets == -1), "square"
    ),
    "diagonal": Statistic("mass", "p at s = t", _mass(lambda rows: rows.offsets == 0), "square"),
    # Attention sink (Xiao et al. 2023, arXiv 2309.17453).
    "first_token": Statistic(
        "mass", "p at s = 0", _mass(lambda rows: jnp.arange(rows.visible.shape[3]) == 0)
    ),
    "duplicate_token": Statistic(
        "mass", "sum of p_s, token_s = token_t and s != t", _mass(_duplicate), "tokens"
    ),
    # Prefix matching (Olsson et al. 2022, arXiv 2209.11895).
    "induction": Statistic(
        "mass", "sum of p_s, token_(s-1) = token_t and s != t + 1", _mass(_induction), "tokens"
    ),
}
"""Name -> statistic that `head_statistics` averages over the rows of each head."""


def head_statistics(
    probs: Float[ArrayLike, "L B N T S"],
    tokens: Int[ArrayLike, "B T"] | None = None,
    mask: Bool[ArrayLike, "B T"] | None = None,
    *,
    key_tokens: Int[ArrayLike, "B S"] | None = None,
    visible: Bool[ArrayLike, "*B T S"] | None = None,
    same_text: bool = True,
) -> dict[str, Float[Array, "L N"]]:
    """Statistics of every head, each the mean over the queries of all texts.

    Queries that see fewer than two keys are not counted and, for a mass, those that see no target.
    Where the keys are another text, no position of a key corresponds to that of a query: statistics
    of the two are left out, and the masses of tokens leave out no key.

    Args:
      probs: captured "probs".
      tokens: of the queries; without them the statistics that need tokens are left out.
      mask: True = count this query.
      key_tokens: of the keys; default `tokens`.
      visible: True = no mask hides the key, of all layers or [L, B, T, S]; default: keys to which
        some head of the layer gives any probability.
      same_text: keys and queries are the same tokens, if there are as many; False for
        cross-attention.

    Returns:
      Name of `STATISTICS` -> value; NaN where no query has it, such as "duplicate_token" in a text
      without duplicates.

    Raises:
      ValueError: shapes that do not fit.

    >>> back = jnp.eye(4, k=-1).at[0, 0].set(1)[None, None, None]  # attends to the previous token
    >>> found = head_statistics(back, jnp.array([[7, 8, 9, 7]]), visible=jnp.tri(4, dtype=bool))
    >>> {name: float(found[name][0, 0]) for name in ("distance", "duplicate_token")}
    {'distance': 1.0, 'duplicate_token': 0.0}
    """
    probs = jnp.asarray(probs)
    if probs.ndim != 5:
        raise ValueError(f"probs {probs.shape} must be [L, B, N, T, S], as `capture` returns them")
    layers, batch, _, queries, keys = probs.shape
    given = ("tokens", tokens, queries), ("mask", mask, queries), ("key_tokens", key_tokens, keys)
    for name, a, size in given:
        if a is not None and jnp.shape(a) != (batch, size):
            raise ValueError(
                f"{name} {jnp.shape(a)} must be {(batch, size)}, as probs {probs.shape}"
            )
    key_tokens = tokens if key_tokens is None else key_tokens
    same_text = same_text and queries == keys
    known = {""} | ({"square"} if same_text else set())
    if tokens is not None and key_tokens is not None and jnp.shape(key_tokens)[1] == keys:
        known |= {"tokens"}
    probs = probs.astype(jnp.promote_types(probs.dtype, jnp.float32))
    if visible is None:
        visible = jnp.any(probs != 0, axis=2)
    of_queries, of_keys = (
        jnp.zeros((batch, 1), int) if a is None else jnp.asarray(a) for a in (tokens, key_tokens)
    )
    visible = jnp.broadcast_to(visible, (layers, batch, queries, keys))
    rows = Rows(visible, of_queries, of_keys, same_text)
    counted = jnp.sum(rows.visible, axis=-1) > 1
    counted = counted if mask is None else counted & jnp.asarray(mask).astype(bool)

    def mean(statistic: Statistic) -> Array:
        value, has = statistic.value(probs, rows)
        used = (counted & has)[:, :, None]
        return jnp.sum(jnp.where(used, value, 0), axis=(1, 3)) / jnp.sum(used, axis=(1, 3))

    return {name: mean(one) for name, one in STATISTICS.items() if one.needs in known}


def uniform_attention(probs: Float[Array, "L B N T S"]) -> Float[Array, "L B N T S"]:
    """Equal probability for every key visible in the layer: the chance level of each statistic.

    >>> uniform_attention(jnp.array([[[[[0.9, 0.0, 0.1]]]]]))[0, 0, 0].tolist()
    [[0.5, 0.0, 0.5]]
    """
    visible = jnp.any(probs != 0, axis=2, keepdims=True).astype(probs.dtype)
    count = jnp.maximum(jnp.sum(visible, -1, keepdims=True), 1)
    return jnp.broadcast_to(visible / count, probs.shape)


ProbsName: TypeAlias = Literal["probs", "cross.probs", "encoder.probs"]


def stacked_probs(captured: Mapping[str, Array], name: ProbsName) -> Float[Array, "L B N T S"]:
    """The captured probs of all layers. Raises ValueError where layers differ in their shape."""
    if name not in captured:
        raise ValueError(
            f"layer types have {name!r} of different shapes, which cannot be stacked; capture "
            "them and read each layer's by attnlab.models.captured_per_layer"
        )
    return captured[name]


def statistics_with_baselines(
    config: ModelConfig,
    params: Params,
    tokens: ArrayLike,
    inputs: ModelInputs = NO_INPUTS,
    *,
    key: Array,
    name: ProbsName = "probs",
    mask: Bool[ArrayLike, "B T"] | None = None,
) -> dict[str, dict[str, Float[Array, "L N"]]]:
    """`head_statistics` of a model and of three baselines to compare them with.

    Args:
      config, params: of the model.
      tokens: [B, T].
      inputs: source, masks, ... Padding is neither counted nor shuffled.
      key: random key of the initial parameters and of the order of tokens.
      name: which attention.
      mask: [B, T] or, for the encoder, [B, S], True = count this query.

    Returns:
      "model", "initial" (untrained parameters), "shuffled" (the tokens that are not padding, and
      that `mask` counts, in random order) and "uniform" (`uniform_attention`) -> statistics.

    Raises:
      ValueError: tokens that are no ids; packed texts; an attention that the model does not have,
        or that differs in shape between layers; or inputs or a mask that do not fit.

    >>> config = ModelConfig(width=8, num_layers=2, vocab_size=5)
    >>> tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    >>> params = jax.jit(config.build().init)(jax.random.key(0), tokens)["params"]
    >>> found = statistics_with_baselines(config, params, tokens, key=jax.random.key(1))
    >>> {name: statistics["entropy"].shape for name, statistics in found.items()}
    {'model': (2, 4), 'initial': (2, 4), 'shuffled': (2, 4), 'uniform': (2, 4)}
    """
    probs_of = {"probs": (-1, -1), "cross.probs": (-1, 0), "encoder.probs": (0, 0)}
    of_queries, of_keys = lookup(MappingProxyType(probs_of), name, what="probs")
    texts = [jnp.asarray(a) for a in (inputs.source, tokens) if a is not None]
    if jnp.issubdtype(texts[0].dtype, jnp.floating):
        raise ValueError("mixtures of tokens cannot be shuffled; pass token ids")
    if inputs.segments is not None:
        raise ValueError("segments: packed texts are not shuffled; pass one text in each row")
    known = check_inputs(config, tokens, inputs)[1]
    masks = [known.source_padding_mask, known.padding_mask][-len(texts) :]
    counted = checked_padding_mask("mask", mask, texts[of_queries])
    if counted is not None:
        is_token = masks[of_queries]
        masks[of_queries] = counted if is_token is None else counted & is_token

    @jax.jit
    def run(params: Params, texts: list[Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        source = texts[0] if len(texts) > 1 else None
        call = dataclasses.replace(inputs, source=source, capture=(name,))
        probs = stacked_probs(run_model(params, texts[-1], config, call).captured, name)

        def statistics(probs: Array) -> dict[str, Array]:
            return head_statistics(
                probs, texts[of_queries], masks[of_queries], key_tokens=texts[of_keys],
                same_text=of_queries == of_keys,
            )  # fmt: skip

        return statistics(probs), statistics(uniform_attention(probs))

    for_params, for_text = jax.random.split(key)
    source = {} if len(texts) == 1 else {"source": texts[0]}
    initial = jax.jit(config.build().init)(for_params, texts[-1], **source)["params"]
    mixed = [
        shuffle_tokens(jax.random.fold_in(for_text, i), a, m)
        for i, (a, m) in enumerate(zip(texts, masks, strict=True))
    ]
    model, uniform = run(params, texts)
    return {
        "model": model,
        "initial": run(initial, texts)[0],
        "shuffled": run(params, mixed)[0],
        "uniform": uniform,
    }


def shuffle_tokens(
    key: Array, tokens: Int[ArrayLike, "B T"], mask: Bool[ArrayLike, "B T"] | None = None
) -> Int[Array, "B T"]:
    """The tokens of each text in random order; those outside of `mask` stay where they are.

    Args:
      key: random key.
      tokens: ids.
      mask: True = this token may move; None: all.

    >>> mask = jnp.array([[True, True, True, False]])
    >>> mixed = shuffle_tokens(jax.random.key(1), jnp.array([[4, 5, 6, 0]]), mask)
    >>> sorted(mixed[0, :3].tolist()), int(mixed[0, 3])
    ([4, 5, 6], 0)
    """
    tokens = jnp.asarray(tokens)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    positions = jnp.argsort(~mask, axis=1, stable=True)  # those that count first, in their order
    drawn = jnp.where(mask, jax.random.uniform(key, tokens.shape), 2)
    order = jnp.argsort(drawn, axis=1, stable=True)
    rows = jnp.arange(tokens.shape[0])[:, None]
    return tokens.at[rows, positions].set(jnp.take_along_axis(tokens, order, axis=1))
