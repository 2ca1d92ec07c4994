"""Objectives on one text: the next token, masked tokens, spans that were removed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.data.dataset import BYTES, DataSizes, DeviceBatch
from attnlab.training.objectives.objective import Example, Inputs, Objective, bits

MASK_RATE = 0.15
"""Of masked_lm, whose only special token is the mask."""
NUM_SENTINELS = 100
"""Special tokens of span_corruption; its start token is the next one."""
NOISE_DENSITY = 0.15
MEAN_SPAN = 3


def causal_lm(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """Predict every next token of `tokens` [B, T + 1].

    Of packed texts, the `segments` [B, T + 1] of the batch, the first token of each is not
    predicted, and none attends to another.

    >>> causal_lm({"tokens": jnp.array([[5, 6, 7]])}, jax.random.key(0)).inputs["tokens"].tolist()
    [[5, 6]]
    """
    text, valid = _text(batch)
    inputs: Inputs = {"tokens": batch["tokens"][:, :-1]}
    if "segments" in batch:
        inputs["segments"] = batch["segments"][:, :-1]
    return Example(inputs, text, valid.astype(jnp.float32), batch.get("bytes"))


def masked_lm(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """Predict 15 % of the tokens: 80 % of them masked, 10 % random, 10 % left as they are.

    Devlin et al. 2018, section 3.1, arXiv 1810.04805. The first token of the window is not used,
    the first of each packed text not predicted, so that all objectives predict the same text.

    >>> example = masked_lm({"tokens": jnp.zeros((4, 201), int)}, jax.random.key(0))
    >>> 0.1 < example.weights.mean() < 0.2
    Array(True, dtype=bool)
    """
    (targets, valid), mask = _text(batch), sizes.vocab_size
    chosen_key, action_key, random_key = jax.random.split(key, 3)
    is_chosen = jax.random.bernoulli(chosen_key, MASK_RATE, targets.shape)
    action = jax.random.uniform(action_key, targets.shape)
    random = jax.random.randint(random_key, targets.shape, 0, mask, targets.dtype)
    corrupted = jnp.where(action < 0.8, mask, jnp.where(action < 0.9, random, targets))
    inputs: Inputs = {"tokens": jnp.where(is_chosen, corrupted, targets)}
    if "segments" in batch:
        inputs["segments"] = batch["segments"][:, 1:]
    weights = (is_chosen & valid).astype(jnp.float32)
    return Example(inputs, targets, weights, batch.get("bytes"))


def span_counts(length: int) -> tuple[int, int]:
    """(number of removed tokens, number of spans) of a text of `length` tokens.

    removed = round(0.15 length) and spans = round(removed / 3), both at least 1; halves round to
    even. Raises ValueError where no token would remain or the sentinels do not suffice (one for
    each span and one for the end).

    >>> span_counts(64)
    (10, 3)
    """
    if length < 2:
        raise ValueError(f"span_corruption needs windows of 2 tokens at least, not {length}")
    removed = max(round(length * NOISE_DENSITY), 1)
    spans = max(round(removed / MEAN_SPAN), 1)
    if spans + 1 > NUM_SENTINELS:
        raise ValueError(
            f"span_corruption of windows of {length} tokens needs {spans + 1} sentinels, there are "
            f"{NUM_SENTINELS}; use a shorter length (1,990 is the longest)"
        )
    return removed, spans


def span_corruption(batch: DeviceBatch, key: Array, /, sizes: DataSizes = BYTES) -> Example:
    """Predict the spans that were removed from a text (T5; Raffel et al. 2020, section 3.1.4,
    arXiv 1910.10683): 15 % of the tokens in spans of 3 on average.

    The source is the text with span k replaced by sentinel k; the targets are sentinel 0, the
    tokens of span 0, sentinel 1, ..., and a last sentinel; the decoder reads the start token and
    the targets but the last. Of a vocabulary of V tokens (256 bytes) sentinel k is V + k, the start
    token V + 100.

    The numbers of tokens and spans that are removed (`span_counts`), and with them all lengths,
    depend on T alone: the source has T - removed + spans tokens, the target removed + spans + 1. As
    in T5's code, the lengths of the spans and of the kept pieces are each drawn uniformly from all
    ways to write their sum as that many numbers of at least 1; a text begins with a kept piece and
    ends with a span. A target counts where the token that it stands for is valid: a sentinel stands
    for the first token of what it replaces, the last sentinel for the last token of the text.

    >>> text = jnp.arange(ord("`"), ord("`") + 10)[None]
    >>> example = span_corruption({"tokens": text}, jax.random.key(0))
    >>> example.inputs["source"].tolist()
    [[97, 98, 99, 100, 101, 102, 103, 104, 256]]
    >>> example.targets.tolist(), example.inputs["tokens"].tolist()
    ([[256, 105, 257]], [[356, 256, 105]])
    """
    if "segments" in batch:
        raise ValueError("span_corruption cuts windows of one text; set data.pack=False")
    text, valid = _text(batch)
    rows, length = text.shape
    first = sizes.vocab_size
    removed, spans = span_counts(length)
    is_removed = _random_spans(key, rows, length, removed, spans)
    source, _ = _replace_runs(text, valid, is_removed, length - removed + spans, first)
    targets, counts = _replace_runs(text, valid, ~is_removed, removed + spans, first)
    last = jnp.full((rows, 1), first + spans, text.dtype)
    start = jnp.full((rows, 1), first + NUM_SENTINELS, text.dtype)
    targets = jnp.concatenate([targets, last], axis=1)
    counts = jnp.concatenate([counts, valid[:, -1:]], axis=1)
    shifted = jnp.concatenate([start, targets[:, :-1]], axis=1)
    return Example({"source": source, "tokens": shifted}, targets, counts.astype(jnp.float32))


def _text(batch: DeviceBatch) -> tuple[Array, Array]:
    """The window without its first token, and where a token is to be predicted: it is no padding,
    and the token before it is of the same text."""
    text, valid = batch["tokens"][:, 1:], batch.get("valid")
    if valid is None:
        valid = jnp.ones(text.shape, bool)
    elif valid.ndim == 1:
        valid = jnp.broadcast_to(valid[:, None], text.shape)
    if (segments := batch.get("segments")) is not None:
        valid &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return text, valid


def _random_spans(key: Array, batch: int, length: int, removed: int, spans: int) -> Array:
    """[B, T], True in the spans: kept pieces and spans alternate."""
    keys = jax.random.split(key)
    pieces = [
        _random_pieces(k, batch, total, spans)
        for k, total in zip(keys, (length - removed, removed), strict=True)
    ]
    ends = jnp.cumsum(jnp.stack(pieces, axis=-1).reshape(batch, -1), axis=1)
    passed = jnp.arange(length)[:, None] >= ends[:, None, :]
    return jnp.sum(passed, axis=-1) % 2 == 1


def _random_pieces(key: Array, batch: int, total: int, count: int) -> Array:
    """[B, count] numbers of at least 1 that sum to `total`: random cuts between the items."""
    draws = jax.random.uniform(key, (batch, total - 1))
    cuts = 1 + jnp.sort(jax.lax.top_k(draws, count - 1)[1], axis=1)
    ends = jnp.concatenate([jnp.zeros_like(cuts, shape=(batch, 1)), cuts], axis=1)
    return jnp.diff(ends, axis=1, append=total)


def _replace_runs(
    text: Array, valid: Array, is_replaced: Array, size: int, first: int
) -> tuple[Array, Array]:
    """Text and validity [B, size] with run k of `is_replaced` replaced by the token `first` + k."""
    begins = is_replaced & ~jnp.pad(is_replaced, [(0, 0), (1, 0)])[:, :-1]
    sentinels = first - 1 + jnp.cumsum(begins, axis=1, dtype=text.dtype)
    tokens, is_kept = jnp.where(begins, sentinels, text), begins | ~is_replaced
    order = jnp.argsort(~is_kept, axis=1, stable=True)[:, :size]
    return jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(valid, order, axis=1)


LANGUAGE = {
    "causal_lm": Objective(
        causal_lm, description="every next token", model_kinds=("decoder",), metrics=(bits("byte"),)
    ),
    "masked_lm": Objective(
        masked_lm,
        description="the tokens that were masked (15 %)",
        model_kinds=("encoder",),
        metrics=(bits("byte"),),
        special_tokens=("[mask]",),
    ),
    "span_corruption": Objective(
        span_corruption,
        description="the spans that were cut out (15 %, 3 tokens on average)",
        model_kinds=("encoder_decoder",),
        metrics=(bits("target token"),),
        special_tokens=(*(f"<{k}>" for k in range(NUM_SENTINELS)), "<start>"),
    ),
}
