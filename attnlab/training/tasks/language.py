"""Questions about a text: the next token, masked tokens, spans that were cut out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnlab.training.sources.source import BYTES, Batch, Sizes
from attnlab.training.tasks.task import Example, Task, bits

MASK_RATE = 0.15  # of masked_lm; its only own token is the mask

NUM_SENTINELS = 100  # of span_corruption: its own tokens, and the start token behind them
NOISE_DENSITY = 0.15
MEAN_SPAN = 3


def causal_lm(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """Predict every next token of `tokens` [B, T + 1].

    >>> causal_lm({"tokens": jnp.array([[5, 6, 7]])}, jax.random.key(0)).inputs["tokens"].tolist()
    [[5, 6]]
    """
    text, valid = _text(batch)
    return Example(
        {"tokens": batch["tokens"][:, :-1]}, text, valid.astype(jnp.float32), batch.get("bytes")
    )


def masked_lm(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """Predict 15 % of the tokens: 80 % of them masked, 10 % random, 10 % left as they are.

    Devlin et al. 2018, section 3.1, arXiv 1810.04805. The first token of the window is not used,
    so that all tasks are about the same text.

    >>> example = masked_lm({"tokens": jnp.zeros((4, 201), int)}, jax.random.key(0))
    >>> 0.1 < example.weights.mean() < 0.2
    Array(True, dtype=bool)
    """
    (targets, valid), mask = _text(batch), sizes.vocab_size
    chosen, fate, other = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(chosen, MASK_RATE, targets.shape)
    fate = jax.random.uniform(fate, targets.shape)
    other = jax.random.randint(other, targets.shape, 0, mask, targets.dtype)
    shown = jnp.where(fate < 0.8, mask, jnp.where(fate < 0.9, other, targets))
    inputs = jnp.where(chosen, shown, targets)
    weights = (chosen & valid).astype(jnp.float32)
    return Example({"tokens": inputs}, targets, weights, batch.get("bytes"))


def span_counts(length: int) -> tuple[int, int]:
    """(tokens that are hidden, spans they lie in) of a text of `length` tokens.

    hidden = round(0.15 length) and spans = round(hidden / 3), both at least 1; halves round to
    even. Raises ValueError where no token would be left or the sentinels do not suffice (one for
    each span and one for the end).

    >>> span_counts(64)
    (10, 3)
    """
    if length < 2:
        raise ValueError(f"span_corruption needs windows of 2 tokens at least, not {length}")
    hidden = max(round(length * NOISE_DENSITY), 1)
    spans = max(round(hidden / MEAN_SPAN), 1)
    if spans + 1 > NUM_SENTINELS:
        raise ValueError(
            f"span_corruption of windows of {length} tokens needs {spans + 1} sentinels, there are "
            f"{NUM_SENTINELS}; use a shorter length (1,990 is the longest)"
        )
    return hidden, spans


def span_corruption(batch: Batch, key: Array, sizes: Sizes = BYTES) -> Example:
    """Write the spans that were cut out of a text (T5; Raffel et al. 2020, section 3.1.4,
    arXiv 1910.10683): 15 % of the tokens in spans of 3 on average.

    The source is the text with span k replaced by sentinel k; the targets are sentinel 0, the
    tokens of span 0, sentinel 1, ..., and a last sentinel; the decoder reads the start token and
    the targets but the last. Of a vocabulary of V tokens (256 bytes) sentinel k is V + k, the start
    token V + 100.

    How many tokens and spans are cut (`span_counts`), and with them all lengths, depend on T alone:
    the source has T - hidden + spans tokens, the target hidden + spans + 1. As in T5's code, the
    lengths of the spans and of the pieces between them are drawn each from all ways to write their
    sum as that many numbers of at least 1, all equally likely; a text begins with a kept piece and
    ends with a span. A target counts where the token that it stands for is valid: a sentinel stands
    for the first token of what it replaces, the last sentinel for the last token of the text.

    >>> text = jnp.arange(ord("`"), ord("`") + 10)[None]
    >>> example = span_corruption({"tokens": text}, jax.random.key(0))
    >>> example.inputs["source"].tolist()
    [[97, 98, 99, 100, 101, 102, 103, 104, 256]]
    >>> example.targets.tolist(), example.inputs["tokens"].tolist()
    ([[256, 105, 257]], [[356, 256, 105]])
    """
    text, valid = _text(batch)
    rows, length = text.shape
    first = sizes.vocab_size
    count, spans = span_counts(length)
    hidden = _random_spans(key, rows, length, count, spans)
    source, _ = _replace_runs(text, valid, hidden, length - count + spans, first)
    targets, counts = _replace_runs(text, valid, ~hidden, count + spans, first)
    column = lambda token: jnp.full((rows, 1), token, text.dtype)
    targets = jnp.concatenate([targets, column(first + spans)], axis=1)
    counts = jnp.concatenate([counts, valid[:, -1:]], axis=1)
    shifted = jnp.concatenate([column(first + NUM_SENTINELS), targets[:, :-1]], axis=1)
    return Example({"source": source, "tokens": shifted}, targets, counts.astype(jnp.float32))


def _text(batch: Batch) -> tuple[Array, Array]:
    """The window without its first token, and which of it is text."""
    text, valid = batch["tokens"][:, 1:], batch.get("valid")
    return text, jnp.ones(text.shape, bool) if valid is None else valid


def _random_spans(key: Array, batch: int, length: int, hidden: int, spans: int) -> Array:
    """[B, T], True in the spans: pieces that are kept and spans take turns."""
    keys = jax.random.split(key)
    pieces = [
        _random_pieces(k, batch, total, spans)
        for k, total in zip(keys, (length - hidden, hidden), strict=True)
    ]
    ends = jnp.cumsum(jnp.stack(pieces, axis=-1).reshape(batch, -1), axis=1)
    passed = jnp.arange(length)[:, None] >= ends[:, None, :]
    return jnp.sum(passed, axis=-1) % 2 == 1


def _random_pieces(key: Array, batch: int, total: int, count: int) -> Array:
    """[B, count] numbers of at least 1 that sum to `total`: cuts at random between the items."""
    draws = jax.random.uniform(key, (batch, total - 1))
    cuts = 1 + jnp.sort(jax.lax.top_k(draws, count - 1)[1], axis=1)
    ends = jnp.concatenate([jnp.zeros_like(cuts, shape=(batch, 1)), cuts], axis=1)
    return jnp.diff(ends, axis=1, append=total)


def _replace_runs(
    text: Array, valid: Array, out: Array, size: int, first: int
) -> tuple[Array, Array]:
    """Text and validity [B, size] with run k of `out` replaced by the token `first` + k."""
    begins = out & ~jnp.pad(out, [(0, 0), (1, 0)])[:, :-1]
    sentinels = first - 1 + jnp.cumsum(begins, axis=1, dtype=text.dtype)
    shown, kept = jnp.where(begins, sentinels, text), begins | ~out
    order = jnp.argsort(~kept, axis=1, stable=True)[:, :size]
    return jnp.take_along_axis(shown, order, axis=1), jnp.take_along_axis(valid, order, axis=1)


ROWS = {
    "causal_lm": Task(causal_lm, "every next token", kinds=("decoder",), metrics=(bits("byte"),)),
    "masked_lm": Task(
        masked_lm,
        "the tokens that were masked (15 %)",
        kinds=("encoder",),
        metrics=(bits("byte"),),
        symbols=("[mask]",),
    ),
    "span_corruption": Task(
        span_corruption,
        "the spans that were cut out (15 %, 3 tokens on average)",
        kinds=("encoder_decoder",),
        metrics=(bits("target token"),),
        symbols=(*(f"<{k}>" for k in range(NUM_SENTINELS)), "<start>"),
    ),
}
